"""Free requests of the training data: whatever is answered, called or told was in the request."""

from __future__ import annotations

import json
import random
import re

import pytest
from corpus import Corpus
from mixture import Mixture, makers
from render import Case
from skill_any_memory import any_memory
from skill_asked import asked_story
from skill_asked_zh import asked_story_zh
from skill_free_json import free_json
from skill_free_tools import PAIRS, done, free_tool, free_tool_zh
from skill_memory_zh import everyday_memory_zh
from skill_refusals import NO_TOOL
from suites import CALLS, judge
from tests.cpu.demo.demo_helpers import leaves
from topics import held_nouns
from verbs import VERBS
from vocabulary import ALWAYS_HELD, is_held

SENTENCE = re.compile(r"(?<=[.!?])[\"”]? (?=[\"A-Z])")


def _texts(case: Case) -> str:
    return "\n".join(m["content"] for m in case.messages if m["role"] == "user")


def test_free_json_copies_keys_and_values_of_the_request() -> None:
    rng = random.Random(1)
    requests, keys = set(), set()
    for _ in range(3000):
        case = free_json(rng)
        user, answer = case.messages[0]["content"], case.messages[1]["content"]
        assert judge(case, answer, True)["ok"] and json.loads(answer) == case.expect
        for leaf in leaves(case.expect):
            shown = str(leaf).lower() if isinstance(leaf, bool) else str(leaf)
            assert shown in user, (shown, user)
        keys |= set(case.expect) if isinstance(case.expect, dict) else set()
        requests.add(re.sub(r"\d+", "0", user))
    assert len(requests) > 2900 and len(keys) > 1500


def test_stories_hold_all_that_was_asked_for() -> None:
    rng = random.Random(2)
    counted = 0
    for _ in range(2000):
        case = asked_story(rng)
        user, text = (m["content"] for m in case.messages)
        assert judge(case, text, True)["ok"], (user, text)
        for wanted in re.findall(r"\(\?=\[\\s\\S\]\*((?:\\.|[^)\\])*)\)", case.must):
            assert re.search(wanted, user, re.I), (wanted, user)
        if case.tag != "0":
            counted += 1
            assert len(SENTENCE.split(text)) == int(case.tag), (user, text)
        assert not re.search(r"[\x05\x06]|\[\w", user + text)
    assert counted > 500


def test_a_story_that_was_asked_for_is_no_longer_than_asked_in_chinese() -> None:
    rng = random.Random(3)
    for _ in range(600):
        case = asked_story_zh(rng)
        user, text = (m["content"] for m in case.messages)
        assert judge(case, text, True)["ok"], (user, text)
        if case.tag != "0":
            assert len(re.findall("[。！？]”?", text)) == int(case.tag), (user, text)


def test_what_happens_in_a_story_holds_no_noun_kept_for_the_evaluation() -> None:
    from skill_asked import clause

    rng = random.Random(4)
    for _ in range(3000):
        told = clause(rng)
        assert not held_nouns() & {told.kind, told.object.split(" ", 1)[1]}


@pytest.mark.parametrize("make", [any_memory, everyday_memory_zh])
def test_any_fact_that_is_asked_for_was_told(make) -> None:
    rng = random.Random(5)
    swap = re.compile(r"\b(my|your|our|me|you|I|am|are|was|were)\b", re.I)
    for _ in range(1500):
        case = make(rng)
        told = swap.sub("", _texts(case)).lower()
        wanted = swap.sub("", re.sub(r"\\(.)", r"\1", case.must)).lower()
        assert re.search(case.must, case.messages[-1]["content"], re.I)
        assert wanted.removeprefix("你") in told, (case.must, told)


@pytest.mark.parametrize("make", [free_tool, free_tool_zh])
def test_free_calls_are_offered_and_filled_from_the_request(make) -> None:
    rng = random.Random(6)
    missing = 0
    for _ in range(1500):
        case = make(rng)
        user, answer = case.messages[0]["content"], case.messages[1]["content"]
        schemas = {t["name"]: t["parameters"]["properties"] for t in case.tools or []}
        if answer == NO_TOOL:
            missing += 1
            assert len(schemas) > 0
            continue
        assert CALLS.fullmatch(answer) and judge(case, answer, True)["ok"]
        for call in case.expect:
            assert call["arguments"].keys() <= schemas[call["name"]].keys()
            for key, value in call["arguments"].items():
                assert str(value) in user, (value, user)
                assert not ALWAYS_HELD & set(re.split("[_-]", key)), key
                kind = schemas[call["name"]][key]["type"]
                assert kind in ({str: ["string"], int: ["integer", "number"], float: ["number"]}[type(value)])
    assert make is free_tool_zh or 30 < missing < 250


def test_verbs_have_their_forms() -> None:
    forms = {v.base: (v.third, v.past, v.doing) for v in VERBS}
    assert forms["find"] == ("finds", "found", "finding")
    assert forms["look for"] == ("looks for", "looked for", "looking for")
    assert forms["carry"] == ("carries", "carried", "carrying")
    assert forms["win"] == ("wins", "won", "winning")
    assert forms["catch"] == ("catches", "caught", "catching")
    assert forms["enjoy"][:2] == ("enjoys", "enjoyed")
    assert not [v for v in VERBS if "_" in v.base or "/" in v.past]
    assert done("send") == "sent" and done("book") == "booked" and done("carry") == "carried"
    assert not [w for pair in PAIRS for text in pair for w in text.split(" ") if is_held(w)]


def test_free_requests_have_their_share_of_the_mixture() -> None:
    shares = {name: share for name, share, _ in makers(Corpus(), False)}
    free = sum(shares[k] for k in ("story_asked", "memory_any", "json_free", "tools_free"))
    asked = sum(shares[k] for k in ("json_own", "tools_own", "notes", "steps"))
    assert 0.12 < free / sum(shares.values()) < 0.3 and 0.12 < asked / sum(shares.values()) < 0.3
    rng, mixture = random.Random(7), Mixture(Corpus(), False)
    suites = {mixture.draw(rng)[1].suite for _ in range(3000)}
    assert {"json_free", "story_asked", "memory_any", "json_own", "tool_own", "memory_note", "two_steps"} <= suites
