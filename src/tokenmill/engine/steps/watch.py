"""Whether workers make progress. Owns: how long a step should take, and telling a long step from one that will never
end.

A worker that somebody stopped is noticed within seconds, and so are workers that all stand still. One that computes
without end is noticed when its step takes far longer than such steps did. Must not know: what steps compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenmill.process.vitals import STOPPED, state_of, work_of

QUIET_S = 2.0
"""How long workers that should compute may stand still."""
BUSY_S = 60.0
"""How long workers that compute may take for one operation on a CPU: attention to a long context takes many seconds,
and steps of as many tokens may have taken far less before."""
UNSEEN_S = 600.0
"""The same, wherever they compute, in a step unlike any before: nothing says how long it may take."""
STOPPED_S = 1.0
FACTOR = 3.0
"""How many times its expected duration a step may take before it counts as endless."""
LEAST_WORK = 0.02
"""The share of a core that separates a worker that computes from one that waits: its beats alone take far less."""
SHORT = 64
"""Steps of up to so many tokens all take about the same time: they read the weights once."""


class StepTimes:
    """How long steps have taken so far."""

    def __init__(self) -> None:
        self.short = 0.0
        self.per_token = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """Note how long a step of so many tokens took."""
        if tokens <= SHORT:
            self.short = max(self.short * 0.99, seconds)
        else:
            self.per_token = max(self.per_token * 0.99, seconds / tokens)

    def expect(self, tokens: int | None) -> float | None:
        """The expected seconds; None: no such step has been seen."""
        if tokens is None or not self.short or (tokens > SHORT and not self.per_token):
            return None
        return self.short + (self.per_token * tokens if tokens > SHORT else 0.0)


class Watch:
    """Watches the processes of one engine's ranks. on_device: they use a core while they wait for a GPU."""

    def __init__(self, pids: Sequence[int], *, on_device: bool) -> None:
        self.pids = pids
        self.on_device = on_device
        self.times = StepTimes()
        self.tokens: int | None = None
        self.began = self.moved = self.advanced = self.looked = time.monotonic()
        self.stopped: float | None = None
        self.work = [0.0] * len(pids)
        self.done = [(0, False)] * len(pids)
        self.states = [""] * len(pids)

    def begin(self, tokens: int | None) -> None:
        """From now on a step of so many tokens is waited for. None: something else is, which may take any time (a load,
        a command)."""
        self.tokens = tokens
        self.began = self.moved = self.advanced = self.looked = time.monotonic()
        self.stopped = None

    def end(self) -> None:
        """The step is done."""
        assert self.tokens is not None
        self.times.saw(self.tokens, time.monotonic() - self.began)

    def beat(self, rank: int, operations: int, waits: bool) -> None:
        """Note how far a rank says it is, and whether it waits for its device."""
        if (operations, waits) != self.done[rank]:
            self.done[rank] = operations, waits
            self.advanced = time.monotonic()

    def look(self) -> str | None:
        """Why waiting is pointless; None: the result may still come."""
        now = time.monotonic()
        late = now - self.looked
        if late < 0.05:
            return None
        self.looked = now
        if late > 1.0:  # this process itself stood still
            self.began, self.moved, self.advanced = self.began + late, self.moved + late, self.advanced + late
        work = [work_of(pid) for pid in self.pids]
        states = [state_of(pid) for pid in self.pids]
        starved = [one == other == "R" for one, other in zip(states, self.states, strict=True)]
        self.states = states
        worked = [new - old > LEAST_WORK * late for new, old in zip(work, self.work, strict=True)]
        if "D" in states or any(starved) or any(worked):  # starved: other processes use the cores that it needs
            self.moved = now
        self.work = work
        why = self.look_for_stopped(states)
        if why is not None:
            return why
        if now - self.moved > QUIET_S:
            return f"no rank has done anything for {now - self.moved:.1f} s"
        return self._look_for_endless(now)

    def _look_for_endless(self, now: float) -> str | None:
        took, still = now - self.began, now - self.advanced
        expected = self.times.expect(self.tokens)
        if expected is None:
            late = self.tokens is not None and still > UNSEEN_S
            return f"a step has taken {took:.1f} s, and nothing in it has ended for {still:.1f} s" if late else None
        waits = not self.on_device or all(waiting for _, waiting in self.done)
        if waits and took > FACTOR * expected + QUIET_S and still > (QUIET_S if self.on_device else BUSY_S):
            return f"a step has taken {took:.1f} s, where {expected:.2f} s were expected"
        return None

    def look_for_stopped(self, states: Sequence[str] | None = None) -> str | None:
        """Which worker somebody has stopped. states: as just read, if they were."""
        states = [state_of(pid) for pid in self.pids] if states is None else states
        stopped = [rank for rank, state in enumerate(states) if state in STOPPED]
        if not stopped:
            self.stopped = None
        elif self.stopped is None:
            self.stopped = time.monotonic()
        elif time.monotonic() - self.stopped > STOPPED_S:
            return f"rank {stopped[0]} was stopped"
        return None
