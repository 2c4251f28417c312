"""Deadlines of many connections and events that are made late."""

from __future__ import annotations

import asyncio
from typing import Any

from tokenmill.server.deadlines import A_SECOND, Deadlines
from tokenmill.server.transport import Flow, LateEvent


class Clock:
    """An event loop as far as deadlines need one."""

    def __init__(self) -> None:
        self.now = 100.1
        self.calls: list[tuple[float, Any, Any]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, ring: Any, due: int) -> None:
        self.calls.append((when, ring, due))

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        due = [call for call in self.calls if call[0] <= self.now]
        self.calls = [call for call in self.calls if call[0] > self.now]
        for _, ring, which in sorted(due, key=lambda call: call[0]):
            ring(which)


class Visitor:
    due: int | None = None

    def __init__(self, clock: Clock, deadlines: Deadlines) -> None:
        self.clock, self.deadlines, self.ended = clock, deadlines, 0.0
        self.others: list[Visitor] = []

    def within(self, seconds: float) -> None:
        self.stop()
        self.due = self.deadlines.add(self.clock, self, seconds)  # type: ignore[arg-type]

    def stop(self) -> None:
        if self.due is not None:
            self.deadlines.drop(self, self.due)
            self.due = None

    def late(self) -> None:
        self.ended = self.clock.now
        for other in self.others:
            other.stop()


def test_deadlines_come_once_never_early_and_share_timers() -> None:
    clock, deadlines = Clock(), Deadlines()
    many = [Visitor(clock, deadlines) for _ in range(100)]
    for i, one in enumerate(many):
        one.within(1 + i / 50)
    assert len(clock.calls) <= 2 * A_SECOND + 1
    many[99].within(1)  # earlier than it was
    many[0].within(10)  # later
    for one in many[1:10]:
        one.stop()
    began = clock.now
    for _ in range(400):
        clock.pass_(0.01)
    for i, one in enumerate(many[10:99], 10):
        assert 1 + i / 50 <= one.ended - began <= 1 + i / 50 + 1 / A_SECOND + 0.011 and one.due is None
    assert many[99].ended - began <= 1 + 1 / A_SECOND + 0.011
    assert not any(one.ended for one in many[:10]) and many[0].due is not None
    clock.pass_(10)
    assert many[0].ended and not clock.calls and not deadlines._ends


def test_who_ends_another_in_the_same_moment_ends_it_for_good() -> None:
    clock, deadlines = Clock(), Deadlines()
    pair = [Visitor(clock, deadlines) for _ in range(2)]
    for one, other in (pair, pair[::-1]):
        one.others = [other]
        one.within(1)
    clock.pass_(2)
    assert sum(one.ended > 0 for one in pair) == 1


async def test_a_late_event_wakes_all_who_wait_and_outlives_those_who_left() -> None:
    event = LateEvent()
    tasks = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert not event.is_set() and not tasks[0].done()
    event.set()
    await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 60)
    await event.wait()
    event.clear()
    again = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not again.done()
    event.set()
    await asyncio.wait_for(again, 60)


async def test_writers_wait_while_the_client_takes_nothing() -> None:
    flow = Flow(None)  # type: ignore[arg-type]
    await flow.drain()
    flow.pause_writing()
    assert flow.write_paused
    writer = asyncio.create_task(flow.drain())
    await asyncio.sleep(0)
    assert not writer.done()
    flow.resume_writing()
    await asyncio.wait_for(writer, 60)
    assert not flow.write_paused
