"""Products that are timed on the device. Owns: weights that rotate through more memory than the L2 cache holds, and
replays of a graph between two events. For `search.py`. Must not know: what is tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.products.search import Asked
from tokenmill.kernels.triton.products.ways_by_shape import Way

MOST_COPIES = 12
_ROTATED = 4e8
"""Bytes that the copies of a weight fill, where there is room."""
_REPLAYS = 5


class Trials:
    """Products on the current device. product(asked.name, way, x, weight, norm, act, residual) makes one."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        self.product = product
        self.asked: Asked | None = None
        self.inputs: tuple[Tensor, NormSpec | None, Tensor | None] | None = None
        self.weights: list[Tensor] = []

    def result(self, asked: Asked, way: Way) -> Tensor:
        """Of the first copy."""
        self._prepare(asked)
        return self._call(way, self.weights[0]).clone()

    def seconds(self, asked: Asked, way: Way) -> float:
        """The median of some replays."""
        self._prepare(asked)
        rounds = max(1, 24 // len(self.weights))
        for weight in self.weights:
            self._call(way, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for weight in self.weights:
                    self._call(way, weight)
        times = []
        for _ in range(_REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / (rounds * len(self.weights)))
        return statistics.median(times[1:])

    def _call(self, way: Way, weight: Tensor) -> Tensor:
        assert self.asked is not None and self.inputs is not None
        x, norm, residual = self.inputs
        return self.product(self.asked.name, way, x, weight, norm, self.asked.act, residual)

    def _prepare(self, asked: Asked) -> None:
        """Made-up numbers, the same for every way."""
        if asked == self.asked:
            return
        self.weights = []  # their memory first
        out, inner = asked.shape
        kind: dict[str, Any] = {"device": "cuda", "dtype": asked.dtype}
        size = out * inner * 2
        room = torch.cuda.mem_get_info()[0] // 4
        copies = max(1, min(MOST_COPIES, int(_ROTATED // size) + 1, int(room // size)))
        self.weights = [torch.randn(out, inner, **kind) * 0.02 for _ in range(copies)]
        norm = NormSpec(torch.rand(inner, **kind) + 0.5, 1e-5) if asked.normed else None
        residual = torch.randn(asked.rows, out, **kind) if asked.added else None
        self.inputs = torch.randn(asked.rows, inner, **kind), norm, residual
        self.asked = asked
