"""Happenings, remarks and sums of steps: what is answered was told, or is computed again here."""

from __future__ import annotations

import json
import random
import re

import pytest
from authored_data import rows
from render import Case
from scenes import COUNTED, KINDS, scenes, tell
from skill_notes import KEEP, KEEP_HELD, WANT, WANT_HELD, notes
from skill_scene_json import HELD_FILL, HELD_FORMS, ZH_FORMS, ZH_HELD, scene_json
from skill_scene_tools import scene_tool
from skill_steps import follow_up, two_steps
from skill_time import time_sum
from skill_zh import PEOPLE
from suites import judge
from tests.cpu.demo.demo_helpers import leaves

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def _seen(value: object, text: str) -> bool:
    """Whether a value stands in a text: a number also in words, true and false in any way."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int) and 0 < value < 13 and COUNTED[value - 1] in text:
        return True
    return str(value) in text


@pytest.mark.parametrize("held", [False, True])
def test_keys_and_values_of_a_happening_are_those_of_the_request(held: bool) -> None:
    rng = random.Random(1)
    requests, keys, computed = set(), set(), 0
    for _ in range(2500):
        case = scene_json(rng, held)
        user, answer = case.messages[0]["content"], case.messages[1]["content"]
        assert judge(case, answer, True)["ok"] and json.loads(answer) == case.expect
        missing = [leaf for leaf in leaves(case.expect) if not _seen(leaf, user)]
        computed += len(missing) > 0
        # Only a total or a count is not told, and it is a number.
        assert all(isinstance(leaf, int) for leaf in missing) and len(missing) <= 1, (missing, user)
        keys |= set(case.expect) if isinstance(case.expect, dict) else set()
        requests.add(re.sub(r"\d+", "0", user))
    assert computed < 200
    assert held or (len(requests) > 2400 and len(keys) > 700)


def test_what_a_sentence_denies_is_false_and_codes_stay_in_the_schema() -> None:
    scene = next(s for s in scenes(False, False) if s.name == "invoice")
    rng = random.Random(2)
    for _ in range(50):
        told = tell(rng, scene, "[client] owes [sum] [cur] and <paid:has paid|has not paid yet>.", coded=True)
        assert told.values["paid"] == ("has paid" in told.text)
        assert told.values["cur"] in ("EUR", "USD", "GBP")


def test_held_out_happenings_and_wordings_are_in_no_training_text() -> None:
    table = rows("scenes.jsonl")
    assert len({row["scene"] for row in table}) == len(table)
    kept = {s.name for s in scenes(True, False)} | {s.name for s in scenes(True, True)}
    assert len(kept) >= 6 and not kept & {s.name for s in (*scenes(False, False), *scenes(False, True))}
    said = {text for row in table if not row.get("held") for text in (*row["says"], *row.get("asks", []))}
    assert not said & {text for row in table if row.get("held") for text in (*row["says"], *row.get("asks", []))}
    forms = HELD_FORMS + HELD_FILL + ZH_HELD
    marks = [re.split(r"\[\w\]", form)[0] or re.split(r"\[\w\]", form)[1] for form in forms]
    rng = random.Random(3)
    texts = [scene_json(rng).messages[0]["content"] for _ in range(3000)]
    assert not [text for text in texts for mark in marks if mark.strip() in text]
    assert not set(ZH_FORMS) & set(ZH_HELD) and not set(KEEP) & set(KEEP_HELD) and not set(WANT) & set(WANT_HELD)


def test_a_tool_is_named_in_whole_where_held_out_words_may_stand() -> None:
    rng = random.Random(9)
    whole = {name.replace(" ", "") for scene in scenes(True, True) for name in scene.tool[0]}
    for _ in range(600):
        called = re.sub("[^a-z]", "", scene_tool(rng, True).expect[0]["name"].lower())
        assert any(called.endswith(name) for name in whole), called


def test_what_is_kept_or_farmed_is_no_person() -> None:
    rng = random.Random(10)
    beasts = {str(KINDS["zh_animal"](rng)) for _ in range(500)}
    assert len(beasts) > 25 and not beasts & PEOPLE


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        ("Who leads my choir?", "{} leads the choir.", "I am a tiny demo model and I do not know that."),
        ("Which locker is mine?", "Your locker number is {}.", "Your locker number is 1{}."),
        ("How many people fit into my tent?", "It is for {} people.", "Your tent is green."),
        ("Where did I live before?", "You moved from {} to Rome.", "You moved to {}."),
        ("By which date must I return the book?", "You return the book on {}.", "You return the book."),
    ],
)
def test_a_remark_is_known_by_what_was_told_not_by_the_words_around_it(question: str, right: str, wrong: str) -> None:
    rng = random.Random(11)
    row = next(r for r in rows("remarks.jsonl") if question in [ask[0] for ask in r["asks"]])
    template = next(ask[1] for ask in row["asks"] if ask[0] == question)
    asked = 0
    while asked < 20:
        case = notes(rng, True)
        if case.messages[-2]["content"] != question:
            continue
        asked += 1
        pattern = re.sub(r"\\?\[\w+\\?\]", "(.+)", re.escape(template))
        told = re.fullmatch(pattern, case.messages[-1]["content"])[1]
        assert judge(case, right.format(told), True)["ok"] and not judge(case, wrong.format(told), True)["ok"], told


@pytest.mark.parametrize("held", [False, True])
def test_orders_fill_the_tool_that_is_offered_with_values_of_its_types(held: bool) -> None:
    rng = random.Random(4)
    kinds: set[str] = set()
    missing = 0
    for _ in range(2500):
        case = scene_tool(rng, held)
        user = case.messages[0]["content"]
        offered = {t["name"]: t["parameters"] for t in case.tools or []}
        if case.check == "no_call":
            missing += 1
            assert offered
            continue
        assert judge(Case(**{**vars(case), "messages": case.messages[:2]}), case.messages[1]["content"], True)["ok"]
        (call,) = case.expect
        properties = offered[call["name"]]["properties"]
        assert set(offered[call["name"]]["required"]) <= call["arguments"].keys() <= properties.keys()
        for key, value in call["arguments"].items():
            kind = properties[key]["type"]
            kinds.add("enum" if "enum" in properties[key] else kind)
            fits = {str: ["string"], bool: ["boolean"], int: ["integer", "number"], float: ["number"], list: ["array"]}
            assert kind in fits[type(value)], (key, value, kind)
            if "enum" in properties[key]:
                assert value in properties[key]["enum"]
            else:
                assert all(_seen(leaf, user) for leaf in leaves(value)), (value, user)
    assert held or kinds == {"enum", "string", "boolean", "integer", "number", "array"}
    assert held or 60 < missing < 350


def test_remarks_are_asked_for_in_other_words_and_answered_with_what_was_told() -> None:
    rng = random.Random(5)
    swap = re.compile(r"\b(my|your|our|me|you|I|am|are|was|were)\b|\W", re.I)
    for held in (False, True):
        for _ in range(1500):
            case = notes(rng, held)
            assert not re.search(r"[\[\]{}]", "".join(m["content"] for m in case.messages))
            assert re.search(case.must, case.messages[-1]["content"])
            told = " ".join(m["content"] for m in case.messages if m["role"] == "user")
            # Names, numbers and codes of the answer were told; the words around them are its own.
            for token in re.findall(r"\b[A-Z]?[a-z]*\d[\w:.@-]*|(?<!^)\b[A-Z][a-z]{3,}", case.messages[-1]["content"]):
                assert swap.sub("", token) in swap.sub("", told), (token, told)
    said = {text for row in rows("remarks.jsonl") if not row.get("held") for text in row["says"]}
    assert not said & {text for row in rows("remarks.jsonl") if row.get("held") for text in row["says"]}
    assert sum(bool(row.get("held")) for row in rows("remarks.jsonl")) >= 5


def _chain(answer: str) -> list[float]:
    """The value of each expression of an answer, computed by Python."""
    return [eval(part, {"__builtins__": {}}) for part in answer.rstrip(".。").split(" = ")]


@pytest.mark.parametrize("held", [False, True])
def test_sums_of_steps_keep_their_value_and_use_the_numbers_that_were_told(held: bool) -> None:
    rng = random.Random(6)
    for _ in range(2000):
        case = two_steps(rng, held)
        user, answer = (m["content"] for m in case.messages)
        values = _chain(answer)
        assert len(set(values)) == 1 and values[0] >= 0 and len(values) > 2, (user, answer)
        assert re.search(case.must, answer)
        told = set(re.findall(r"\d+", user)) | {str(i + 1) for i, word in enumerate(COUNTED) if word in user.lower()}
        assert set(re.findall(r"\d+", answer.split(" = ")[0])) <= told, (user, answer)
        assert not re.search(r"[\[\]{}]", user)


def test_a_later_question_goes_on_from_the_result_before() -> None:
    rng = random.Random(7)
    longest = 0
    for held in (False, True):
        for _ in range(1500):
            case = follow_up(rng, held)
            answers = [m["content"] for m in case.messages if m["role"] == "assistant" and "=" in m["content"]]
            chains = [_chain(answer) for answer in answers]
            assert all(len(set(chain)) == 1 for chain in chains)
            for chain, later in zip(chains, answers[1:], strict=False):
                assert later.startswith(f"{int(chain[-1])} "), answers
            assert re.search(case.must, answers[-1]) and len(answers) > 1
            longest = max(longest, len(answers))
    assert longest == 4


def test_days_dates_and_hours_are_reckoned_rightly() -> None:
    rng = random.Random(8)
    days = 0
    for _ in range(3000):
        case = time_sum(rng)
        user, answer = (m["content"] for m in case.messages)
        assert re.search(case.must, answer) and not re.search(r"[\[\]{}]", user), (user, answer)
        if match := re.fullmatch(r"(\d+) days (after|before) (\w+) is (\w+)\.", answer):
            days += 1
            shift = int(match[1]) * (1 if match[2] == "after" else -1)
            assert DAYS[(DAYS.index(match[3]) + shift) % 7] == match[4]
            assert match[3] in user and match[1] in user
        elif "=" in answer:
            left, _, right = answer.partition(" = ")
            assert eval(left, {"__builtins__": {}}) == int(re.match(r"\d+", right)[0])
    assert days > 300
