"""A runner in a process of its own. Owns: the pipe's messages, the worker's loop and its life.

One msgpack message per plan and per result; nothing that crosses is unpickled. The worker ends when its parent does.
Must not know: scheduling, text.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tokenmill.core.config import calm_threads
from tokenmill.core.errors import EngineDeadError, ModelError, UserError
from tokenmill.core.execution import Ticket
from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.engine.executor import FailedTicket, answer, operations
from tokenmill.process.parent import end_with_parent, starts_last
from tokenmill.runner.runner import Runner

PLAN, LATE, CONTROL, RESULT, FAILED, BEAT = b"p", b"l", b"c", b"r", b"f", b"b"
BEAT_S = 1.0
"""How often a worker that is busy says how far it is."""
INLINE = 64 << 10
"""Bytes of a result that a pipe takes at once, even when another one lies in it."""
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 5.0
UNGUARDED_EXIT = 91
"""How a worker ends that was about to start a worker, because the main script does not look who runs it."""


@dataclass(slots=True)
class ProcessTicket:
    """A plan that the worker has been sent."""

    executor: ProcessExecutor
    plan_id: int

    def wait(self) -> StepResult:
        result = msgspec.msgpack.decode(self.executor.receive(), type=StepResult)
        assert result.plan_id == self.plan_id, "results come in plan order"
        return result


@dataclass(slots=True)
class ProcessExecutor:
    """Talks to one worker; `depth` plans may be in flight."""

    process: Any
    pipe: Connection
    num_blocks: list[int]
    depth: int = 2
    chains: bool = True
    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    early: deque[bytes] = field(default_factory=deque)
    failed_epoch: int = -1
    operations: int = 0

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
        return ProcessTicket(self, plan.id)

    def progress(self) -> int:
        """Operations of the worker so far, as it last said."""
        return self.operations

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        assert not inputs.processors, "admission keeps Python callables out of other processes"
        self._send(LATE + self.encoder.encode((plan_id, inputs.masks)))

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        self._send(CONTROL + self.encoder.encode(message))
        while True:
            kind, body = self._read()
            if kind == CONTROL:
                return msgspec.msgpack.decode(body)
            self.early.append(body)

    def receive(self) -> bytes:
        """The next result, in plan order."""
        if self.early:
            return self.early.popleft()
        return self._read()[1]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.close()
        self.process.join(STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_TIMEOUT_S)

    def _send(self, message: bytes) -> None:
        try:
            self.pipe.send_bytes(message)
        except (OSError, ValueError) as error:
            raise EngineDeadError("the model's process is gone") from error

    def _read(self) -> tuple[bytes, bytes]:
        while True:
            try:
                message = self.pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise EngineDeadError("the model's process is gone") from error
            if message[:1] != BEAT:
                return message[:1], message[1:]
            self.operations = msgspec.msgpack.decode(message[1:])


def start_worker(load: Callable[..., tuple[Runner, dict[str, Any]]], config: Any) -> tuple[Any, Connection, dict]:
    """Start a process that calls `load(config)`; -> process, pipe and the facts that `load` reports."""
    calm_threads()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_main, args=(theirs, load, config, starts_last()), daemon=True, name="tokenmill-worker"
    )
    try:
        process.start()
    except RuntimeError as error:
        if "bootstrapping phase" not in str(error):
            raise
        # This is such a process already, and runs the main script again: its parent is told by the exit status.
        raise SystemExit(UNGUARDED_EXIT) from None
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise EngineDeadError(f"the model was not loaded within {START_TIMEOUT_S:.0f} s")
        message = ours.recv_bytes()
    except EOFError as error:
        process.join(STOP_TIMEOUT_S)
        if process.exitcode == UNGUARDED_EXIT:
            raise UserError(
                "A process of its own runs the script again up to the line that makes the engine: put that line under "
                'if __name__ == "__main__": (or leave executor="process" out).',
                param="executor",
            ) from None
        raise EngineDeadError("the model's process ended while loading") from error
    if message[:1] == FAILED:
        raise ModelError(msgspec.msgpack.decode(message[1:]))
    return process, ours, msgspec.msgpack.decode(message[1:])


def _main(pipe: Connection, load: Callable[..., tuple[Runner, dict[str, Any]]], config: Any, lasting: bool) -> None:
    end_with_parent(lasting)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it may want to go on
    try:
        runner, facts = load(config)
    except Exception as error:
        known = isinstance(error, (ValueError, OSError, MemoryError))
        pipe.send_bytes(FAILED + msgspec.msgpack.encode(str(error) if known else traceback.format_exc()))
        return
    pipe.send_bytes(RESULT + msgspec.msgpack.encode(facts))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        _serve(pipe, runner)


class _Sender:
    """Sends in order; what may fill the pipe goes out from a thread, so that a full pipe never keeps us from reading.

    Otherwise a large result and a large plan wait for each other: each side sends, neither reads.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.large: queue.Queue[bytes] = queue.Queue()
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def send(self, message: bytes) -> None:
        if len(message) <= INLINE and not self.large.unfinished_tasks:
            with self.lock:
                self.pipe.send_bytes(message)
            return
        self.large.put(message)
        if self.thread is None:
            self.thread = threading.Thread(target=self._send_large, name="tokenmill-sender", daemon=True)
            self.thread.start()

    def _send_large(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the parent is gone: the reader finds out
            while True:
                message = self.large.get()
                with self.lock:
                    self.pipe.send_bytes(message)
                self.large.task_done()


def _serve(pipe: Connection, runner: Runner) -> None:
    """Run plans in order; a plan with late rows samples when its inputs have come, plans behind it wait."""
    plans: deque[StepPlan] = deque()
    late: dict[int, LateInputs] = {}
    read_plan = msgspec.msgpack.Decoder(StepPlan)
    read_late = msgspec.msgpack.Decoder(tuple[int, dict[int, bytes]])
    send = _Sender(pipe).send
    busy = threading.Event()
    threading.Thread(target=_beat, args=(runner, send, busy), name="tokenmill-beat", daemon=True).start()
    begun = None
    while True:
        while plans and (begun is None or not plans[0].late or plans[0].id in late):
            busy.set()
            if begun is None:
                begun = runner.begin(plans[0])
            if plans[0].late and plans[0].id not in late:
                break
            runner.sample(begun, late.pop(plans[0].id, None))
            send(RESULT + _encoded(runner.finish(begun)))
            plans.popleft()
            begun = None
            if pipe.poll(0):
                break
        busy.clear()
        message = pipe.recv_bytes()
        kind, body = message[:1], message[1:]
        if kind == PLAN:
            plans.append(read_plan.decode(body))
        elif kind == LATE:
            plan_id, masks = read_late.decode(body)
            late[plan_id] = LateInputs(masks=masks)
        else:
            send(CONTROL + msgspec.msgpack.encode(answer(runner, msgspec.msgpack.decode(body))))


def _encoded(result: StepResult) -> bytes:
    """A result that cannot be encoded fails as its step would."""
    try:
        return msgspec.msgpack.encode(result)
    except Exception as error:
        failure = f"the step's result could not be sent ({type(error).__name__})"
        return msgspec.msgpack.encode(StepResult(plan_id=result.plan_id, failure=failure))


def _beat(runner: Runner, send: Callable[[bytes], None], busy: threading.Event) -> None:
    """While plans run, say how far they are: whoever waits for a result does not see it otherwise."""
    said = -1
    with contextlib.suppress(OSError, ValueError):  # the parent is gone
        while busy.wait():
            time.sleep(BEAT_S)
            done = operations(runner)
            if busy.is_set() and done != said:
                send(BEAT + msgspec.msgpack.encode(done))
                said = done
