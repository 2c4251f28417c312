"""Ways to an engine. Owns: starting it in a process or a thread, carrying messages, noticing its death, ending it.

Must not know: requests, restarts policy, HTTP. A link serves one life of one engine; a restart makes a new link.
All callbacks run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq
import zmq.asyncio

from tokenmill.core.config import EngineConfig, calm_threads
from tokenmill.core.errors import UserError
from tokenmill.engine.wire import Command, Failed, News, Stop, decode_command, decode_news, encode

log = logging.getLogger("tokenmill.server")
Build = Callable[[EngineConfig], Any]
STOP_TIMEOUT_S = 4.0


class Link(Protocol):
    """One life of one engine."""

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None: ...
    def send(self, command: Command) -> None: ...
    def dump_stacks(self) -> None: ...
    async def kill(self) -> None: ...
    async def stop(self) -> None: ...


class ProcessLink:
    """An engine in a process of its own, over a zmq pair in a folder that only this user can enter."""

    def __init__(self, build: Build, config: EngineConfig, address: str) -> None:
        self.setup = (build, config, address)
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self.process: Any = None
        self.reader: asyncio.Task[None] | None = None
        self.end: asyncio.Task[None] | None = None
        self.closed = False

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        calm_threads()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=run_child, args=self.setup, name="tokenmill-engine")
        self.process.start()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.process.sentinel, self._died, on_death)
        self.reader = loop.create_task(self._read(on_news))

    async def _read(self, on_news: Callable[[News], None]) -> None:
        while True:
            data = await self.socket.recv()
            try:
                on_news(decode_news(data))
            except Exception:  # lost news would leave requests waiting for ever; a new engine takes them over
                log.exception("an engine's news could not be taken in")
                await self.kill()

    def _died(self, on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.sentinel)
        self.end = loop.create_task(self._bury(on_death))

    async def _bury(self, on_death: Callable[[str], None]) -> None:
        """The process has let go of its files; a moment later the system says how it ended."""
        while (code := self.process.exitcode) is None:
            await asyncio.sleep(0.001)
        self._close()
        on_death(f"signal {-code}" if code < 0 else f"exit status {code}")

    def send(self, command: Command) -> None:
        if not self.closed:
            self.socket.send(encode(command))  # a future that is done at once: there is no high-water mark

    def dump_stacks(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.kill(self.process.pid, signal.SIGUSR1)

    async def kill(self) -> None:
        """At once; `on_death` follows."""
        if self.process is not None and self.process.is_alive():
            self.process.kill()

    async def stop(self) -> None:
        """In an orderly way, by force if that takes too long; `on_death` is not called."""
        if self.end is not None:
            self.end.cancel()
        if self.process is None:
            self._close()
            return
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self.process.sentinel)
        with contextlib.suppress(zmq.ZMQError):
            self.send(Stop())
        until = time.monotonic() + STOP_TIMEOUT_S
        while self.process.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join, 2.0)
        self._close()

    def _close(self) -> None:
        if self.process is not None and self.process.exitcode is not None:
            self.process.close()  # its pipes are this process's open files
            self.process = None
        if not self.closed:
            self.closed = True
            if self.reader is not None:
                self.reader.cancel()
            self.socket.close(0)
            self.context.destroy(0)


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
                with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
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

    def dump_stacks(self) -> None:
        import faulthandler

        faulthandler.dump_traceback(all_threads=True)

    async def kill(self) -> None:
        """A thread cannot be killed: it is asked to end, and its news are no longer heard."""
        self.send(Stop())

    async def stop(self) -> None:
        self.closed = True
        self.send(Stop())
        if self.thread is not None:
            await asyncio.to_thread(self.thread.join, STOP_TIMEOUT_S)


def run_engine(
    build: Build,
    config: EngineConfig,
    receive: Callable[[float], list[Command] | None],
    send: Callable[[News], None],
) -> None:
    """Load the model, say what it is, and serve."""
    from tokenmill.engine.loop import EngineLoop, describe

    began = time.monotonic()
    try:
        built = build(config)
    except (UserError, OSError, MemoryError) as error:
        send(Failed(str(error), user=True))
        return
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise
    send(describe(built, time.monotonic() - began))
    EngineLoop(built, receive, send).run()
    built.engine.close()


def run_child(build: Build, config: EngineConfig, address: str) -> None:
    """The engine process's main function; it ends when its parent does."""
    import faulthandler

    for name in ("SIGINT", "SIGTERM"):  # the parent decides when we end: it may still have requests to finish
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)

    def receive(timeout: float) -> list[Command] | None:
        found: list[Command] = []
        if timeout and not socket.poll(int(timeout * 1000)):
            return found
        with contextlib.suppress(zmq.Again):
            while True:
                found.append(decode_command(socket.recv(zmq.NOBLOCK)))
        return None if any(isinstance(c, Stop) for c in found) else found

    run_engine(build, config, receive, lambda news: socket.send(encode(news)))
    socket.close()
    context.term()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
