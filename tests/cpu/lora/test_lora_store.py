"""Adapters that are read while others are dropped from host memory."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from tokenmill.lora.store import LoraStore


class Slow(LoraStore):
    """A store whose adapters have been read when the test says so."""

    def __init__(self, most_kept: int) -> None:
        super().__init__(None, None, most_kept)  # type: ignore[arg-type]
        self.asked: list[int] = []
        self._pool: Any = self

    def submit(self, work: Any, number: int) -> Future[Any]:
        self.asked.append(number)
        return Future()

    def done(self, number: int) -> None:
        self.reading[number].set_result([])

    def state(self, *numbers: int) -> list[int]:
        found = self.command({"op": "state", "ids": list(numbers)})
        assert not found["failed"]
        ready: list[int] = found["ready"]
        return ready


def test_what_was_dropped_before_all_ranks_had_it_is_read_again() -> None:
    """Two ranks that keep one adapter each have read two in different orders: both adapters become ready."""
    ranks = Slow(1), Slow(1)
    for rank in ranks:
        for number in (1, 2):
            rank.command({"op": "read", "id": number, "path": "/an/adapter"})
    waiting, order = {1, 2}, ([2, 1], [1, 2])
    for turn in range(6):
        for rank, numbers in zip(ranks, order, strict=True):
            number = numbers[turn] if turn < 2 else next(iter(rank.reading), None)
            if number is not None:
                rank.done(number)
        waiting -= set.intersection(*(set(rank.state(*sorted(waiting))) for rank in ranks))
    assert not waiting
    assert all(len(rank.kept) == 1 for rank in ranks)
