"""The process that compiles kernels before the engine needs them. Owns: finding out which kernels a load launches, on a
stand-in for the GPU, and the compilers, one process a kernel.

It loads the engine as it is configured, on tensors without numbers (`device/standin.py`), and gives every launched
kernel to a compiler at once. The engine finds the results in Triton's cache. Must not know: how models are built.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.engine.load.compile_ahead import CompileReport, Nothing, Order, hash_triton
from tokenmill.process.pipe import Pipe
from tokenmill.process.start import own_end

BEHIND = 5
"""The niceness of compilers: the engine, and the search for what it launches, have priority."""
COMPILED, FAILED, CACHED = 0, 1, 2
"""The exit statuses of a compiler."""


@dataclass(slots=True)
class Farm:
    """Runs at most `most` compilers at a time, each forked for one kernel; work(kernel) returns its exit status."""

    most: int
    work: Callable[[Any], int]
    waiting: deque[Any] = field(default_factory=deque)
    running: dict[int, int] = field(default_factory=dict)
    """By process, how many kernels were begun before its kernel."""
    begun: int = 0
    ended: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    told: tuple[int, Callable[[], object]] | None = None
    """What to call once the first so many kernels have been compiled."""

    def aside(self, task: Callable[[], object]) -> None:
        """Run another task beside the compilers; its result is ignored."""
        process = os.fork()
        if not process:
            os._exit(_tried(lambda nothing: int(bool(task())), None))
        self.others.append(process)

    def add(self, kernel: Any) -> None:
        """Compile this kernel as soon as there is room."""
        self.waiting.append(kernel)
        self._go_on(block=False)

    def tell(self, what: Callable[[], object]) -> None:
        """Call this once all kernels added so far are compiled."""
        self.told = self.begun + len(self.waiting), what
        self._go_on(block=False)

    def finish(self) -> None:
        """Wait until all kernels are compiled."""
        while self.waiting or self.running:
            self._go_on(block=True)
        while self.others:
            os.waitpid(self.others.pop(), 0)

    def _go_on(self, *, block: bool) -> None:
        for process in list(self.running):
            self._look(process, os.WNOHANG)
        if block and self.running and (len(self.running) >= self.most or not self.waiting):
            self._look(next(iter(self.running)), 0)
        while self.waiting and len(self.running) < self.most:
            kernel = self.waiting.popleft()
            process = os.fork()
            if not process:
                os._exit(_tried(self.work, kernel))
            self.running[process] = self.begun
            self.begun += 1
        if self.told is not None and min(self.running.values(), default=self.begun) >= self.told[0]:
            what, self.told = self.told[1], None
            what()

    def _look(self, process: int, how: int) -> None:
        done, status = os.waitpid(process, how)
        if done:
            del self.running[process]
            code = os.waitstatus_to_exitcode(status)
            self.ended.append(code if code in (COMPILED, CACHED) else FAILED)


class Marked(Nothing):
    """In the load that is traced, in place of what is compiled ahead: says when its first steps have been made."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self.stepped = stepped

    def wait(self, reasons: list[str]) -> None:
        """Steps were made; what is launched from here on is not needed for them."""
        self.stepped()


def _tried(work: Callable[[Any], int], kernel: Any) -> int:
    try:
        os.nice(BEHIND)
        return work(kernel)
    except BaseException:
        return FAILED


def compile_kernel(kernel: Any) -> int:
    """Into Triton's cache, where it is not there yet, with what launches it."""
    import triton

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(bool(told.get("cache_hit")))
    made = kernel.function._do_compile(
        kernel.key, kernel.signature, 0, kernel.constants, kernel.options, kernel.attributes, True
    )
    with contextlib.suppress(Exception):  # it is made when the kernel is launched, then
        if kernel.new_arguments:
            compile_launcher(made.src, made.metadata)
    return CACHED if hits and all(hits) else COMPILED


def compile_launcher(source: Any, metadata: Any) -> None:
    """The C code that launches such a kernel: Triton has it made of the signature."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(source, metadata)


def compile_utilities() -> None:
    """The C code that asks for a device's properties and loads kernels."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def compile_order(
    order: Order, work: Callable[[Any], int] = compile_kernel, tell: Callable[[], object] = lambda: None
) -> CompileReport:
    """Find out what the load launches, and have it compiled. tell: is called once its first steps are."""
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    from tokenmill.device.standin import installed
    from tokenmill.engine.load.ahead_layers import equal_layers_once
    from tokenmill.engine.load.loading import load_runner
    from tokenmill.runner import runner

    began = time.monotonic()
    farm, failure = Farm(order.processes, work), ""
    farm.aside(compile_utilities)
    standing_in = installed(device=order.gpu, readers=[(runner, "Readback")], checks=False)
    with equal_layers_once(), standing_in as standin:
        make_backend(driver.active.get_current_target()).hash()  # once here, not in every compiler
        standin.found = farm.add
        try:
            load_runner(order.config, ahead=Marked(lambda: farm.tell(tell)))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:200]
        places = [place_of(kernel) for kernel in standin.kernels.values()]
    farm.finish()
    compiled, cached, failed = (farm.ended.count(code) for code in (COMPILED, CACHED, FAILED))
    took_s = time.monotonic() - began
    return CompileReport(len(farm.ended), compiled, cached, failed, took_s, failure, places)


def place_of(kernel: Any) -> str:
    """The file of Triton's cache that is there once the kernel is compiled."""
    from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
    from triton.runtime import driver
    from triton.runtime.cache import get_cache_manager

    backend = make_backend(driver.active.get_current_target())
    source = kernel.function.ASTSource(kernel.function, kernel.signature, kernel.constants, kernel.attributes)
    options = backend.parse_options({**kernel.options.__dict__, **source.parse_options()})
    text = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    folder = str(get_cache_manager(hashlib.sha256(text.encode()).hexdigest()).cache_dir)
    return os.path.join(folder, f"__grp__{source.name[:150]}.json")


def run_worker() -> None:
    """The main function of a process of its own."""
    serve(own_end())


def serve(pipe: Pipe) -> None:
    """Take the one order, say that it is begun, that first steps can be made, and what came of it."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    warnings.simplefilter("ignore")  # a fork has the filters of whoever runs the engine, which may raise them
    torch.set_num_threads(1)  # a fork has none of the others
    hash_triton()  # not once more in every compiler
    message = pipe.receive()
    assert message is not None
    order = msgspec.msgpack.decode(message, type=Order)
    pipe.send(b"")
    pipe.send(msgspec.msgpack.encode(compile_order(order, tell=lambda: pipe.send(b""))))
    os._exit(0)
