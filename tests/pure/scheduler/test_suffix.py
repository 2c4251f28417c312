"""Suffix automata and their drafter against a search by hand; the control of how many drafts are made."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from tokenmill.speculate import suffix
from tokenmill.speculate.automaton import Automaton
from tokenmill.speculate.control import Control
from tokenmill.speculate.ngram import NgramDrafter
from tokenmill.speculate.patience import Careful, HostControl
from tokenmill.speculate.suffix import SuffixDrafter


def longest_repeat(tokens: list[int]) -> int:
    """Tokens of the longest end of the text that occurs before its end."""
    text = [str(t) for t in tokens]
    for n in range(len(text) - 1, 0, -1):
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n)):
            return n
    return 0


@pytest.mark.parametrize("kinds", [1, 2, 3, 9])
def test_an_automaton_finds_the_longest_end_that_occurred(kinds):
    rng = random.Random(kinds)
    for _ in range(20):
        automaton, other = Automaton(), [rng.randrange(kinds) for _ in range(30)]
        for _ in range(40):
            automaton.add(rng.randrange(kinds))
            matched, end = automaton.repeated()
            tokens = automaton.tokens
            assert matched == longest_repeat(tokens)
            assert not matched or (tokens[end - matched : end] == tokens[-matched:] and end < len(tokens))
        state, matched = 0, 0
        for n, token in enumerate(other, 1):
            state, matched = automaton.walk(state, matched, token)
            ends = [tuple(other[n - m : n]) for m in range(1, n + 1)]
            held = {tuple(automaton.tokens[i:j]) for i in range(40) for j in range(i + 1, 41)}
            assert matched == max((len(e) for e in ends if e in held), default=0)
            end = automaton.end[state]
            assert automaton.tokens[end - matched : end] == other[n - matched : n]


def sequence(tokens: list[int], number: int = 0, prompt: int = 0, salt: str = "") -> SimpleNamespace:
    """What a drafter sees."""
    group = SimpleNamespace(request=SimpleNamespace(adapter=0, salt=salt))
    return SimpleNamespace(id=number, tokens=list(tokens), num_prompt=prompt, group=group)


def test_the_longest_match_wins_and_is_worth_its_length():
    drafter = SuffixDrafter()
    assert drafter.propose(sequence([1, 2, 3, 4, 9, 1, 2, 3]), 8) == [4, 9, 1]
    assert drafter.propose(sequence([1, 2, 3, 4, 9, 1, 2, 3], 1), 2) == [4, 9]
    assert drafter.propose(sequence([1, 2, 3, 4, 5], 2), 8) == []
    growing = sequence([7, 8], 3)
    for token in (7, 8, 7):
        drafter.propose(growing, 4)
        growing.tokens.append(token)
    assert drafter.propose(growing, 4)[:1] == [8]


def test_answers_serve_others_of_the_same_tenant():
    drafter = SuffixDrafter()
    answer = [50, 51, 52, 53, 54, 55, 56]
    for number, salt in ((0, ""), (1, "tenant")):
        seq = sequence([1, 2, *answer], number, prompt=2, salt=salt)
        drafter.propose(seq, 4)
        if not salt:
            drafter.forget(seq)
    assert drafter.propose(sequence([9, 50, 51, 52], 2), 4) == [53, 54, 55]
    assert drafter.propose(sequence([9, 50, 51, 52], 3, salt="tenant"), 4) == []
    drafter.forget(sequence([], 1))
    assert set(drafter.indexes) == {2, 3}


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix, "GENERATION", 40)
    drafter = SuffixDrafter()
    for n in range(30):
        seq = sequence([0, *range(10 * n, 10 * n + 10)], n, prompt=1, salt=str(n // 20 * 3))
        drafter.propose(seq, 4)
        drafter.forget(seq)
        for m in range(max(0, n - 1), n + 1):
            wanted = [10 * m + 3, 10 * m + 4] if m // 20 == n // 20 else []
            asked = sequence([10 * m + 1, 10 * m + 2], 1000 + n * 40 + m, salt=seq.group.request.salt)
            assert drafter.propose(asked, 4) == wanted
    assert all(len(g.text.tokens) <= 44 for s in drafter.stores.values() for g in s.generations)
    assert len(drafter.stores) == 2
    drafter = SuffixDrafter(kept=0)
    drafter.propose(seq, 4)
    drafter.forget(seq)
    assert not any(g.answers for s in drafter.stores.values() for g in s.generations)


def test_wrong_guesses_ask_for_longer_matches():
    drafter, seq = SuffixDrafter(), sequence([1, 2, 3, 1, 2])
    assert drafter.propose(seq, 4)
    drafter.observe(seq, 2, 0)
    assert not drafter.propose(seq, 4)
    drafter.observe(seq, 2, 2)
    assert drafter.propose(seq, 4)


def follow(control: Control, rows: int, p: float, seconds, steps: int = 1500) -> list[int]:
    """Depths that a control chooses when drafts survive with probability p and steps take seconds(rows, depth)."""
    rng, depths = random.Random(1), []
    for _ in range(steps):
        depth = control.depth(rows)
        depths.append(depth)
        for _ in range(rows):
            accepted = 0
            while accepted < depth and rng.random() < p:
                accepted += 1
            if depth:
                control.observe(depth, accepted)
        control.timed(rows, depth, seconds(rows, depth) * rng.uniform(1.0, 1.1))
    return depths


def test_one_row_gets_all_drafts_and_a_crowd_gets_none():
    """Steps of one row cost what reading the weights does; those of many cost as much as their tokens."""
    seconds = lambda rows, depth: max(1.0, rows * (1 + depth) / 64) + 0.1 * depth  # noqa: E731
    control = Control(4, None, 10_000)
    alone, crowd = follow(control, 1, 0.8, seconds), follow(control, 200, 0.8, seconds)
    assert sum(alone[500:]) > 0.95 * 4 * 1000
    assert any(crowd[:20]) and sum(d > 0 for d in crowd[500:]) < 0.04 * 1000
    assert sum(follow(control, 1, 0.8, seconds, 200)) > 0.9 * 4 * 200, "what was learnt is kept"


def test_drafts_that_fail_are_given_up_and_taken_up_again():
    control = Control(4, None, 10_000)
    seconds = lambda rows, depth: 1.0 + 0.1 * depth  # noqa: E731
    assert sum(follow(control, 1, 0.02, seconds, 3000)[1500:]) < 0.1 * 1500
    assert sum(follow(control, 1, 0.9, seconds, 6000)[5000:]) > 3 * 1000


def test_rows_and_tokens_are_bounded():
    control = Control(4, 8, 16)
    assert [control.depth(rows) for rows in (0, 9)] == [0, 0]
    assert control.depth(8) <= 2 and control.depth(5) <= 3


@pytest.mark.parametrize("drafter", [NgramDrafter(2, 2), SuffixDrafter()])
def test_text_in_which_guesses_fail_is_nearly_left_alone(drafter):
    """Pairs come again and again, and never what followed them; then they do, and it is found out soon."""
    rng, seq = random.Random(0), sequence([1, 2])
    control = HostControl()
    drafter, tried = Careful(drafter, control), 0

    def propose() -> list[int]:
        control.depth(1)
        guesses = drafter.propose(seq, 4)
        control.worked(1 + len(guesses), 1, 1 + 0.2 * len(guesses))
        return guesses

    for _ in range(1500):
        guesses = propose()
        after = rng.randrange(4) if len(seq.tokens) % 3 else rng.randrange(1000, 9000)
        wrong = len(guesses)
        seq.tokens.append(after)
        if guesses:
            tried += wrong
            drafter.observe(seq, wrong, 0)
    assert 0 < tried < 0.08 * 1500  # at a fifth of a step each they cost less than 2 %
    stem, right = [20, 21, 22, 23, 24, 25, 26], 0
    for n in range(400):
        guesses = propose()
        seq.tokens.append(stem[n % 7])
        if guesses:
            good = next((i for i, g in enumerate(guesses) if g != stem[(n + i) % 7]), len(guesses))
            right += good
            drafter.observe(seq, len(guesses), good)
    assert right > 400
