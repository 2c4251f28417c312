"""Sums, later questions and keys put together: right, of told numbers, in thousands of forms."""

from __future__ import annotations

import random
import re

import pytest
from distinct import counts
from later_parts import CORES, LATER_HELD, next_step, said_later, said_later_zh
from rest_parts import rate, rest, three
from skill_expression import value, worked
from skill_keys import made_key
from skill_steps import follow_up, two_steps
from step_parts import account, account_zh, change, change_zh, two_prices


@pytest.mark.parametrize("make", [account, change, two_prices, account_zh, change_zh])
def test_a_sum_uses_every_number_that_it_tells_and_never_falls_below_zero(make: object) -> None:
    rng = random.Random(1)
    told = set()
    for _ in range(600):
        text, node = make(rng)  # type: ignore[operator]
        numbers = sorted(int(n) for n in re.findall(r"\d+", text))
        assert numbers == sorted(int(n) for n in re.findall(r"\d+", worked(node).split(" = ")[0])), text
        assert value(node) >= 0 and not re.search(r"[\[\]{}]", text), text
        steps = [eval(part, {"__builtins__": {}}) for part in worked(node).split(" = ")]
        assert len(set(steps)) == 1 and min(steps) >= 0
        told.add(re.sub(r"\d+", "0", text))
    assert len(told) > 420


def test_change_comes_from_a_note_told_first_or_last() -> None:
    rng = random.Random(2)
    first = 0
    for _ in range(400):
        text, node = change(rng)
        note = str(node[1])  # type: ignore[index]
        first += re.findall(r"\d+", text)[0] == note
    assert 120 < first < 280


def test_later_questions_name_their_number_and_are_never_those_of_the_evaluation() -> None:
    rng = random.Random(3)
    kept = {re.sub(r"\W", "", text.replace("{n}", "7").lower()) for texts in LATER_HELD.values() for text in texts}
    for kind in CORES:
        said = {said_later(rng, kind).replace("{n}", "7") for _ in range(1500)}
        assert len(said) > 600 and all(("7" in text) == (kind in "+-*/") for text in said)
        assert not kept & {re.sub(r"\W", "", text.lower()) for text in said}
        assert len({said_later_zh(rng, kind) for _ in range(600)}) > 100


def test_a_next_step_is_one_operation_on_the_result() -> None:
    rng = random.Random(4)
    for _ in range(500):
        now = rng.randint(0, 200)
        _, node = next_step(rng, now)
        assert node[1] == now and value(node) >= 0  # type: ignore[index]


def test_keys_are_made_of_any_parts() -> None:
    rng = random.Random(5)
    made = [made_key(rng) for _ in range(4000)]
    assert len(set(made)) > 3900 and not any(key[0].isdigit() or re.search(r"[^\w-]", key) for key in made)
    parts = [len(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", key)) for key in made]
    assert {1, 2, 3, 4} <= set(parts)
    for mark in ("_", "-", r"[a-z][A-Z]", r"\d", r"^[A-Z_\d]+$"):
        assert sum(bool(re.search(mark, key)) for key in made) > 150, mark


def test_sums_and_later_questions_vary() -> None:
    rng = random.Random(6)
    for make, texts in ((two_steps, 1480), (follow_up, 1450)):
        made = counts([make(rng) for _ in range(1500)])
        assert made["texts"] > texts and made["top"] < 20, made


@pytest.mark.parametrize(("make", "least"), [(rest, 300), (rate, 330), (three, 430)])
def test_rests_rates_and_threes_use_what_is_told(make: object, least: int) -> None:
    rng, told = random.Random(7), set()
    for _ in range(600):
        text, node = make(rng)  # type: ignore[operator]
        numbers = {int(n) for n in re.findall(r"\d+", text)}
        used = {int(n) for n in re.findall(r"\d+", worked(node).split(" = ")[0])}
        # A week, a fortnight and five days are told in words.
        assert numbers <= used and used - numbers <= {5, 7, 14}, (text, worked(node))
        assert value(node) > 0 and not re.search(r"[\[\]{}]", text), text
        told.add(re.sub(r"\d+", "0", text))
    assert len(told) > least
