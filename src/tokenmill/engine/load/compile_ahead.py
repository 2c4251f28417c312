"""Kernels are compiled in processes of their own while weights load. Owns: when that is worth it, starting the process
that does so, and waiting for it.

A kernel that was not compiled ahead is compiled when it is launched, so no failure here fails the load. Triton caches
kernels by content; a note says for which loads all kernels are cached (`ahead_notes.py`). Must not know: kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.cores import usable_cores
from tokenmill.device.gpu import Gpu, gpu_of
from tokenmill.engine.load.ahead_notes import is_kept, keep, note_of
from tokenmill.process.pipe import Pipe
from tokenmill.process.start import Forked, fork_process, may_fork, start_process

LONGEST_S = 60.0
"""How long the load waits for kernels compiled ahead; then it goes on and compiles the rest itself."""
LONGEST_BEGIN_S = 20.0
"""How long the load waits for the process to begin."""
LEAST_CORES = 4
MOST_PROCESSES = 32
_WORKER = "tokenmill.engine.load.ahead_worker"


class Order(msgspec.Struct):
    """The order to the process: which engine is loaded, on which GPU, and how many compilers may run at once."""

    config: EngineConfig
    gpu: Gpu
    processes: int


class CompileReport(msgspec.Struct):
    """From it: kernels that the load launches, how many were compiled, there already, failed; how long that took; why
    not all of them are known."""

    kernels: int = 0
    compiled: int = 0
    cached: int = 0
    failed: int = 0
    took_s: float = 0.0
    failure: str = ""
    places: list[str] = []
    """The files that Triton's cache has once the kernels are compiled."""


class Compiling(Protocol):
    """Compiles kernels ahead."""

    def begin(self, raw: Mapping[str, Any]) -> None:
        """Compile, unless all kernels exist. raw: the model's config."""
        ...

    def first(self) -> None:
        """Wait for the kernels of the first steps."""
        ...

    def wait(self, reasons: list[str]) -> None:
        """Wait until all kernels exist or it takes too long; adds the outcome to `reasons`."""
        ...


class Nothing:
    """The Compiling of loads that compile nothing ahead."""

    def begin(self, raw: Mapping[str, Any]) -> None:
        """There is nothing to compile."""

    def first(self) -> None:
        """There is nothing to wait for."""

    def wait(self, reasons: list[str]) -> None:
        """There is nothing to wait for."""


class Process:
    """The process that compiles kernels ahead."""

    def __init__(self, config: EngineConfig, device: str, processes: int) -> None:
        self.config, self.device, self.processes = config, device, processes
        self.note: Path | None = None
        """The path of the load's note; None: no order was given."""
        self.heard: list[bytes] = []
        self.late = self.ended = False
        self.waited_s = 0.0
        self.process: Popen[bytes] | Forked
        self.pipe: Pipe
        self.process, self.pipe = fork_process(_serve) if may_fork() else start_process(_WORKER, "compile ahead")

    def begin(self, raw: Mapping[str, Any]) -> None:
        """Give it the order, or let it go: nothing is to be done, or it cannot be reached."""
        gpu = gpu_of(self.device)
        note = note_of(self.config, gpu, raw)
        execute = replace(self.config.execute, device="cuda")
        tuning = replace(self.config.tuning, compile_ahead=False, kernel_search="off")
        order = Order(replace(self.config, execute=execute, tuning=tuning), gpu, self.processes)
        try:
            if not is_kept(note):
                self.pipe.send(msgspec.msgpack.encode(order))
                self.note = note
        except OSError:
            pass
        if self.note is None:
            self.end()

    def first(self) -> None:
        """It has begun, and then compiled what the first steps launch."""
        if self.note is not None:
            self._listen(2)

    def wait(self, reasons: list[str]) -> None:
        """Wait until the process has answered, ended, or taken too long."""
        if self.note is None:
            return
        try:
            self._listen(3)
            told = msgspec.msgpack.decode(self.heard[2], type=CompileReport) if len(self.heard) > 2 else None
        except msgspec.MsgspecError:
            self.ended, told = True, None
        finally:
            self.end()
        if self.ended:
            told = CompileReport(failure="its process ended")
        reasons.append(said(told, self.processes, self.waited_s))
        if told is not None and told.kernels and not told.failure and not told.failed:
            keep(self.note, told.places)

    def _listen(self, count: int) -> None:
        """Until it has said so much. One that ends, or takes too long, is not listened to again: a fork that cannot go
        on (a library held a lock when it was made) does not even begin."""
        began = time.monotonic()
        try:
            while len(self.heard) < count and not self.ended and not self.late:
                message = self.pipe.receive(LONGEST_S if self.heard else LONGEST_BEGIN_S)
                self.late = message is None
                self.heard += [] if message is None else [message]
        except (EOFError, OSError):
            self.ended = True
        self.waited_s += time.monotonic() - began

    def end(self) -> None:
        """End the process and its compilers: nobody waits for it any more."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own
        self.process.kill()
        self.process.wait()
        self.pipe.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


def _serve(pipe: Pipe) -> None:
    importlib.import_module(_WORKER).serve(pipe)


def said(told: CompileReport | None, processes: int, waited_s: float) -> str:
    """The outcome, in one line."""
    if told is None:
        return f"kernels were not compiled ahead within {waited_s:.0f} s; the rest are compiled as they are needed"
    text = (
        f"{told.compiled} of {told.kernels} kernels were compiled ahead in {told.took_s:.1f} s "
        f"by {processes} processes, {told.cached} were there; waited {waited_s:.1f} s"
    )
    if told.failed:
        text += f"; {told.failed} did not compile"
    return f"{text}; not all are known ({told.failure})" if told.failure else text


def compile_ahead(config: EngineConfig, device: str) -> Compiling:
    """Start the process, if this load compiles kernels and there are cores for it: as soon as the device is known, and
    before it is used, as it may be a fork of this one."""
    wanted = config.tuning.compile_ahead and config.execute.kernels == "auto" and device.startswith("cuda")
    cores = usable_cores()
    alone = config.parallel.ranks == 1 and config.engines == 1
    if not wanted or not alone or cores < LEAST_CORES or not _compiles():
        return Nothing()
    try:
        made = Process(config, device, min(cores - 1, MOST_PROCESSES))
    except OSError:  # no process could be started
        return Nothing()
    threading.Thread(target=hash_triton, name="tokenmill-hash", daemon=True).start()
    return made


def hash_triton() -> None:
    """What Triton does once a process before it looks into its cache: all of its own files are a part of every key."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def _compiles() -> bool:
    """Is Triton there, for NVIDIA? (Its interpreter compiles nothing.) Then all kernels are imported, for the fork."""
    import torch

    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    try:
        importlib.import_module("tokenmill.kernels.triton")
    except (ImportError, AttributeError):  # nor does the load have them, then
        return False
    from tokenmill.kernels.triton.common import INTERPRETED

    return not INTERPRETED
