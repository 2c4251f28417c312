"""The engine's side: what runs in its process or thread. Owns: loading, the commands and news of its loop, its beat.

Must not know: restarts, HTTP.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from tokenmill.core.config import EngineConfig, wanted_faults
from tokenmill.core.errors import EngineDeadError, EngineLostError, UserError
from tokenmill.core.garbage import no_collection
from tokenmill.engine.running.wire import (
    Abort,
    Add,
    Beat,
    Broken,
    Command,
    Failed,
    News,
    Stop,
    decode_command,
    encode_news,
)
from tokenmill.process.leaving import leave
from tokenmill.process.parent import end_with_parent
from tokenmill.server.engines.channel import BlockingEnd, frame

log = logging.getLogger("tokenmill.engine")
Build = Callable[[EngineConfig], Any]
LONG_STEP_S = 0.25
"""A step that takes longer than this reports its progress, and reports again each time this has passed."""
FAILED_EXIT = 70


def build_default(config: EngineConfig) -> Any:
    """Build the real engine. This imports torch."""
    from tokenmill.engine.running.build import build_engine

    built = build_engine(config)
    if faults := wanted_faults():
        from tokenmill.engine.steps.faults import inject

        inject(built, faults)
    return built


def name_of(command: Command) -> str:
    """The request that a command is about."""
    if isinstance(command, Add):
        return command.request.id
    return command.request_id if isinstance(command, Abort | Broken) else ""


def read_command(name: str, body: bytes) -> Command:
    """Decode a command. An error about one that cannot be decoded names its request."""
    try:
        return decode_command(body)
    except Exception:
        return Broken(name)


def run_engine(
    build: Build,
    config: EngineConfig,
    receive: Callable[[float], list[Command] | None],
    send: Callable[[News], None],
) -> None:
    """Load the model, report its facts, and serve."""
    # everything that torch's modules create stays; collecting garbage would take an eighth of the import's time
    with no_collection():
        from tokenmill.engine.running.loop import EngineLoop, describe

        gc.freeze()
        gc.unfreeze()  # these objects count as old now, though no collection has scanned them

    began = time.monotonic()
    try:
        built = build(config)
    except (UserError, OSError, MemoryError) as error:
        send(Failed(str(error), user=True))
        return
    except EngineLostError as error:
        send(Failed(str(error), lost=True))
        return
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise
    send(describe(built, time.monotonic() - began))
    loop = EngineLoop(built, receive, send)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(loop, send, ended), name="tokenmill-beat", daemon=True).start()
    try:
        loop.run_loop()
    finally:
        ended.set()
    built.engine.close()


def _beat(loop: Any, send: Callable[[News], None], ended: threading.Event) -> None:
    """Report during a long step how much of it is done. The server would take an engine without news for a hung one."""
    rounds = reported = -1
    while not ended.wait(LONG_STEP_S):
        if loop.rounds == rounds and (done := loop.done()) != reported:
            reported = done
            send(Beat(done))
        rounds = loop.rounds


def run_child(build: Build, config: EngineConfig, sock: socket.socket, lasting: bool) -> None:
    """The main function of the engine process. The process ends when its parent does."""
    wire = BlockingEnd(sock)

    def receive(timeout: float) -> list[Command] | None:
        frames = wire.receive(timeout)
        found = None if frames is None else [read_command(name, body) for name, body in frames]
        return None if found is None or any(isinstance(c, Stop) for c in found) else found

    def send(news: News) -> None:
        wire.send(frame("", encode_news(news)))

    try:
        _settle_in(lasting, send)
        run_engine(build, config, receive, send)
    except EngineDeadError as error:  # a process of it is lost: where this was noticed says nothing
        log.error("the engine ends: %s", error)
        wire.flush(1.0)
        os._exit(FAILED_EXIT)
    except Exception:  # a broken device may keep Python from exiting normally
        traceback.print_exc()
        wire.flush(1.0)
        os._exit(FAILED_EXIT)
    wire.flush(1.0)
    leave(0)  # the engine is closed


def _settle_in(lasting: bool, send: Callable[[News], None]) -> None:
    """Set the process up as a child: it ends with its parent, leaves signals to it, and dumps stack traces when
    asked."""
    import faulthandler

    try:
        # the parent decides when this process ends: it may still have requests to finish
        for name in ("SIGINT", "SIGTERM"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        end_with_parent(lasting)
    except Exception as error:  # for example a lack of threads
        send(Failed(f"{type(error).__name__}: {error}"))
        raise
