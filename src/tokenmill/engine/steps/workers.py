"""Runners in processes of their own, one for each rank, behind the Executor seam. Owns: starting them, sending every
plan to all, making one result of their answers, ending all when one is lost.

A plan crosses as one msgpack message; nothing is unpickled. The result of the last stage's first rank counts, once
every rank has done the step. The other stages are told what was chosen. A rank that fails the step fails it for all; a
rank that is gone or makes no progress ends them all. Must not know: scheduling, text.
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
from tokenmill.core.errors import EngineDeadError, EngineLostError, ModelError
from tokenmill.core.execution import Ticket
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.device.memory import pick_device
from tokenmill.engine.steps.executor import FailedTicket
from tokenmill.engine.steps.watch import Watch
from tokenmill.engine.steps.worker import (
    BEAT,
    CALLS,
    CHOSEN,
    CONTROL,
    FAILED,
    LATE,
    PLAN,
    RESULT,
    SHARED,
    Receipt,
    Start,
    digest_of,
)
from tokenmill.parallel.group import GIVEN_UP
from tokenmill.parallel.link import STAGE_FAILED, connect
from tokenmill.process.pipe import LOOK_S, Pipe
from tokenmill.process.start import start_process

START_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0
GONE = "the model's process is gone"
_HELD = ("weight_bytes", "kv_block_bytes", "adapter_bytes")
"""Facts that each rank has of its own part."""


@dataclass(slots=True)
class Rank:
    """One worker, with its answers that nobody has asked for yet."""

    process: Popen[bytes]
    pipe: Pipe
    results: deque[tuple[int, bytes]] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    operations: int = 0


@dataclass(slots=True)
class ProcessTicket:
    """A plan that has been sent to the workers."""

    executor: ProcessExecutor
    plan: StepPlan

    def ready(self) -> bool:
        """Have all ranks answered? This also checks the processes, so a lost rank is noticed here, too."""
        return self.executor.has_result_of(self.plan)

    def wait(self) -> StepResult:
        return self.executor.result_of(self.plan)


@dataclass(slots=True)
class ProcessExecutor:
    """Talks to the ranks of one engine, stage by stage; `depth` plans may be in flight. recovers: ranks that failed at
    different places can continue together in the next epoch. choosing: how many ranks the last stage has."""

    ranks: list[Rank]
    num_blocks: list[int]
    watch: Watch
    depth: int = 2
    overlaps: bool = True
    recovers: bool = True
    choosing: int = 1
    end: Callable[[], None] = lambda: None
    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    failed_epoch: int = -1
    awaited: int = -1

    @property
    def process(self) -> Popen[bytes]:
        """The first rank's process."""
        return self.ranks[0].process

    def submit(self, plan: StepPlan) -> Ticket:
        """Send a plan. One that cannot be encoded fails like a step, so smaller steps then find the request to
        blame."""
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
        """How many operations the ranks have run so far, by their last reports."""
        return sum(rank.operations for rank in self.ranks)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        assert not inputs.processors, "admission keeps Python callables out of other processes"
        self._send(LATE + self.encoder.encode((plan_id, inputs.masks)), self.ranks[-self.choosing :])

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a control message to the first rank; returns its answer."""
        return self._ask(self.ranks[:1], message)[0]

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank; they work on it at the same time."""
        return self._ask(self.ranks, message)

    def _ask(self, ranks: list[Rank], message: dict[str, Any]) -> list[dict[str, Any]]:
        self.watch.begin(None)
        self.awaited = -1  # a plan in flight is waited for anew
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
        """The files that become readable when a rank sends something."""
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
        """The plan's result, from the first rank of the last stage, once all ranks have finished it."""
        self._await(plan)
        for rank in self.ranks:
            while not rank.results:
                self._hear(rank)
        self.watch.end()
        said = [rank.results.popleft() for rank in self.ranks]
        speaks = len(said) - self.choosing
        result = msgspec.msgpack.decode(said[speaks][1], type=StepResult)
        others = [body for number, (_, body) in enumerate(said) if number != speaks]
        receipts = [msgspec.msgpack.decode(body, type=Receipt) for body in others]
        order = {result.plan_id, *(one.plan_id for one in receipts)}
        assert order == {plan.id}, "results come in plan order"
        failures = [failure for failure in (result.failure, *(one.failure for one in receipts)) if failure is not None]
        if failures:
            self.failed_epoch = plan.epoch
            alike = len(failures) == len(said) and len(set(failures)) == 1 and len({calls for calls, _ in said}) == 1
            failure = cause_of(failures)
            if not self.recovers and not alike:
                raise self._dead(f"a rank failed its step: {failure}")
            return StepResult(plan_id=plan.id, failure=failure)
        if self.choosing > 1 and any(one.digest != digest_of(result) for one in receipts[speaks:]):
            raise self._dead("the ranks chose different tokens")
        chosen = {row: new for row, new in zip(plan.rows, result.tokens, strict=True) if new} if speaks else {}
        if chosen:
            drafts = {plan.rows[i]: each for i, each in result.drafts.items() if plan.rows[i] in chosen}
            self._send(CHOSEN + self.encoder.encode((chosen, drafts)), self.ranks[:speaks])
        return result

    def check(self) -> None:
        """Nobody waits for the ranks, so this alone notices that one is lost."""
        self._poll()
        why = self.watch.look_for_stopped()
        if why is not None:
            raise self._dead(why)

    def close(self) -> None:
        """End all ranks."""
        self._end(STOP_TIMEOUT_S)

    def _send(self, message: bytes, ranks: list[Rank] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
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

    def _poll(self) -> None:
        if any(rank.process.poll() is not None for rank in self.ranks):
            raise self._dead(self._gone())

    def _gone(self) -> str:
        """Which rank is gone, and how, as far as the system says."""
        ended = [(number, code) for number, rank in enumerate(self.ranks) if (code := rank.process.poll()) is not None]
        return f"{GONE} (rank {ended[0][0]}: {_how(ended[0][1])})" if ended else GONE

    def _look(self) -> None:
        self._poll()
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
            raise self._dead(self._gone()) from error

    def _dead(self, reason: str) -> EngineDeadError:
        self._end(0.0)
        return EngineDeadError(reason)

    def _end(self, patience: float) -> None:
        end_ranks(self.ranks, patience)
        self.end()


def cause_of(failures: list[str]) -> str:
    """The failure that the others follow from: whoever waited for the rank that failed says only that it gave up."""
    return next((each for each in failures if not each.endswith((GIVEN_UP, STAGE_FAILED))), failures[0])


def end_ranks(ranks: list[Rank], patience: float) -> None:
    """Ask the ranks to end; kill those that do not."""
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
    """Start the processes of one engine and load the model into them; returns their executor and the model's facts."""
    size, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    device = pick_device(config.execute.device)
    joined = _make_connections(size, stages, on_cpu=device == "cpu")
    ranks: list[Rank] = []
    try:
        for number in range(size * stages):
            start = Start(config, rank=number % size, stage=number // size, meeting=joined.meeting)
            files = joined.give(start)
            links = LINKS if size * stages > 1 else {}
            ranks.append(Rank(*start_process("tokenmill.engine.steps.worker", f"rank {number}", files, links)))
            _tell_while_loading(ranks[-1], msgspec.msgpack.encode(start))
        joined.let_go()
        watch = Watch([rank.process.pid for rank in ranks], on_device=device != "cpu")
        facts = _loaded(ranks, watch)
    except BaseException:
        end_ranks(ranks, 0.0)
        joined.end()
        raise
    said = facts[-size]
    if device == "cpu":  # one memory holds the parts of all
        said |= {name: sum(each[name] for each in facts) for name in _HELD}
    executor = ProcessExecutor(
        ranks, said["num_blocks"], watch, recovers=joined.meeting is None or size == 1, choosing=size, end=joined.end,
        overlaps=stages == 1,
    )  # fmt: skip
    return executor, said


@dataclass(slots=True)
class _Connections:
    """How ranks reach each other. memories: the shared memory of each stage's ranks on a CPU. links: for each rank
    outside the last stage, its end and the end of the rank behind it."""

    memories: list[Any] = field(default_factory=list)
    links: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    meeting: str | None = None
    cleanup: Callable[[], None] = lambda: None

    def give(self, start: Start) -> list[int]:
        """Fill in a rank's connections; returns the files that it inherits."""
        if self.memories:
            start.memory = self.memories[start.stage].file
        start.behind = self.links.get((start.stage, start.rank), (None, None))[0]
        start.before = self.links.get((start.stage - 1, start.rank), (None, None))[1]
        return [file for file in (start.memory, start.before, start.behind) if file is not None]

    def let_go(self) -> None:
        """Close this process's copies of the links: each rank must notice when the other end is gone."""
        for file in (end for link in self.links.values() for end in link):
            os.close(file)
        self.links.clear()

    def end(self) -> None:
        """Let no rank wait for another any more."""
        self.let_go()
        for memory in self.memories:
            memory.close()
        self.cleanup()


def _make_connections(size: int, stages: int, *, on_cpu: bool) -> _Connections:
    """The connections for `size` ranks in each of `stages` stages; on a CPU without native kernels torch connects
    them."""
    memories = [_shared_memory(size) for _ in range(stages)] if on_cpu and size > 1 else []
    if size * stages > 1 and (not on_cpu or None in memories):
        folder = tempfile.TemporaryDirectory(prefix="tokenmill-")
        return _Connections(meeting=os.path.join(folder.name, "ranks"), cleanup=folder.cleanup)
    return _Connections(memories, {(stage, rank): connect() for stage in range(stages - 1) for rank in range(size)})


def _shared_memory(size: int) -> Any:
    """The shared memory of ranks on a CPU, if there are native kernels."""
    try:
        from tokenmill.parallel.shared_memory import Memory
    except ImportError:
        return None
    return Memory(size)


def _loaded(ranks: list[Rank], watch: Watch) -> list[dict[str, Any]]:
    """Each rank's facts about the model, once all have loaded; until then this passes the ranks' messages on to all."""
    until = time.monotonic() + START_TIMEOUT_S
    found: dict[int, bytes] = {}
    shared: dict[int, bytes] = {}
    while len(found) < len(ranks):
        for number in range(len(ranks)):
            if number in found or number in shared:
                continue
            message = _said_while_loading(ranks, number)
            if message is None:
                why = watch.look_for_stopped()
                if why is not None:
                    raise EngineLostError(f"{why} while it loaded the model")
                if time.monotonic() > until:
                    raise EngineDeadError(f"the model was not loaded within {START_TIMEOUT_S:.0f} s")
                continue
            if message[:1] == FAILED:
                raise ModelError(msgspec.msgpack.decode(message[1:]))
            if message[:1] == SHARED:
                shared[number] = message[1:]
            else:
                assert message[:1] == RESULT
                found[number] = message[1:]
        if len(shared) == len(ranks):
            every = SHARED + msgspec.msgpack.encode([msgspec.Raw(shared[number]) for number in range(len(ranks))])
            for rank in ranks:
                _tell_while_loading(rank, every)
            shared.clear()
    return [msgspec.msgpack.decode(found[number]) for number in range(len(ranks))]


def _tell_while_loading(rank: Rank, message: bytes) -> None:
    """Send this; that a rank is gone is noticed when its next message is read."""
    with contextlib.suppress(OSError, EOFError):
        rank.pipe.send(message)


def _said_while_loading(ranks: list[Rank], number: int) -> bytes | None:
    """What this rank says within a moment; raises if it has ended."""
    try:
        return ranks[number].pipe.receive(LOOK_S)
    except EOFError:
        with contextlib.suppress(TimeoutExpired):
            ranks[number].process.wait(1.0)
        code = ranks[number].process.poll()
        how = "" if code is None else f" ({_how(code)})"
        raise EngineLostError(f"rank {number} ended while it loaded the model{how}") from None


def _how(code: int) -> str:
    """How a process has ended."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"
