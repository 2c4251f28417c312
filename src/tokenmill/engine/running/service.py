"""The engine for asynchronous callers. Owns: the thread that an EngineLoop runs in, and how deltas reach event loops.

Must not know: HTTP. Only that thread touches the engine. Callers send commands and receive
each step's deltas in one wake-up of their event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenmill.core.errors import EngineDeadError, IdInUseError, UserError
from tokenmill.core.request import Request, TextDelta, TokenDelta
from tokenmill.engine.running.build import Built
from tokenmill.engine.running.loop import EngineLoop
from tokenmill.engine.running.said import Said
from tokenmill.engine.running.wire import Add, Command, News, Refused, Report
from tokenmill.engine.steps.deliveries import Asked, Deliveries
from tokenmill.process.home_process import HomeProcess

log = logging.getLogger("tokenmill.engine")
Item: TypeAlias = "TextDelta | UserError | OrphanedError"
Inbox: TypeAlias = "asyncio.Queue[Item]"
ByLoop: TypeAlias = "dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Item]]]"


@dataclass(slots=True)
class Caller:
    """Where the deltas of one request go. left: the indices of outputs that have not ended."""

    loop: asyncio.AbstractEventLoop
    inbox: Inbox
    left: set[int]
    said: Said
    begun: Asked | None = None
    """How far another engine's answer was decoded."""
    gone: bool = False


class OrphanedError(Exception):
    """The engine has died. Another one can continue the request from what is carried here. alone: it had no other."""

    def __init__(self, caller: Caller, reason: str, *, alone: bool) -> None:
        super().__init__(reason)
        self.caller, self.reason, self.alone = caller, reason, alone


class Service:
    """Runs one engine in a thread of its own. alone: no other engine can continue its requests if it dies. died: called
    then, in that thread."""

    def __init__(self, built: Built, *, alone: bool = True, died: Callable[[], None] = lambda: None) -> None:
        self.built = built
        self.alone, self.died = alone, died
        self.home = HomeProcess()
        self.engine = built.engine
        self.deliveries = Deliveries(
            built.tokenizer,
            lambda name, index: self.engine.abort(name, index),
            lambda name: self._mistake(name),
        )
        self.coming: ByLoop = {}
        self.callers: dict[str, Caller] = {}
        built.adapters.in_use = self._adapters
        self.commands: queue.SimpleQueue[Add | Callable[[], None] | None] = queue.SimpleQueue()
        self.cached: deque[tuple[bytes, bytes]] = deque()
        """What the engine reports about its prefix cache, if one of several engines is picked (wire.py:
        Report)."""
        self.dead: str | None = None
        self.loop = EngineLoop(built, self._receive, self._heard)
        self.thread = threading.Thread(target=self._drive_loop, name="tokenmill-engine", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------ callers' side

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets its last deltas."""
        self.commands.put(lambda: self._deliver(self.loop.abort(request_id)))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run something in the engine's thread, between steps."""
        self.home.check()
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def answer_caller() -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self.commands.put(answer_caller)
        if self.dead is not None:  # it died in between, perhaps after it looked for callers
            raise EngineDeadError(self.dead)
        return await done

    def close(self) -> None:
        """Abort open requests, then stop the thread and the executor; a fork leaves them alone."""
        if not self.home.here:
            return
        self.commands.put(None)
        if threading.current_thread() is not self.thread:  # garbage collection may run in any thread
            self.thread.join(timeout=30)
        self.engine.close()

    async def generate(
        self, request: Request, pooling: str | None = None, lost: Caller | None = None
    ) -> AsyncGenerator[TextDelta]:
        """Yield deltas of all outputs until each has ended. Leaving early aborts the request. lost: it goes on from
        there."""
        name, command = request.id, Add(request, pooling)
        self.home.check()
        if self.dead is not None:
            if not self.alone:  # if all have died asleep, others come when they are woken
                self.built.sleep.check()
            raise EngineDeadError(self.dead)
        if name in self.callers:
            raise IdInUseError(name)
        self.built.sleep.check(new=lost is None)
        outputs, said, begun = set(range(command.num_outputs)), Said(request, pooling), None
        said.emitted = [[] for _ in outputs]
        if lost is not None:
            outputs, said, begun = lost.left, lost.said, lost.begun
            command = Add(said.replayed(), pooling)
        left = len(outputs)
        caller = Caller(asyncio.get_running_loop(), asyncio.Queue(), outputs, said, begun)
        self.callers[name] = caller
        self.commands.put(command)
        try:
            if self.dead is not None:  # it died in between, perhaps after it looked for callers
                raise EngineDeadError(self.dead) if self.alone else OrphanedError(caller, alone=False)
            while left:
                delta = await caller.inbox.get()
                if isinstance(delta, UserError | OrphanedError):
                    left = 0
                    raise delta
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left and self.dead is None:
                caller.gone = True  # the id stays taken until the engine has dropped the request
                self.commands.put(lambda: self._leave(name))
            else:
                self.callers.pop(name, None)

    @property
    def has_work(self) -> bool:
        """Is any output to come, from here or from the engine that takes over what this one has left?"""
        return any(caller.left for caller in list(self.callers.values())) or (
            self.dead is None and (self.engine.has_work or bool(self.engine.flying))
        )

    # ------------------------------------------------------------ the engine's thread

    def _drive_loop(self) -> None:
        try:
            self.loop.run_loop()
        except BaseException as error:  # a processor may call sys.exit(): nobody may wait for a thread that is gone
            self.died()  # first, so that whoever sees that it is dead sees what follows
            self.dead = f"the engine stopped: {type(error).__name__}: {error}"
        self._end_all(self.dead or "the engine was closed")

    def _receive(self, timeout: float) -> list[Command] | None:
        """The callers' commands; waits at most this long for one. None: close."""
        found: list[Command] = []
        with contextlib.suppress(queue.Empty):
            item = self.commands.get(timeout=timeout) if timeout else self.commands.get_nowait()
            while True:
                if item is None:
                    return None
                if not isinstance(item, Add):
                    self._call(item)
                else:
                    self.deliveries.safely(item.request.id, self._begin, item, found)
                item = self.commands.get_nowait()
        return found

    def _adapters(self) -> set[int]:
        return {caller.said.request.adapter for caller in list(self.callers.values())}

    def _begin(self, command: Add, found: list[Command]) -> None:
        caller = self.callers.get(command.request.id)
        if caller is not None and not caller.gone:  # otherwise the caller left before the engine got the request
            self.deliveries.add(command.request, self._sort)
            if caller.begun is not None:
                caller.begun.hear = self._sort
                self.deliveries.asked[command.request.id] = caller.begun
            found.append(command)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            log.exception("a caller's wish could not be fulfilled")

    def _mistake(self, request_id: str) -> None:
        """Call it while an exception is handled: ends the request that it concerns, and nothing else."""
        log.exception("what concerns one request could not be handled")
        kind = type(sys.exception()).__name__
        self._call(lambda: self._fail(request_id, f"it could not be handled ({kind})"))

    def _heard(self, news: News) -> None:
        assert isinstance(news, Report)
        if news.published or news.gone:
            self.cached.append((news.published, news.gone))
        for refused in news.refused:
            self.deliveries.safely(refused.request_id, self._refuse, refused)
        for name, message in news.failed.items():
            self.deliveries.safely(name, self._fail, name, message)
        self._deliver(news.deltas)

    def _refuse(self, refused: Refused) -> None:
        self.deliveries.drop(refused.request_id)
        caller = self.callers.get(refused.request_id)
        if caller is not None:
            self._post({caller.loop: [(caller.inbox, refused.error())]})

    def _fail(self, request_id: str, message: str) -> None:
        """Send a terminal delta for every output that has none."""
        self.deliveries.drop(request_id)
        caller = self.callers.get(request_id)
        if caller is not None:
            self._post({caller.loop: [(caller.inbox, delta) for delta in ends_of(request_id, caller, message)]})
            caller.left.clear()
        self.loop.abort(request_id)

    def _leave(self, request_id: str) -> None:
        self.loop.abort(request_id)
        self.deliveries.drop(request_id)
        self.callers.pop(request_id, None)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas if not self.alone else ():
            if (caller := self.callers.get(delta.request_id)) is not None:
                self.deliveries.safely(delta.request_id, caller.said.say, delta)
        self.deliveries.deliver(deltas)
        coming, self.coming = self.coming, {}
        self._post(coming)

    def _sort(self, delta: TextDelta) -> None:
        """Sort a delta by event loop, so that each loop is woken once for all deltas of a step."""
        caller = self.callers.get(delta.request_id)
        if caller is not None:
            if delta.finish_reason is not None:
                caller.left.discard(delta.index)
            self.coming.setdefault(caller.loop, []).append((caller.inbox, delta))

    def _post(self, by_loop: ByLoop) -> None:
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to receive it
                loop.call_soon_threadsafe(_put_all, items)

    def _end_all(self, reason: str) -> None:
        """End every open request with an error, or let another engine continue it."""
        died, self.dead = self.dead is not None, self.dead or reason
        groups = self.engine.scheduler.roster.groups
        callers = list(self.callers.items())
        for name, caller in callers:
            caller.begun = self.deliveries.asked.get(name)
            caller.said.ended = set(range(caller.said.num_outputs)) - caller.left
            caller.said.died(groups[name].reached if name in groups else 0)
            orphaned = OrphanedError(caller, reason, alone=len(callers) == 1)
            last = ends_of(name, caller, reason) if self.alone or not died else [orphaned]
            self._post({caller.loop: [(caller.inbox, each) for each in last]})
        with contextlib.suppress(queue.Empty):
            while True:  # callers that wait for an answer must get one
                item = self.commands.get_nowait()
                if callable(item):
                    self._call(item)


def ends_of(name: str, caller: Caller, reason: str) -> list[TextDelta]:
    """One error for each output that is still to end."""
    return [TextDelta(request_id=name, index=i, finish_reason="error", error=reason) for i in sorted(caller.left)]


def _put_all(items: list[tuple[Inbox, Item]]) -> None:
    for inbox, delta in items:
        inbox.put_nowait(delta)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
