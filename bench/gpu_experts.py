"""Times expert kernels on an NVIDIA GPU by graph replays over rotating layers.

python bench/gpu_experts.py [--tokens 1,32,512,8192] [--kind KIND] [--compile I/N]

KIND is bf16, fp8, fp8-blocks, int8, or int4-32, int4-128 and fp4-32 (4 bits in groups of so many columns).
Geometry: 128 experts of 2048 x 768, eight per token (30B-A3B), random data, uniform choice. Every figure is a
median; GB/s counts the touched experts' weights once, TFLOP/s the pairs. With --compile the variants of share I of N
are only compiled (in parallel processes), so that the timed run finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.triton.experts.experts import combine, one_down, one_up
from tokenmill.kernels.triton.experts.grouped import Stack, Tiling, grouped, looks, pairs_per_tile
from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack, narrow_grouped
from tokenmill.kernels.triton.experts.narrow_streamed import can_stream_experts, narrow_streamed
from tokenmill.kernels.triton.experts.route import pick, route
from tokenmill.kernels.triton.experts.route_few import pick_few
from tokenmill.kernels.triton.experts.sorting import sort_pairs, sort_rows
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.quantised.codes import FLOATS
from tokenmill.kernels.triton.quantised.narrow import BLOCK, NarrowForm
from tokenmill.kernels.triton.quantised.narrow_round import round_rows
from tokenmill.quant.base import WeightBase
from tokenmill.quant.dense import DenseWeight

EXPERTS, HIDDEN, INNER, TOP, LAYERS = 128, 2048, 768, 8, 4
BF16 = torch.bfloat16
SPEC = RouteSpec(EXPERTS, TOP)
Case = tuple[str, Callable[[int], object], float, float]
"""Name, one call for a layer, bytes, operations."""


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def measure(call: Callable[[int], object], *, quick: bool) -> float:
    """Median microseconds of one call."""
    call(0)
    if quick:
        return 0.0
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(1)
    stop.record()
    torch.cuda.synchronize()
    repeat = max(4, min(48, int(6000 / max(1.0, start.elapsed_time(stop) * 1000)) // 4 * 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeat):
            call(i % LAYERS)
    times = []
    for _ in range(7):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / repeat)
    return statistics.median(times)


NARROW = [(64, 128, 4, 4), (64, 128, 6, 4), (64, 128, 8, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 64, 6, 8)]
NARROW_ROWS = [(64, 256, 3, 4), (64, 256, 4, 4), (128, 256, 2, 8)]
NARROW_MANY = [(128, 128, 3, 8), (128, 128, 4, 8), (128, 64, 4, 8), (64, 128, 4, 4)]
"""Cuts of 8 bit tables: for any, for those without blocks of scales, for tiles of 128 pairs."""
WORDS = [(64, 128, 4, 4), (64, 128, 3, 4), (64, 128, 2, 4), (128, 128, 3, 4), (128, 128, 3, 8), (128, 128, 2, 8)]
STREAMED = [(128, 4, 4, 80, 3), (128, 4, 4, 80, 99), (128, 6, 4, 104, 2), (128, 4, 4, 104, 2), (128, 3, 4, 104, 2),
            (64, 8, 4, 64, 99)]  # fmt: skip
STREAMED_MANY = [(256, 2, 8, 168, 1), (256, 3, 8, 168, 1), (128, 4, 8, 104, 1)]
"""Cuts of 4 bit tables; those for the kernel of Hopper: up to 64 pairs a tile, and more."""
KINDS = ("bf16", "fp8", "fp8-blocks", "int8", "int4-32", "int4-128", "fp4-32")


def narrow_tilings(size: int, kind: str, *, up: bool) -> list[Tiling]:
    """What might be the fastest in 8 and 4 bits."""
    if kind.startswith(("int4", "fp4")):
        return [Tiling(size, *cut) for cut in WORDS]
    wide = [] if up or kind == "fp8-blocks" else [(256, 128, 3, 8), (256, 64, 4, 8)]
    cuts = [*NARROW_MANY, *wide] if size == 128 else [*NARROW, *([] if kind == "fp8-blocks" else NARROW_ROWS)]
    return [Tiling(size, *cut, True) for cut in cuts] + [Tiling(size, *cuts[0])]


def up_tilings(tokens: int, kind: str) -> list[Tiling]:
    """What might be the fastest for gate and up."""
    size = pairs_per_tile(tokens * TOP, EXPERTS)
    if kind != "bf16":
        return narrow_tilings(size, kind, up=True)
    bulk, plain = [(64, 64, 4, 4), (64, 128, 3, 4), (128, 64, 3, 8), (128, 64, 3, 4), (64, 64, 5, 4)], [(64, 64, 4, 4)]
    if size == 128:
        bulk, plain = [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 4), (64, 64, 4, 8)], [(128, 64, 3, 8)]
    elif size == 16:
        bulk, plain = [*bulk, (64, 64, 6, 4), (64, 64, 3, 4), (64, 128, 2, 4)], [*plain, (64, 128, 3, 4)]
    return [Tiling(size, *cut, True) for cut in bulk] + [Tiling(size, *cut) for cut in plain]


def down_tilings(tokens: int, kind: str) -> list[Tiling]:
    """What might be the fastest for down."""
    size = pairs_per_tile(tokens * TOP, EXPERTS)
    if kind != "bf16":
        return narrow_tilings(size, kind, up=False)
    bulk = [(64, 128, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8), (128, 128, 3, 4), (128, 64, 4, 8), (64, 256, 2, 4)]
    plain = [(64, 128, 3, 4), (128, 64, 4, 4)]
    if size == 128:
        bulk = [(128, 64, 4, 8), (128, 64, 3, 8), (256, 64, 3, 8), (256, 64, 4, 8), (128, 64, 5, 8)]
        plain = [(128, 64, 4, 8)]
    return [Tiling(size, *cut, True) for cut in bulk] + [Tiling(size, *cut) for cut in plain]


def stack_of(kind: str, experts: int, rows: int, columns: int) -> Stack | NarrowStack:
    """Random experts of this kind."""
    name, _, group = kind.partition("-")
    if name in ("int4", "fp4"):
        words = torch.randint(-(1 << 15), 1 << 15, (experts, rows, columns // 4), dtype=torch.int16, device="cuda")
        scales = torch.rand(experts, columns // int(group), rows, device="cuda").to(BF16) * 1e-2
        table = int(FLOATS.value) if name == "fp4" else 0
        return NarrowStack(words, scales, None, None, (rows, columns), int(group), table)
    table = rand(experts, rows, columns) * 0.02
    if kind == "bf16":
        return Stack(table, None)
    cut = (rows // BLOCK, columns // BLOCK) if kind == "fp8-blocks" else (rows,)
    scales = torch.rand(experts, *cut, device="cuda") * 1e-3
    if kind == "int8":
        return Stack((table * 1000).clamp(-127, 127).to(torch.int8), None, scales)
    return Stack((table * 1000).to(torch.float8_e4m3fn), None, scales)


@dataclass
class Part(WeightBase):
    """One expert's matrix of a stack."""

    stack: Stack | NarrowStack
    at: int

    def pieces(self) -> tuple[Any, dict[str, torch.Tensor | None]]:
        if isinstance(self.stack, NarrowStack):
            found = {
                "table": self.stack.data[self.at],
                "scales": self.stack.scales[self.at],
                "zeros": None,
                "bias": None,
            }
            return NarrowForm(self.stack.shape, 4, self.stack.group, False, self.stack.table), found
        table, scales = self.stack.table[self.at], self.stack.scales
        if scales is None:
            return "dense", {"table": table, "bias": None}
        blocks = self.stack.scaling == 2
        form = NarrowForm((table.shape[0], table.shape[1]), 8, BLOCK if blocks else 0, blocks, 0)
        return form, {"table": table, "scales": scales[self.at], "zeros": None, "bias": None}


class Data:
    """Layers of random experts, and what a step gives them."""

    def __init__(self, tokens: int, kind: str) -> None:
        self.tokens, self.kind = tokens, kind
        self.kernels = TritonKernels()
        self.scratch, self.pdl = self.kernels.launch.scratch, self.kernels.launch.pdl
        self.ups = [stack_of(kind, EXPERTS, 2 * INNER, HIDDEN) for _ in range(LAYERS)]
        self.downs = [stack_of(kind, EXPERTS, HIDDEN, INNER) for _ in range(LAYERS)]
        self.routers = [rand(EXPERTS, HIDDEN) for _ in range(LAYERS)]
        self.x, self.norm = rand(tokens, HIDDEN), NormSpec(rand(HIDDEN), 1e-6)
        self.picks = [route(rand(tokens, EXPERTS), SPEC, pdl=self.pdl, dtype=torch.int32) for _ in range(LAYERS)]
        self.touched = sum(len(ids.unique()) for ids, _ in self.picks) / LAYERS
        numbers = self.ups[0].data if isinstance(self.ups[0], NarrowStack) else self.ups[0].table
        self.bytes = numbers.nbytes / EXPERTS / 2 * self.touched
        self.flops = 2.0 * tokens * TOP * HIDDEN * INNER


def cases(tokens: int, kind: str) -> Iterator[Case]:
    d = Data(tokens, kind)
    whole = [
        d.kernels.pack_mixture(
            Mixture(
                DenseWeight(r),
                SPEC,
                [Part(up, e) for e in range(EXPERTS)],
                [Part(down, e) for e in range(EXPERTS)],
                "silu_mul",
            )
        )
        for r, up, down in zip(d.routers, d.ups, d.downs, strict=True)
    ]
    layers = [layer for layer in whole if layer is not None]
    ctx = ForwardContext(d.kernels, d.x, d.x, d.x, 1, [], [])
    yield "layer", lambda i: layers[i](d.x, ctx, norm=d.norm, residual=d.x), 3 * d.bytes, 3 * d.flops
    if tokens == 1 and kind.startswith(("int4", "fp4")):
        return
    yield from one_cases(d) if tokens == 1 else several_cases(d)


def one_cases(d: Data) -> Iterator[Case]:
    """One token: each launch in several cuts."""
    x, norm, pdl, h = d.x, d.norm, d.pdl, rand(TOP, INNER)

    def chosen(i: int, config: tuple[int, int]) -> object:
        return pick(x, d.routers[i], None, norm, SPEC, scratch=d.scratch, pdl=pdl, config=config)

    def up(i: int, config: tuple[int, int, int]) -> object:
        return one_up(x, d.ups[i], d.picks[i][0], norm, "silu_mul", pdl=pdl, config=config)

    def down(i: int, config: tuple[int, int, int]) -> object:
        return one_down(h, d.downs[i], d.picks[i], x, pdl=pdl, early=True, config=config)

    for pair in ((1, 4), (2, 4), (4, 4), (8, 8)):
        yield f"pick {pair}", partial(chosen, config=pair), 2.0 * EXPERTS * HIDDEN, 0.0
    ups = (2, 2048, 4), (1, 2048, 2), (1, 2048, 4), (4, 2048, 8), (2, 1024, 4), (1, 1024, 2)
    downs = (2, 1024, 8), (4, 256, 4), (2, 256, 4), (2, 256, 2), (1, 256, 2)
    if d.kind != "bf16":
        ups = (1, 2048, 1), (2, 2048, 1), (1, 1024, 1), (2, 1024, 1), (1, 512, 1), (2, 512, 1), (2, 2048, 2)
        downs = (2, 256, 2), (1, 256, 1), (1, 256, 2), (2, 128, 2), (4, 128, 4), (2, 256, 4)
        if d.kind == "fp8-blocks":
            downs = (2, 128, 2), (4, 128, 2), (4, 128, 4), (1, 128, 1), (1, 128, 2), (2, 128, 4)
    for c in ups:
        yield f"one up {c}", partial(up, config=c), 2 * d.bytes, 0.0
    for c in downs:
        yield f"one down {c}", partial(down, config=c), d.bytes, 0.0


def several_cases(d: Data) -> Iterator[Case]:
    """More tokens: each launch, the products in several cuts, and torch's grouped product."""
    tokens, pdl, ids = d.tokens, d.pdl, [ids for ids, _ in d.picks]
    sort, size = not looks(tokens * TOP, EXPERTS), pairs_per_tile(tokens * TOP, EXPERTS)
    orders = [sort_pairs(p, EXPERTS, size, d.scratch, pdl=pdl) if sort else None for p in ids]
    logits = rand(tokens, EXPERTS)
    yield "route", lambda i: route(logits, SPEC, pdl=pdl, dtype=torch.int32), 0.0, 0.0
    if tokens <= 64:
        yield from pick_cases(d)
    if sort:
        yield "sort", lambda i: sort_pairs(ids[i], EXPERTS, size, d.scratch, pdl=pdl), 0.0, 0.0
    several = narrow_grouped if isinstance(d.ups[0], NarrowStack) else grouped
    for t in up_tilings(tokens, d.kind):
        call = partial(several, d.x, act="silu_mul", up=True, pdl=pdl, tiling=t)
        run = lambda i, call=call: call(weight=d.ups[i], ids=ids[i], order=orders[i])  # noqa: E731
        yield f"up {t}", run, 2 * d.bytes, 2 * d.flops
    h = rand(tokens * TOP, INNER)
    for t in down_tilings(tokens, d.kind):
        call = partial(several, h, act=None, up=False, pdl=pdl, tiling=t)
        run = lambda i, call=call: call(weight=d.downs[i], ids=ids[i], order=orders[i])  # noqa: E731
        yield f"down {t}", run, d.bytes, d.flops
    if isinstance(d.ups[0], NarrowStack) and can_stream_experts(d.x, d.ups[0], gated=True):
        yield from streamed_cases(d, size, ids, h)
    parts = rand(tokens * TOP, HIDDEN)
    yield "combine", lambda i: combine(parts, *d.picks[i], d.x, EXPERTS, BF16, pdl=pdl), 2.0 * parts.numel(), 0.0
    if d.kind in ("fp8", "fp8-blocks", "int8"):
        for rows, name in ((d.x, "up"), (h, "down")):
            call = partial(round_rows, rows, d.ups[0].table.dtype, pdl=pdl)
            yield f"round {name}", lambda _, call=call: call(), 3.0 * rows.numel(), 0.0
    elif sort and d.kind == "bf16" and hasattr(torch, "_grouped_mm"):
        ends = [torch.bincount(p.flatten(), minlength=EXPERTS).cumsum(0).int() for p in ids]
        rows, mm = rand(tokens * TOP, HIDDEN), torch._grouped_mm
        yield "torch grouped up", lambda i: mm(rows, d.ups[i].table.transpose(1, 2), ends[i]), 2 * d.bytes, 2 * d.flops
        yield "torch grouped down", lambda i: mm(h, d.downs[i].table.transpose(1, 2), ends[i]), d.bytes, d.flops


def streamed_cases(d: Data, size: int, ids: list[torch.Tensor], h: torch.Tensor) -> Iterator[Case]:
    """4 bits on Hopper."""
    sort = partial(sort_rows, d.x, experts=EXPERTS, per_tile=size, scratch=d.scratch, pdl=d.pdl)
    yield "sort rows", lambda i: sort(ids=ids[i]), 0.0, 0.0
    laid = [sort(ids=p) for p in ids]
    for cut in STREAMED if size <= 64 else STREAMED_MANY:
        config = cut[0], size, *cut[1:]
        if cut[0] >= 32 * cut[2]:  # a thread has both halves of what is gated
            call = partial(narrow_streamed, act="silu_mul", up=True, pdl=d.pdl, cut=config)
            run = lambda i, call=call: call(laid[i][1], d.ups[i], laid[i][0])  # noqa: E731
            yield f"streamed up {config}", run, 2 * d.bytes, 2 * d.flops
        call = partial(narrow_streamed, act=None, up=False, pdl=d.pdl, cut=config)
        run = lambda i, call=call: call(h, d.downs[i], laid[i][0])  # noqa: E731
        yield f"streamed down {config}", run, d.bytes, d.flops


def pick_cases(d: Data) -> Iterator[Case]:
    """Norm, router and choice of a few tokens: token by token, and split over programs; with weights brought near."""
    for near in (False, True):
        common: dict[str, Any] = {"add": None, "norm": d.norm, "spec": SPEC, "scratch": d.scratch, "pdl": d.pdl}
        brought = [(w.data if isinstance(w, NarrowStack) else w.table) if near else None for w in d.ups]
        call = partial(pick, d.x, keep=True, **common)
        run = lambda i, call=call, brought=brought: call(weight=d.routers[i], near=brought[i])  # noqa: E731
        yield f"pick {near=}", run, 2.0 * EXPERTS * HIDDEN, 0.0
        for c in ((32, 4), (64, 4), (16, 8)):
            count = torch.zeros(1, dtype=torch.int32, device="cuda")
            call = partial(pick_few, d.x, count=count, config=c, **common)
            run = lambda i, call=call, brought=brought: call(weight=d.routers[i], near=brought[i])  # noqa: E731
            yield f"pick several {c} {near=}", run, 2.0 * EXPERTS * HIDDEN, 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,2,8,32,64,256,512,8192")
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--compile", default="")
    args = parser.parse_args()
    share, of = (int(n) for n in (args.compile or "0/1").split("/"))
    at = 0
    for tokens in (int(n) for n in args.tokens.split(",")):
        for name, call, size, flops in cases(tokens, args.kind):
            at += 1
            if args.compile and at % of != share:
                continue
            try:
                us = measure(call, quick=bool(args.compile))
            except Exception as e:  # a variant may not fit the chip
                print(f"{tokens:5d} {name}: {str(e)[:120]}")
                continue
            if not args.compile:
                print(
                    f"{tokens:5d} {us:9.2f} us {size / us / 1e3:7.0f} GB/s {flops / us / 1e6:6.0f} TFLOP/s  {name}",
                    flush=True,
                )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
