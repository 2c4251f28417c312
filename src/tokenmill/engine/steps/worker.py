"""What runs in a worker's process: one rank's runner. Owns: loading it, plans in and results out, its heartbeat.

All ranks get the same plans. The first rank of the last stage returns the results. The others report that they are
done; ranks that choose tokens add a digest of them. Stages that do not choose are told the chosen tokens before a plan
that goes on from there. A GPU gets the next plan before the results of the last one are read. Must not know:
scheduling, text.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from typing import Any

import msgspec

from tokenmill.compute.model import Group
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDeadError
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.device.memory import pick_device, records, use
from tokenmill.engine.load.loading import device_of, load_runner
from tokenmill.engine.load.sharing import place_of
from tokenmill.engine.options.checks import left_out
from tokenmill.engine.steps.executor import InProcessExecutor, InProcessTicket, answer, only_asks, operations
from tokenmill.parallel.group import SoloGroup
from tokenmill.parallel.link import SocketLink
from tokenmill.parallel.stages import Mesh, Place
from tokenmill.process.pipe import Pipe
from tokenmill.process.start import own_end

PLAN, LATE, CONTROL, RESULT, FAILED, BEAT, SHARED, CHOSEN = b"p", b"l", b"c", b"r", b"f", b"b", b"s", b"t"
CALLS = struct.Struct(">Q")
"""The header of a result: how often the rank has met the others."""
BEAT_S = 0.5
"""How often a busy worker reports its progress."""
DEPTH = 2
"""How many plans a device gets before the results of the first come back."""


class Start(msgspec.Struct):
    """What a rank must know at its start. rank: its number within its stage. memory: the file of the stage's shared
    memory. meeting: a file through which all ranks meet. before, behind: its sockets to the stages around it."""

    config: EngineConfig
    rank: int = 0
    stage: int = 0
    memory: int | None = None
    meeting: str | None = None
    before: int | None = None
    behind: int | None = None

    @property
    def size(self) -> int:
        """How many ranks a stage has."""
        return self.config.parallel.tensor_parallel_size

    @property
    def place(self) -> Place:
        """This rank's place among the stages."""
        return place_of(self.config, self.stage)


class Receipt(msgspec.Struct, array_like=True):
    """What every rank reports about a step, except the one that sends the result. digest: 0 if it chooses no tokens."""

    plan_id: int
    digest: int
    failure: str | None = None


def digest_of(result: StepResult) -> int:
    """A digest of the tokens: all ranks must have chosen the same."""
    return zlib.crc32(msgspec.msgpack.encode(result.tokens))


def make_mesh(start: Start, pipe: Pipe) -> Mesh:
    """This rank's place, and its connections to the others."""

    def share(said: Any) -> list[Any]:
        pipe.send(SHARED + msgspec.msgpack.encode(said))
        message = pipe.receive()
        assert message is not None and message[:1] == SHARED
        found: list[Any] = msgspec.msgpack.decode(message[1:])
        return found

    place = start.place
    if start.meeting is None:
        group: Group = SoloGroup()
        if start.memory is not None:
            from tokenmill.parallel.shared_memory import SharedGroup

            group = SharedGroup(start.memory, start.rank, start.size)
        if place.stages == 1:
            return Mesh(group, place)
        return Mesh(group, place, share, lambda inbox: SocketLink(start.before, start.behind, inbox))
    from tokenmill.parallel.distributed import World

    device = device_of(start.config, start.stage * start.size + start.rank)
    use(device)
    world = World(start.meeting, place, start.rank, start.size, device)
    group = _torch_group(start, world, device)
    if place.stages == 1:
        return Mesh(group, place)
    return Mesh(group, place, share, world.link)


def _torch_group(start: Start, world: Any, device: str) -> Group:
    from tokenmill.parallel.distributed import TorchGroup

    if start.size == 1:
        return SoloGroup()
    exact = start.config.execute.deterministic or device == "cpu"
    without = left_out(start.config)
    if exact or not records(device) or "all-reduce" in without:
        return TorchGroup(world, exact=exact)
    from tokenmill.parallel.pushed import PushGroup

    return PushGroup(world, pdl="dependent-launch" not in without, exchanges="exchange" not in without)


def run_worker() -> None:
    """The process's main function."""
    pipe = own_end()
    message = pipe.receive()
    assert message is not None
    start = msgspec.msgpack.decode(message, type=Start)
    try:
        mesh = make_mesh(start, pipe)
        runner, facts = load_runner(start.config, mesh=mesh)
    except Exception as error:
        known = isinstance(error, (ValueError, OSError, MemoryError)) and not isinstance(error, EngineDeadError)
        with contextlib.suppress(OSError):
            pipe.send(FAILED + msgspec.msgpack.encode(str(error) if known else traceback.format_exc()))
        _end(1)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send(RESULT + msgspec.msgpack.encode(facts))
        lazy = pick_device(start.config.execute.device) == "cpu"
        Worker(pipe, InProcessExecutor(runner, facts["num_blocks"], DEPTH, lazy=lazy), mesh).serve()
    _end(0)


def _end(status: int) -> None:
    """End the process at once: libraries' clean-up may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Worker:
    """One rank at work."""

    def __init__(self, pipe: Pipe, executor: InProcessExecutor, mesh: Mesh) -> None:
        self.pipe, self.executor, self.group, self.place = pipe, executor, mesh.group, mesh.place
        self.tickets: deque[InProcessTicket] = deque()
        self.supplied: set[int] = set()
        self.read_plan = msgspec.msgpack.Decoder(StepPlan)
        self.read_chosen = msgspec.msgpack.Decoder(tuple[dict[int, list[int]], dict[int, list[int]]])
        self.read_late = msgspec.msgpack.Decoder(tuple[int, dict[int, bytes]])
        self.busy = threading.Event()
        self.waits = self.obeys = False

    def serve(self) -> None:
        """Work until the other end is gone."""
        threading.Thread(target=self._beat, name="tokenmill-beat", daemon=True).start()
        while True:
            if self.pipe.poll() or not self._can_finish():
                self.waits = False
                if not self.tickets:
                    self.busy.clear()
                message = self.pipe.receive()
                assert message is not None
                self.busy.set()
                self._take(message[:1], message[1:])
            elif self.tickets[0].ready():
                self.waits = False
                self._finish()
            else:
                self.waits = True

    def _can_finish(self) -> bool:
        """Is there a plan whose inputs are complete?"""
        return bool(self.tickets) and (not self.tickets[0].plan.late or self.tickets[0].plan.id in self.supplied)

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == PLAN:
            plan = self.read_plan.decode(body)
            self.executor.runner.translate(plan)
            if not self.place.is_last:
                plan.late = []
            self.tickets.append(self.executor.submit(plan))
        elif kind == CHOSEN:
            self.executor.runner.learn(*self.read_chosen.decode(body))
        elif kind == LATE:
            plan_id, masks = self.read_late.decode(body)
            self.supplied.add(plan_id)
            self.executor.supply(plan_id, LateInputs(masks=masks))
        else:
            message = msgspec.msgpack.decode(body)
            while not only_asks(message) and self._can_finish():
                self._finish()  # every rank finishes earlier plans first
            self.obeys = True
            said = answer(self.executor.runner, message)
            self.obeys = False
            self.pipe.send(CONTROL + msgspec.msgpack.encode(said))

    def _finish(self) -> None:
        ticket = self.tickets[0]
        self.group.begin(ticket.plan.epoch)
        result = ticket.wait()
        if result.failure is not None:
            self.group.fail()
        self.tickets.popleft()
        self.supplied.discard(ticket.plan.id)
        said = encoded(result)
        if self.group.rank or not self.place.is_last:
            digest = digest_of(result) if self.place.is_last else 0
            said = msgspec.msgpack.encode(Receipt(result.plan_id, digest, result.failure))
        self.pipe.send(RESULT + CALLS.pack(self.group.calls) + said)

    def _done(self) -> int:
        """A number that grows while there is progress: operations of steps, the work that commands take."""
        return operations(self.executor.runner) + (int(time.process_time() * 4) if self.obeys else 0)

    def _beat(self) -> None:
        """While plans run, report their progress: whoever waits for a result cannot see it otherwise."""
        pause = threading.Event()
        with contextlib.suppress(OSError, ValueError, EOFError):  # the parent is gone
            while self.busy.wait():
                pause.wait(BEAT_S)
                if self.busy.is_set():
                    self.pipe.send(BEAT + msgspec.msgpack.encode((self._done(), self.waits)))


def encoded(result: StepResult) -> bytes:
    """A result that cannot be encoded fails as its step would."""
    try:
        return msgspec.msgpack.encode(result)
    except Exception as error:
        failure = f"the step's result could not be sent ({type(error).__name__})"
        return msgspec.msgpack.encode(StepResult(plan_id=result.plan_id, failure=failure))
