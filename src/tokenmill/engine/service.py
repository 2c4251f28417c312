"""The engine for asynchronous callers. Owns: the engine's thread, and the way of deltas into event loops.

Implements TextGenerator. Must not know: HTTP. The thread alone touches the engine; callers check requests first
(admission is pure), hand over groups, and receive each step's deltas in one wake-up of their event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import EngineDeadError, ParameterError, SequenceError
from tokenmill.core.request import Request, TextDelta
from tokenmill.core.sequence import SequenceGroup
from tokenmill.engine.build import Built
from tokenmill.engine.outputs import OutputProcessor


@dataclass(slots=True)
class Caller:
    """Where the deltas of one request go."""

    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[TextDelta]
    left: int
    gone: bool = False


class Service:
    """Runs one engine in a thread of its own."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.engine = built.engine
        self.processor = OutputProcessor(built.tokenizer)
        self.callers: dict[str, Caller] = {}
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.dead: str | None = None
        self.last_step = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="tokenmill-engine", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------ callers' side

    async def generate(self, request: Request) -> AsyncIterator[TextDelta]:
        """Deltas of all outputs, until each has ended. Leaving early aborts the request."""
        compiling = self.engine.admission.prepare(request.params)
        if compiling is not None:
            await asyncio.wrap_future(compiling)
        group = self.engine.admission.check(request, len(self.callers))
        async for delta in self._stream(request, group):
            yield delta

    async def embed(self, request: Request, pooling: str) -> list[float]:
        """The pooled hidden state of a prompt."""
        group = self.engine.admission.check_embedding(request, pooling)
        async for delta in self._stream(request, group):
            if delta.error is not None:
                raise (EngineDeadError if self.dead is not None else SequenceError)(delta.error)
            if delta.pooled is not None:
                return delta.pooled
        raise EngineDeadError("the request was aborted")

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets its last deltas."""
        self.commands.put(lambda: self._deliver(self.processor.process(self.engine.abort(request_id))))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run something in the engine's thread, between steps."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self.commands.put(run)
        return await done

    def close(self) -> None:
        """Abort what runs, stop the thread and the executor."""
        self.commands.put(None)
        self.thread.join(timeout=30)
        self.engine.close()

    async def _stream(self, request: Request, group: SequenceGroup) -> AsyncIterator[TextDelta]:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if request.id in self.callers:
            raise ParameterError(f"The request id {request.id!r} is in use: choose another one.", param="request_id")
        caller = Caller(asyncio.get_running_loop(), asyncio.Queue(), group.num_outputs)
        self.callers[request.id] = caller
        self.commands.put(lambda: self._add(request, group))
        left = caller.left
        try:
            if self.dead is not None:  # it died in between, and may have looked for callers before
                raise EngineDeadError(self.dead)
            while left:
                delta = await caller.inbox.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left and self.dead is None:
                caller.gone = True  # the id stays taken until the engine has let go of the request
                self.commands.put(lambda: self._leave(request.id))
            else:
                self.callers.pop(request.id, None)

    # ------------------------------------------------------------ the engine's thread

    def _add(self, request: Request, group: SequenceGroup) -> None:
        caller = self.callers.get(request.id)
        if caller is None or caller.gone or self.dead is not None:
            return  # the caller left before the engine heard of it
        self.processor.add(request)
        self.engine.scheduler.add(group)

    def _leave(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.processor.drop(request_id)
        self.callers.pop(request_id, None)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self.dead = f"the engine stopped: {type(error).__name__}: {error}"
        self._end_all(self.dead or "the engine was closed")

    def _turn(self) -> bool:
        """Take in commands (waiting for one when idle), then one step; False: stop."""
        idle = not self.engine.has_work
        while True:
            try:
                command = self.commands.get(block=idle)
            except queue.Empty:
                break
            if command is None:
                return False
            command()
            idle = False
        if self.engine.has_work:
            self._deliver(self.processor.process(self.engine.step()))
            for request_id, index in self.processor.stopped:
                self.engine.abort(request_id, index)
            self.processor.stopped.clear()
        self.last_step = time.monotonic()
        return True

    def _deliver(self, deltas: list[TextDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[TextDelta], TextDelta]]] = {}
        for delta in deltas:
            caller = self.callers.get(delta.request_id)
            if delta.finish_reason is not None and caller is not None:
                caller.left -= 1
            if caller is None or caller.left == 0:
                self.processor.drop(delta.request_id)
            if caller is not None:
                by_loop.setdefault(caller.loop, []).append((caller.inbox, delta))
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(_put_all, items)

    def _end_all(self, reason: str) -> None:
        """Every open request ends with an error, whatever happened."""
        self.dead = self.dead or reason
        for request_id, caller in list(self.callers.items()):
            ended = [
                TextDelta(request_id=request_id, index=i, finish_reason="error", error=reason)
                for i in range(caller.left)
            ]
            with contextlib.suppress(RuntimeError):
                caller.loop.call_soon_threadsafe(_put_all, [(caller.inbox, d) for d in ended])
        with contextlib.suppress(queue.Empty):
            while True:  # whoever waits for a call must hear of it
                command = self.commands.get_nowait()
                if command is not None:
                    command()


def _put_all(items: list[tuple[asyncio.Queue[TextDelta], TextDelta]]) -> None:
    for inbox, delta in items:
        inbox.put_nowait(delta)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
