"""Which way (kernel and tiles) a dense product takes on one device. Owns: ways that were measured for it, found on the
device, or measured for a similar product.

Must not know: how products are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, NormSpec
from tokenmill.kernels.triton.common import INTERPRETED, act_parts, driver_version, multiprocessors, shared_memory
from tokenmill.kernels.triton.launch import Launch
from tokenmill.kernels.triton.products.search import Asked, Report, WayFile, once_each, search, way_file
from tokenmill.kernels.triton.products.trial import Trials
from tokenmill.kernels.triton.products.ways_by_shape import (
    FEW,
    Sample,
    Way,
    default_way,
    is_way,
    may_stream,
    measured_ways,
    nearest_way,
    operation,
    samples,
    stream_cut,
    wide_way,
)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Ways:
    """Ways of one device. cache: the folder that keeps those which were found here. many_rows: is there wide.py, the
    kernel for Hopper alone?"""

    def __init__(self, launch: Launch, cache: Path | None, *, many_rows: bool) -> None:
        real = not INTERPRETED
        self.launch, self.many_rows = launch, many_rows
        self.table: dict[str, Way] = measured_ways(torch.cuda.get_device_name()) if real else {}
        self.known = dict(self.table)
        self.found: WayFile | None = None
        if real and cache is not None:
            self.found = way_file(cache, torch.cuda.get_device_name(), driver_version())
        self.measured: list[Sample] = samples(self.known)
        self.own: dict[str, Way] = self.found.read() if self.found is not None else {}
        """Ways that were found on this kind of device."""
        self.known |= self.own
        self.asked: dict[str, Asked] = {}
        """Products of few rows that were made, by operation."""
        self.near: dict[str, Way | None] = {}
        """Ways of operations that were not measured, by their nearest measured one; None: none is near."""

    def of(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormSpec | None, act: Act | None, *, fused: bool
    ) -> Way:
        """How a product of these is made."""
        rows, (out, inner) = x.shape[0], weight.shape
        if not x.shape[0] or x.dtype != weight.dtype or x.dtype not in FLOATS or not weight.is_contiguous():
            return ("blas",)
        gated = act_parts(act)[1]
        name = operation(rows, (out, inner), act, norm is not None)
        found = self.known.get(name, ())
        if rows > FEW:
            own = self.launch.hopper and self.many_rows
            own = own and bias is None and act in (None, "silu_mul") and x.dtype == torch.bfloat16
            if not own or out % 16 or inner % 8 or weight.data_ptr() % 16:
                return ("blas",)
            return found if rows <= 512 and found else wide_way(rows, out, multiprocessors(), fused=fused)
        if rows > 1 and self.streams(x, weight):
            cut = stream_cut(rows, out // 2 if gated else out, inner, gated=gated)
            if cut is not None:
                return "stream", *cut
        if not found and x.dtype != torch.float32:  # tiles were measured in 16 bits: wider ones may not fit
            if name not in self.near:
                self.near[name] = nearest_way(self.measured, rows, (out, inner), gated=gated, normed=norm is not None)
            found = self.near[name] or ()
        width = out // 2 if gated else out
        way = found or default_way(rows, width, inner, gated=gated, small=self.launch.small)
        if name not in self.asked and x.dtype != torch.float32:
            added = fused and act is None
            self.asked[name] = Asked(rows, (out, inner), act, gated, norm is not None, added, x.dtype, way)
        return way

    def streams(self, x: Tensor, weight: Tensor) -> bool:
        """May stream.py multiply these?"""
        return self.launch.few_rows and self.launch.hopper and may_stream(x, weight)

    def search(self, forced: Callable[..., Tensor], seconds: float) -> Report:
        """Look for faster ways of the products that were made so far; forced: makes one in some way."""
        every = once_each(list(self.asked.values())) if not self.launch.steady else []
        room, report = shared_memory(), Report()
        try:
            search(every, Trials(forced), seconds, time.monotonic, room=room, small=self.launch.small, report=report)
        finally:  # Ctrl-C may break it off
            if self.found is not None:
                self.found.add(report.found)
        self.take(self.own | report.found)
        return report

    def take(self, ways: Mapping[str, Sequence[Any]]) -> None:
        """Make products in these ways from now on, instead of those that were found on this kind of device."""
        for name in self.own.keys() - self.table.keys():
            self.known.pop(name, None)
        self.own = {name: tuple(way) for name, way in ways.items() if is_way(name, tuple(way))}
        self.known |= self.table | self.own

    @contextmanager
    def only(self, name: str, way: Way) -> Iterator[None]:
        """Meanwhile this operation is made in this way, whatever is otherwise best."""
        before = self.known.get(name)
        self.known[name] = way
        try:
            yield
        finally:
            if before is None:
                del self.known[name]
            else:
                self.known[name] = before
