"""The generator: answers are recomputed here, held-out wordings stay out of training, stories are varied."""

from __future__ import annotations

import json
import random
import re

import pytest
import skill_extract
import skill_math
import suites
from authored_data import load
from corpus import Corpus
from diversity import bits_per_character, distinct_windows
from grammar import expand, parse, tidy
from mixture import Mixture
from render import Case, case_segments
from stories import tell


def test_grammar_expands_nested_choices_and_slots() -> None:
    texts = {expand(parse("{a|b {c|d}} [x]"), random.Random(i), lambda name: name.upper()) for i in range(60)}
    assert texts == {"a X", "b c X", "b d X"}
    assert tidy("a owl sat. it saw a unicorn") == "An owl sat. It saw a unicorn"


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_arithmetic_answers_are_right(size: int) -> None:
    rng = random.Random(size)
    for _ in range(300):
        case = skill_math.arithmetic(rng, False, size)
        text = case.messages[-1]["content"] if case.messages else (case.prompt + case.continuation).splitlines()[-1]
        found = re.search(r"(-?\d+) ([+*-]) (\d+) = (-?\d+)", text)
        assert found, text
        a, sign, b, result = found.groups()
        real = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert real == int(result)
        assert re.search(case.must, text)


def test_carry_steps_of_the_thinking_part_are_right() -> None:
    rng = random.Random(5)
    for _ in range(300):
        a, sign, b, result = skill_math.operands(rng, 3)
        text = skill_math.thought(a, sign, b, result)
        assert str(result) in text
        for left, value in re.findall(r"([\d +-]+) = (-?\d+), write", text):
            total = 0
            for op, number in re.findall(r"([+-]?) ?(\d+)", left):
                total += -int(number) if op == "-" else int(number)
            assert total == int(value), text


def test_json_answers_hold_words_of_the_question() -> None:
    rng = random.Random(2)
    for _ in range(200):
        case = skill_extract.json_record(rng, rng.random() < 0.5)
        value = json.loads(case.messages[-1]["content"])
        question = case.messages[0]["content"]
        assert value == case.expect
        assert all(str(key) in question and str(v) in question for key, v in value.items())


@pytest.mark.parametrize("suite", sorted(suites.SUITES))
def test_every_reference_answer_passes_its_own_check(suite: str) -> None:
    for held in (False, True):
        for case in suites.items(suite, held, 25):
            assert suites.judge(case, case.messages[-1]["content"], True)["ok"]
            if case.must or case.check != "story":
                assert not suites.judge(case, "zzz <tool_call>", False)["ok"]


def test_held_out_wordings_are_not_training_wordings() -> None:
    for row in load().wordings.values():
        assert len(row["train"]) >= 4 and row["held"]
        assert not set(row["held"]) & set(row["train"]), row["intent"]


def _user_texts(case: Case) -> list[str]:
    return [m["content"] for m in case.messages if m["role"] == "user"]


def test_training_never_asks_in_a_held_out_wording() -> None:
    marks = [re.sub(r"\{.*|\[.*", "", h).strip() for row in load().wordings.values() for h in row["held"]]
    marks = [m for m in marks if len(m) > 22]
    rng, mixture = random.Random(8), Mixture(Corpus(), False)
    texts = [t for _ in range(3000) for t in _user_texts(mixture.draw(rng)[1])]
    assert len(marks) > 20
    for mark in marks:
        assert not [t for t in texts if t.startswith(mark)], mark


def test_every_skill_of_the_mixture_appears_and_ends_with_its_mark() -> None:
    rng, mixture = random.Random(4), Mixture(Corpus(), False)
    names = set()
    for _ in range(1500):
        name, case = mixture.draw(rng)
        names.add(name)
        segments = case_segments(case)
        assert segments[-1][0].endswith("<|endoftext|>")
        assert any(weight == 1.0 for _, weight in segments)
    assert names == {name for name, _, _ in mixture.makers}


def test_stories_hold_their_topic_and_are_varied() -> None:
    rng = random.Random(1)
    stories = [tell(rng) for _ in range(4000)]
    assert all(word in story.text for story in stories for word in story.must)
    texts = [s.text for s in stories]
    assert len(set(texts)) == len(texts)
    # At 20,000 stories the shares are 0.76 and 1.0 bits; fewer stories share fewer windows.
    assert distinct_windows(texts) >= 0.8
    assert bits_per_character(texts) >= 1.0


def test_needles_are_in_the_text_at_any_length() -> None:
    for length in (512, 2048, 8192):
        for case in suites.needle_items(length, 5):
            answer = case.messages[-1]["content"].rstrip(".")
            assert answer in case.messages[0]["content"]
            assert len(case.messages[0]["content"]) < length * 5
