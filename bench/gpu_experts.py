"""Times expert kernels on an NVIDIA GPU by graph replays over rotating layers.

python bench/gpu_experts.py [--tokens 1,32,512,8192] [--compile I/N]

Geometry: 128 experts of 2048 x 768, eight per token (30B-A3B), bf16, random data, uniform choice. Every figure is a
median; GB/s counts the touched experts' weights once, TFLOP/s the pairs. With --compile the variants of share I of N
are only compiled (in parallel processes), so that the timed run finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch

from tokenmill.core.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.triton.experts import combine, one_down, one_up
from tokenmill.kernels.triton.grouped import Tiling, grouped, looks, pairs_per_tile
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.route import pick, route
from tokenmill.kernels.triton.sorting import sort_pairs
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


def up_tilings(tokens: int) -> list[Tiling]:
    """What might be the fastest for gate and up."""
    size = pairs_per_tile(tokens * TOP, EXPERTS)
    bulk, plain = [(64, 64, 4, 4), (64, 128, 3, 4), (128, 64, 3, 8), (128, 64, 3, 4), (64, 64, 5, 4)], [(64, 64, 4, 4)]
    if size == 128:
        bulk, plain = [(128, 64, 3, 8), (128, 64, 4, 8), (64, 64, 3, 4), (64, 64, 4, 8)], [(128, 64, 3, 8)]
    elif size == 16:
        bulk, plain = [*bulk, (64, 64, 6, 4), (64, 64, 3, 4), (64, 128, 2, 4)], [*plain, (64, 128, 3, 4)]
    return [Tiling(size, *cut, True) for cut in bulk] + [Tiling(size, *cut) for cut in plain]


def down_tilings(tokens: int) -> list[Tiling]:
    """What might be the fastest for down."""
    size = pairs_per_tile(tokens * TOP, EXPERTS)
    bulk = [(64, 128, 3, 4), (128, 64, 4, 4), (128, 128, 3, 8), (128, 128, 3, 4), (128, 64, 4, 8), (64, 256, 2, 4)]
    plain = [(64, 128, 3, 4), (128, 64, 4, 4)]
    if size == 128:
        bulk = [(128, 64, 4, 8), (128, 64, 3, 8), (256, 64, 3, 8), (256, 64, 4, 8), (128, 64, 5, 8)]
        plain = [(128, 64, 4, 8)]
    return [Tiling(size, *cut, True) for cut in bulk] + [Tiling(size, *cut) for cut in plain]


def cases(tokens: int) -> Iterator[Case]:
    ups, downs = [rand(EXPERTS, 2 * INNER, HIDDEN) * 0.02 for _ in range(LAYERS)], []
    downs = [rand(EXPERTS, HIDDEN, INNER) * 0.02 for _ in range(LAYERS)]
    routers = [rand(EXPERTS, HIDDEN) for _ in range(LAYERS)]
    x, norm = rand(tokens, HIDDEN), NormSpec(rand(HIDDEN), 1e-6)
    kernels = TritonKernels()
    scratch, pdl = kernels.scratch, kernels.pdl
    picks = [route(rand(tokens, EXPERTS), SPEC, pdl=pdl, dtype=torch.int32) for _ in range(LAYERS)]
    touched = sum(len(ids.unique()) for ids, _ in picks) / LAYERS
    one = 2.0 * HIDDEN * INNER
    flops = 2.0 * tokens * TOP * HIDDEN * INNER
    whole = [
        kernels.pack_mixture(
            Mixture(DenseWeight(r), SPEC, [DenseWeight(w) for w in up], [DenseWeight(w) for w in down], "silu_mul")
        )
        for r, up, down in zip(routers, ups, downs, strict=True)
    ]
    ctx = ForwardContext(kernels, x, x, x, 1, [], [])
    yield "layer", lambda i: whole[i](x, ctx, norm=norm, residual=x), 3 * touched * one, 3 * flops
    if tokens == 1:
        for config in ((1, 4), (2, 4), (4, 4), (8, 8)):
            yield (
                f"pick {config}",
                lambda i, c=config: pick(x, routers[i], None, norm, SPEC, scratch=scratch, pdl=pdl, config=c),
                2.0 * EXPERTS * HIDDEN,
                0.0,
            )
        for config in (
            (2, 2048, 4),
            (1, 2048, 2),
            (1, 2048, 4),
            (4, 2048, 8),
            (2, 2048, 8),
            (4, 2048, 4),
            (2, 1024, 4),
        ):
            yield (
                f"one up {config}",
                lambda i, c=config: one_up(x, ups[i], None, picks[i][0], norm, "silu_mul", pdl=pdl, config=c),
                2 * touched * one,
                0.0,
            )
        h = rand(TOP, INNER)
        for config in ((2, 1024, 8), (2, 1024, 4), (4, 256, 4), (2, 256, 4), (2, 256, 2), (1, 1024, 4), (1, 256, 2)):
            yield (
                f"one down {config}",
                lambda i, c=config: one_down(h, downs[i], None, picks[i], x, pdl=pdl, early=True, config=c),
                touched * one,
                0.0,
            )
        return
    sort = not looks(tokens * TOP, EXPERTS)
    size = pairs_per_tile(tokens * TOP, EXPERTS)
    orders = [sort_pairs(ids, EXPERTS, size, scratch, pdl=pdl) if sort else None for ids, _ in picks]
    logits = rand(tokens, EXPERTS)
    yield "route", lambda i: route(logits, SPEC, pdl=pdl, dtype=torch.int32), 0.0, 0.0
    if sort:
        yield "sort", lambda i: sort_pairs(picks[i][0], EXPERTS, size, scratch, pdl=pdl), 0.0, 0.0
    for t in up_tilings(tokens):
        yield (
            f"up {t}",
            lambda i, t=t: grouped(x, ups[i], None, picks[i][0], orders[i], "silu_mul", up=True, pdl=pdl, tiling=t),
            2 * touched * one,
            2 * flops,
        )
    h = rand(tokens * TOP, INNER)
    for t in down_tilings(tokens):
        yield (
            f"down {t}",
            lambda i, t=t: grouped(h, downs[i], None, picks[i][0], orders[i], None, up=False, pdl=pdl, tiling=t),
            touched * one,
            flops,
        )
    parts = rand(tokens * TOP, HIDDEN)
    yield "combine", lambda i: combine(parts, *picks[i], x, EXPERTS, BF16, pdl=pdl), 2.0 * parts.numel(), 0.0
    if sort and hasattr(torch, "_grouped_mm"):
        counts = [torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).int() for ids, _ in picks]
        gathered = rand(tokens * TOP, HIDDEN)
        yield (
            "torch grouped up",
            lambda i: torch._grouped_mm(gathered, ups[i].transpose(1, 2), counts[i]),
            2 * touched * one,
            2 * flops,
        )
        yield (
            "torch grouped down",
            lambda i: torch._grouped_mm(h, downs[i].transpose(1, 2), counts[i]),
            touched * one,
            flops,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,2,8,32,64,256,512,8192")
    parser.add_argument("--compile", default="")
    args = parser.parse_args()
    share, of = (int(n) for n in (args.compile or "0/1").split("/"))
    at = 0
    for tokens in (int(n) for n in args.tokens.split(",")):
        for name, call, size, flops in cases(tokens):
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
