"""Runners in processes of their own, one for each rank, behind the Executor seam. Owns: starting them, one plan to all,
one answer, one fate.

A plan crosses as one msgpack message; nothing is unpickled. The first rank's result counts, once every rank has done
the step. A rank that fails fails the step for all; one that is gone, or does not get on, ends them all. Must not know:
scheduling, text.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from subprocess import Popen, TimeoutExpired
from typing import Any

import msgspec

from tokenmill.core.config import LINKS, EngineConfig
from tokenmill.core.errors import EngineDeadError, ModelError
from tokenmill.core.execution import Ticket
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.device.memory import pick_device
from tokenmill.engine.executor import FailedTicket
from tokenmill.engine.watch import Watch
from tokenmill.engine.worker import (
    BEAT,
    CALLS,
    CONTROL,
    FAILED,
    LATE,
    PLAN,
    RESULT,
    Receipt,
    Start,
    digest_of,
)
from tokenmill.process.pipe import LOOK_S, Pipe
from tokenmill.process.start import start_process

START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0
GONE = "the model's process is gone"


@dataclass(slots=True)
class Rank:
    """One worker, and its answers that nobody has asked for yet."""

    process: Popen[bytes]
    pipe: Pipe
    results: deque[tuple[int, bytes]] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    operations: int = 0


@dataclass(slots=True)
class ProcessTicket:
    """A plan that the workers have been sent."""

    executor: ProcessExecutor
    plan: StepPlan

    def ready(self) -> bool:
        """Has everybody answered? Looks around as well: a rank that is lost is told here, too."""
        return self.executor.has_result_of(self.plan)

    def wait(self) -> StepResult:
        return self.executor.result_of(self.plan)


@dataclass(slots=True)
class ProcessExecutor:
    """Talks to the ranks of one engine; `depth` plans may be in flight. recovers: ranks that failed a step apart can go
    on together in the next epoch."""

    ranks: list[Rank]
    num_blocks: list[int]
    watch: Watch
    depth: int = 2
    chains: bool = True
    recovers: bool = True
    end: Callable[[], None] = lambda: None
    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    failed_epoch: int = -1
    awaited: int = -1

    @property
    def process(self) -> Popen[bytes]:
        """The first rank's."""
        return self.ranks[0].process

    def submit(self, plan: StepPlan) -> Ticket:
        """A plan that cannot be encoded fails as a step would: whose fault it is is found out by smaller steps."""
        try:
            if plan.epoch == self.failed_epoch:
                return FailedTicket(plan.id, "an earlier step failed")
            message = PLAN + self.encoder.encode(plan)
        except Exception as error:
            self.failed_epoch = plan.epoch
            return FailedTicket(plan.id, f"the step could not be sent ({type(error).__name__})")
        self._send(message)
        return ProcessTicket(self, plan)

    def progress(self) -> int:
        """Operations of the ranks so far, as they last said."""
        return sum(rank.operations for rank in self.ranks)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        assert not inputs.processors, "admission keeps Python callables out of other processes"
        self._send(LATE + self.encoder.encode((plan_id, inputs.masks)))

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Asks the first rank."""
        return self._ask(self.ranks[:1], message)[0]

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Asks every rank; they work on it at the same time."""
        return self._ask(self.ranks, message)

    def _ask(self, ranks: list[Rank], message: dict[str, Any]) -> list[dict[str, Any]]:
        self.watch.begin(0)
        for rank in ranks:
            with self._told():
                rank.pipe.send(CONTROL + self.encoder.encode(message), self._look)
        found: list[dict[str, Any]] = []
        for rank in ranks:
            while not rank.answers:
                self._hear(rank)
            found.append(msgspec.msgpack.decode(rank.answers.popleft()))
        return found

    @property
    def files(self) -> list[int]:
        """What is readable when a rank says something."""
        return [rank.pipe.sock.fileno() for rank in self.ranks]

    def has_result_of(self, plan: StepPlan) -> bool:
        """Would `result_of` answer at once?"""
        self._await(plan)
        self._look()
        return all(rank.results for rank in self.ranks)

    def _await(self, plan: StepPlan) -> None:
        if self.awaited != plan.id:
            self.awaited = plan.id
            self.watch.begin(plan.num_tokens)

    def result_of(self, plan: StepPlan) -> StepResult:
        """What the first rank says of the plan, when all have done it."""
        self._await(plan)
        for rank in self.ranks:
            while not rank.results:
                self._hear(rank)
        self.watch.end()
        said = [rank.results.popleft() for rank in self.ranks]
        result = msgspec.msgpack.decode(said[0][1], type=StepResult)
        receipts = [msgspec.msgpack.decode(body, type=Receipt) for _, body in said[1:]]
        order = {result.plan_id, *(one.plan_id for one in receipts)}
        assert order == {plan.id}, "results come in plan order"
        failures = [failure for failure in (result.failure, *(one.failure for one in receipts)) if failure is not None]
        if failures:
            self.failed_epoch = plan.epoch
            alike = len(failures) == len(said) and len(set(failures)) == 1 and len({calls for calls, _ in said}) == 1
            if not self.recovers and not alike:
                raise self._dead(f"a rank failed its step: {failures[0]}")
            return StepResult(plan_id=plan.id, failure=failures[0])
        if receipts and any(one.digest != digest_of(result) for one in receipts):
            raise self._dead("the ranks chose different tokens")
        return result

    def close(self) -> None:
        """End all ranks."""
        self._end(STOP_TIMEOUT_S)

    def _send(self, message: bytes) -> None:
        for rank in self.ranks:
            with self._told():
                rank.pipe.send(message, self._look)

    def _hear(self, rank: Rank) -> None:
        """Wait a while for something from this rank."""
        with self._told():
            message = rank.pipe.receive(LOOK_S)
        if message is not None:
            self._take(rank, message)
        else:
            self._look()

    def _take(self, rank: Rank, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        if kind == BEAT:
            rank.operations, waits = msgspec.msgpack.decode(body)
            self.watch.beat(self.ranks.index(rank), rank.operations, waits)
        elif kind == CONTROL:
            rank.answers.append(body)
        else:
            rank.results.append((CALLS.unpack_from(body)[0], body[CALLS.size :]))

    def _look(self) -> None:
        if any(rank.process.poll() is not None for rank in self.ranks):
            raise self._dead(GONE)
        with self._told():
            for rank in self.ranks:
                while (message := rank.pipe.receive(0.0)) is not None:
                    self._take(rank, message)
        why = self.watch.look()
        if why is not None:
            raise self._dead(f"the model's process hangs: {why}")

    @contextlib.contextmanager
    def _told(self) -> Any:
        try:
            yield
        except (EOFError, OSError, ValueError) as error:
            raise self._dead(GONE) from error

    def _dead(self, reason: str) -> EngineDeadError:
        self._end(0.0)
        return EngineDeadError(reason)

    def _end(self, patience: float) -> None:
        end_ranks(self.ranks, patience)
        self.end()


def end_ranks(ranks: list[Rank], patience: float) -> None:
    """Ask them to end, and make them."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.pipe.close()
    until = time.monotonic() + patience
    for rank in ranks:
        with contextlib.suppress(TimeoutExpired):
            rank.process.wait(max(0.0, until - time.monotonic()))
        if rank.process.poll() is None:
            rank.process.kill()
            rank.process.wait()


def start_ranks(config: EngineConfig) -> tuple[ProcessExecutor, dict[str, Any]]:
    """Start the processes of one engine and load the model into them; -> their executor and the first one's facts."""
    size = config.parallel.tensor_parallel_size
    device = pick_device(config.execute.device)
    start, end = Start(config, size=size), _nothing
    files: tuple[int, ...] = ()
    memory = _shared_memory(size) if size > 1 and device == "cpu" else None
    if memory is not None:
        start.memory, end = memory.file, memory.close
        files = (memory.file,)
    elif size > 1:
        start.meeting, end = _meeting()
    ranks: list[Rank] = []
    try:
        for number in range(size):
            started = start_process("tokenmill.engine.worker", f"rank {number}", files, LINKS if size > 1 else {})
            ranks.append(Rank(*started))
            start.rank = number
            ranks[-1].pipe.send(msgspec.msgpack.encode(start))
        facts = _loaded(ranks)
    except BaseException:
        end_ranks(ranks, 0.0)
        end()
        raise
    watch = Watch([rank.process.pid for rank in ranks], on_device=device != "cpu")
    return ProcessExecutor(ranks, facts["num_blocks"], watch, recovers=start.meeting is None, end=end), facts


def _nothing() -> None:
    """Nobody holds anything."""


def _shared_memory(size: int) -> Any:
    """For ranks on a CPU; None: without native kernels torch connects them."""
    try:
        from tokenmill.parallel.shared import Memory
    except ImportError:
        return None
    return Memory(size)


def _meeting() -> tuple[str, Callable[[], None]]:
    folder = tempfile.TemporaryDirectory(prefix="tokenmill-")
    return os.path.join(folder.name, "ranks"), folder.cleanup


def _loaded(ranks: list[Rank]) -> dict[str, Any]:
    """The facts of the first rank, when all have loaded."""
    until = time.monotonic() + START_TIMEOUT_S
    found: dict[int, bytes] = {}
    while len(found) < len(ranks):
        for number, rank in enumerate(ranks):
            if number in found:
                continue
            try:
                message = rank.pipe.receive(LOOK_S)
            except EOFError:
                raise EngineDeadError("the model's process ended while loading") from None
            if message is None:
                if time.monotonic() > until:
                    raise EngineDeadError(f"the model was not loaded within {START_TIMEOUT_S:.0f} s")
                continue
            if message[:1] == FAILED:
                raise ModelError(msgspec.msgpack.decode(message[1:]))
            assert message[:1] == RESULT
            found[number] = message[1:]
    facts: dict[str, Any] = msgspec.msgpack.decode(found[0])
    return facts
