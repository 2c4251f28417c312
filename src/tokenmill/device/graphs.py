"""Recorded device work, and asynchronous copies to the host. Owns: CUDA graphs that share one memory pool, and copies
that are waited for later.

Work is recorded on a stream of its own and replayed on the caller's. Must not know: what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tokenmill.core.garbage import no_collection

T = TypeVar("T")


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
        """Record `compute`. What it keeps for later work (scratch, tables) must be there before; kernels need not be:
        one that is loaded meanwhile is not part of the recording."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(current)
        # Recordings of a model that was dropped may be garbage: to free one while another is made breaks that one.
        with torch.cuda.stream(self.stream), no_collection():
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
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
