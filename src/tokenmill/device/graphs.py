"""Recorded device work and late reads. Owns: CUDA graphs of one memory pool, and copies to the host that are awaited.

Must not know: what is recorded. Work is recorded on a stream of its own, then replayed on the caller's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_open = [0, True]
"""How many recordings are being made, and were collections on before the first of them?"""
_open_lock = threading.Lock()


@contextmanager
def no_collection() -> Iterator[None]:
    """Meanwhile no garbage is collected: recordings of a model that was dropped may be in it, and to free one while
    another is made breaks that one. Threads may be in here together: the last one out lets collections go on."""
    with _open_lock:
        if not _open[0]:
            _open[1] = gc.isenabled()
            gc.disable()
        _open[0] += 1
    try:
        yield
    finally:
        with _open_lock:
            _open[0] -= 1
            if not _open[0] and _open[1]:
                gc.enable()


class Recording(Generic[T]):
    """Work that can be replayed; `made` are the tensors that each replay fills again."""

    def __init__(self, graph: torch.cuda.CUDAGraph, made: T) -> None:
        self.graph = graph
        self.made = made

    def replay(self) -> T:
        """Enqueue the work once more on the current stream."""
        self.graph.replay()
        return self.made


class Recorder:
    """Makes recordings whose temporary tensors share one pool; they must be replayed one after the other."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        held = torch.zeros(1, device="cuda")
        self.keep = self.record(held.zero_)
        """Torch refuses a pool whose recordings have all been dropped: this one is never."""

    def record(self, compute: Callable[[], T]) -> Recording[T]:
        """Record `compute`, which has run for real before: kernels are compiled and scratch is taken."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), no_collection():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                made = compute()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return Recording(graph, made)


class Readback:
    """A tensor on its way to the host: `wait` waits for this copy and no later work."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor
        self.event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        elif not tensor.is_cpu:
            self.host = tensor.cpu()  # waits

    def ready(self) -> bool:
        """Would `wait` return at once?"""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.host
