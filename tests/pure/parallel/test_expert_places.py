"""Where experts lie: every one somewhere, never worse than before, and each step on the way keeps that."""

from __future__ import annotations

import random

import pytest

from tokenmill.core.errors import ModelError
from tokenmill.parallel.experts import (
    Move,
    apply_move,
    balance_of,
    first_placement,
    loads,
    moves_between,
    place,
    rounds,
    routes,
    slots_of,
)

SIZES = [(4, 2, 0), (8, 2, 0), (8, 4, 0), (8, 4, 4), (8, 2, 8), (7, 3, 2), (60, 4, 4), (128, 8, 0), (128, 8, 16)]


def skewed(experts: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [int(drawn.paretovariate(0.8) * 10) - 10 for _ in range(experts)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_placements_and_the_way_between_them(sizes: tuple[int, int, int], seed: int) -> None:
    experts, ranks, redundant = sizes
    present = first_placement(experts, ranks, redundant)
    for turn in range(3):
        counts = skewed(experts, 10 * seed + turn)
        before = balance_of(counts, present, ranks)
        wanted = place(counts, list(present), ranks)
        assert wanted == place(counts, list(present), ranks), "the same for the same counts"
        assert len(wanted) == len(present) == slots_of(experts, ranks, redundant) * ranks
        assert set(wanted) == set(range(experts))
        assert balance_of(counts, wanted, ranks) >= before
        assert abs(sum(loads(counts, wanted, ranks)) - sum(counts)) < 1e-6 * max(1, sum(counts))
        assert place(counts, wanted, ranks) == wanted, "what is best stays"
        now = list(present)
        moves = moves_between(present, wanted)
        assert len(moves) <= len(present)
        for move in moves:
            apply_move(now, move)
            assert set(now) == set(range(experts)), "an expert is never lost on the way"
        assert now == wanted
        present = wanted


@pytest.mark.parametrize("sizes", SIZES)
def test_rounds_give_what_moves_give_one_by_one(sizes: tuple[int, int, int]) -> None:
    experts, ranks, redundant = sizes
    slots, present = slots_of(experts, ranks, redundant), first_placement(experts, ranks, redundant)
    wanted = place(skewed(experts, 5), present, ranks)
    moves, now = moves_between(present, wanted), list(present)
    for each in rounds(moves, slots):
        busy = [rank for move in each for rank in {move.to // slots, move.source // slots}]
        assert len(busy) == len(set(busy)), "a rank has part in one move at a time"
        before = list(now)
        for move in each:  # all at one time
            now[move.to] = before[move.source]
            if move.swap:
                now[move.source] = before[move.to]
    assert now == wanted


def test_hot_experts_get_apart_and_the_hottest_is_repeated() -> None:
    counts = [100, 100, 1, 1]
    assert balance_of(counts, [0, 1, 2, 3], 2) < 0.51
    wanted = place(counts, [0, 1, 2, 3], 2)
    assert balance_of(counts, wanted, 2) == 1.0
    one = [100, 0, 0, 0, 0, 0]
    present = first_placement(6, 2, 2)
    found = place(one, present, 2)
    assert found.count(0) == 2 and balance_of(one, found, 2) == 1.0 and {0} <= set(found[:4]) and {0} <= set(found[4:])
    assert place([0] * 6, present, 2) == present, "nothing is known: nothing moves"


def test_what_stays_keeps_its_slot() -> None:
    present = first_placement(8, 2, 0)
    wanted = place([50, 40, 30, 20, 1, 1, 1, 1], present, 2)
    assert sum(a != b for a, b in zip(present, wanted, strict=True)) <= 6
    assert sum(a == b for a, b in zip(present, wanted, strict=True)) >= 2


def test_tokens_take_an_experts_slots_in_turn() -> None:
    found = routes([0, 1, 0, 2], 3, 4)
    assert found == [0, 2, 0, 2, 1, 1, 1, 1, 3, 3, 3, 3]
    assert moves_between([0, 1], [1, 0]) == [Move(0, 1, swap=True)]


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(5, 2, 0), (4, 2, 5), (4, 3, 0), (4, 2, 1)])
def test_what_does_not_go_up_is_refused(experts: int, ranks: int, redundant: int) -> None:
    with pytest.raises(ModelError, match="experts"):
        slots_of(experts, ranks, redundant)
