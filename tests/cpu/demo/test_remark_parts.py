"""Remarks put together: a question is answered with what was told, seen from the other side; nothing is held out."""

from __future__ import annotations

import random
import re

import pytest
from held_out import is_remark
from remark_parts import composed_remark, third, turned
from skill_notes import KEEP_HELD, WANT_HELD, is_kept_keeping, is_kept_wanting, notes
from skill_notes_zh import notes_zh


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("I sold my lamp to our aunt", "you sold your lamp to your aunt"),
        ("We are at home with me", "You are at home with you"),
        ("my aunt's dog is mine", "your aunt's dog is yours"),
        ("Tommy and Ian meet", "Tommy and Ian meet"),
    ],
)
def test_what_is_told_back_is_seen_from_the_other_side(said: str, told: str) -> None:
    assert turned(said) == told


def test_third_persons() -> None:
    made = [third(base) for base in ("have to go", "carry it", "play", "wash up", "be late", "go home")]
    assert made == ["has to go", "carries it", "plays", "washes up", "is late", "goes home"]


def test_questions_for_a_remark_are_answered_with_what_was_told() -> None:
    rng = random.Random(1)
    said, asked = set(), set()
    for _ in range(2500):
        remark = composed_remark(rng)
        said.add(remark.said)
        told = set(re.findall(r"[\w.:@'-]+", turned(remark.said).lower().rstrip(".")))
        assert not re.search(r"[\[\]{}]", remark.said)
        for question, answer, must in remark.asks:
            asked.add(question)
            assert question.endswith("?") and re.search(must, answer), (question, answer, must)
            assert not re.search(r"\b(my|our|I|me)\b(?![-'\d])", answer), answer
            assert not re.search(must, turned(question)), (question, must)
            # Every word of the answer was told, but for `it`, which stands for what was named before.
            new = set(re.findall(r"[\w.:@'-]+", answer.lower().rstrip("."))) - told
            assert len(new) <= 1, (remark.said, answer, new)
    assert len(said) > 2480 and len(asked) > 6000


def test_nothing_that_is_kept_is_told_or_asked_in_a_held_out_way() -> None:
    rng = random.Random(2)
    assert is_remark("Who leads my choir?") and is_remark("I own a red tent for 4 people.")
    for kept, forms in ((is_kept_keeping, KEEP_HELD), (is_kept_wanting, WANT_HELD)):
        assert all(kept(form.replace("{k}", "door code").replace("{v}", "7")) for form in forms)
    wanted = set()
    for _ in range(2500):
        case = notes(rng)
        for message in case.messages:
            if message["role"] == "user":
                for line in re.split(r"(?<=[.?!])\s", message["content"]):
                    assert not is_kept_keeping(line) and not is_kept_wanting(line), line
        wanted.add(case.messages[-2]["content"])
    assert len(wanted) > 2000


def test_chinese_remarks_are_answered_with_what_was_told() -> None:
    rng = random.Random(3)
    asked = set()
    for _ in range(1500):
        case = notes_zh(rng)
        answer = case.messages[-1]["content"]
        asked.add(case.messages[-2]["content"])
        told = "".join(m["content"] for m in case.messages if m["role"] == "user")
        assert re.search(case.must, answer) and "我" not in answer, answer
        assert set(answer) - set("你。") <= set(told), (told, answer)
    assert len(asked) > 1480
