"""Links to engines. Owns: starting an engine in a process or a thread, carrying messages, noticing its death, ending
it.

A link serves one life of one engine; a restart makes a new link. All callbacks run in the event loop's thread and must
not raise. Must not know: requests, when engines are restarted, HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

from tokenmill.core.config import EngineConfig, calm_threads
from tokenmill.engine.running.wire import Command, News, Stop, encode, read_news
from tokenmill.process.parent import starts_last
from tokenmill.process.vitals import Vitals, vitals_of
from tokenmill.server.engines.channel import LoopEnd, frame
from tokenmill.server.engines.child import Build, name_of, run_child, run_engine

log = logging.getLogger("tokenmill.server")
STOP_TIMEOUT_S = 4.0
LAST_S = 1.0
"""Seconds that an engine may take to end after it has closed its socket. Then it is killed."""


@contextlib.contextmanager
def without_main(build: Callable[..., Any]) -> Iterator[None]:
    """Keep a spawned process from importing its parent's main module. If that is a program, it would waste half a
    second."""
    main = sys.modules["__main__"]
    if build.__module__ == "__main__":
        yield
        return
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Link(Protocol):
    """One life of one engine."""

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None: ...
    def send(self, command: Command) -> None:
        """Send a command. If it cannot be encoded, this raises, and nothing is sent."""
        ...

    def vitals(self) -> Vitals | None:
        """The process's figures. None: the system does not show them."""
        ...

    def dump_stacks(self) -> None: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...


class ProcessLink:
    """An engine in a process of its own, over a pair of sockets that it inherits. There is no file and no listening
    socket. So a full disk or a lack of descriptors between start and load does no harm."""

    def __init__(self, build: Build, config: EngineConfig) -> None:
        self.setup = (build, config)
        self.process: Any = None
        self.wire: LoopEnd | None = None
        self.on_news: Callable[[News], None] = lambda news: None
        self.end: asyncio.Task[None] | None = None
        self.heard = False
        """Has it said anything? It does so for the first time when it has loaded, or cannot load."""

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        calm_threads()
        self.on_news = on_news
        ours, theirs = socket.socketpair()
        try:
            context = multiprocessing.get_context("spawn")
            args = (*self.setup, theirs, starts_last())
            process = context.Process(target=run_child, args=args, name="tokenmill-engine")
            with without_main(self.setup[0]):
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            self.wire = LoopEnd(ours, self._take, self._silent)
            asyncio.get_running_loop().add_reader(process.sentinel, self._died, on_death)
        except BaseException:
            ours.close()
            process.kill()
            raise
        self.process = process

    def _take(self, name: str, body: bytes) -> None:
        self.heard = True
        try:
            self.on_news(read_news(body))
        # it is unknown which request this message was for; that request would wait for ever, so a new engine takes over
        except Exception:
            log.exception("an engine's news could not be taken in")
            self._kill()

    def _silent(self) -> None:
        """The engine has closed its end of the socket. Usually it is ending."""
        asyncio.get_running_loop().call_later(LAST_S, self._kill)

    def _died(self, on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.sentinel)
        self.end = loop.create_task(self._bury(on_death))

    async def _bury(self, on_death: Callable[[str], None]) -> None:
        """The process has closed its files. A moment later the system reports how it ended."""
        while (code := self.process.exitcode) is None:
            await asyncio.sleep(0.001)
        self._close()
        on_death(f"signal {-code}" if code < 0 else f"exit status {code}")

    def send(self, command: Command) -> None:
        if self.wire is not None:
            self.wire.send(frame(name_of(command), encode(command)))

    def vitals(self) -> Vitals | None:
        if self.process is None or self.process.pid is None:
            return None
        return vitals_of(self.process.pid)

    def dump_stacks(self) -> None:
        if self.process is not None and hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGUSR1)

    async def kill(self) -> None:
        """Kill the engine at once. `on_death` follows."""
        self._kill()

    def _kill(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()

    async def stop(self) -> None:
        """End the engine normally, or by force if that takes too long: one that still loads reads no commands, and has
        nothing to end. `on_death` is not called."""
        if self.end is not None:
            self.end.cancel()
        if self.process is None:
            self._close()
            return
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.send(Stop())
        until = time.monotonic() + (STOP_TIMEOUT_S if self.heard else 0.0)
        while self.process.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join, 2.0)
        self._close()

    def _close(self) -> None:
        if self.process is not None and self.process.exitcode is not None:
            self.process.close()  # its pipes are open files of this process
            self.process = None
        if self.wire is not None:
            self.wire.close()


class ThreadLink:
    """An engine in a thread of this process."""

    def __init__(self, build: Build, config: EngineConfig) -> None:
        self.setup = (build, config)
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.closed = False

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(function: Callable[[Any], None], value: Any) -> None:
            if not self.closed:
                with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody is left to tell
                    loop.call_soon_threadsafe(function, value)

        def main() -> None:
            reason = "the engine's thread ended"
            try:
                run_engine(*self.setup, self._receive, lambda news: tell(on_news, news))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            tell(on_death, reason)

        self.thread = threading.Thread(target=main, name="tokenmill-engine", daemon=True)
        self.thread.start()

    def _receive(self, timeout: float) -> list[Command] | None:
        found: list[Command] = []
        with contextlib.suppress(queue.Empty):
            found.append(self.commands.get(timeout=timeout) if timeout else self.commands.get_nowait())
            while True:
                found.append(self.commands.get_nowait())
        return None if any(isinstance(c, Stop) for c in found) else found

    def send(self, command: Command) -> None:
        self.commands.put(command)

    def vitals(self) -> Vitals | None:
        """None: the work of a thread cannot be told apart from other work of this process."""
        return None

    def dump_stacks(self) -> None:
        import faulthandler

        faulthandler.dump_traceback(all_threads=True)

    async def kill(self) -> None:
        """A thread cannot be killed. It is asked to end, and its messages are ignored from now on."""
        self.send(Stop())

    async def stop(self) -> None:
        self.closed = True
        self.send(Stop())
        if self.thread is not None:
            await asyncio.to_thread(self.thread.join, STOP_TIMEOUT_S)
