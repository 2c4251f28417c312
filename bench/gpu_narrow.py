"""Times products with 8 and 4 bit weights on an NVIDIA GPU, by graph replays over rotating weights.

python bench/gpu_narrow.py [--geometry NAME,...] [--only PREFIX,...] [--compile I/N] [--json OUT] [--tune TABLE]

NAMEs are dense ones of geometries.py (default: 8B Llama), bf16 activations, random data. A figure is the median of
whole operations: norm before, rounding of activations, activation and residual after; shown are the fastest way of each
operation, and what is taken now. With --compile the variants of share I of N are only compiled (in parallel processes).
--tune writes the fastest ways as the table that `kernels/triton/quantised/measured_narrow.json` holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from geometries import Product, products
from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.ways_by_shape import Way, cut_of
from tokenmill.kernels.triton.quantised.narrow import NarrowMatrix, pack4, pack8
from tokenmill.kernels.triton.quantised.narrow_linear import narrow_operation, rungs

KINDS = {
    "fp8": ("qkv", "o", "gate_up", "down", "head"),
    "int8": ("head", "gate_up"),
    "int4": ("qkv", "o", "gate_up", "down"),
    "int4/32": ("qkv", "o", "gate_up", "down"),
}
ROWS = {
    "fp8": (1, 16, 32, 64, 256, 512, 8192),
    "int8": (1, 32, 512, 8192),
    "int4": (1, 16, 32, 64, 128, 256, 512),
    "int4/32": (1, 32),
}
ROTATED = 400_000_000
"""Bytes that copies of a weight fill, so that none is found in the L2."""
GEMV = (  # BN, words, warps, lines to ask for early
    (4, 256, 2, 0), (8, 256, 2, 0), (4, 128, 1, 0), (8, 512, 4, 0), (4, 512, 4, 0), (2, 512, 4, 0),
    (4, 256, 2, 16), (8, 256, 2, 16), (4, 128, 1, 16), (8, 512, 4, 16), (4, 512, 4, 16), (2, 512, 4, 16),
    (4, 256, 2, 32), (8, 256, 2, 32), (4, 128, 1, 32),
)  # fmt: skip
THIN = (  # BN, BK, split, stages, warps, prefetch
    (64, 256, 1, 6, 4, 2), (64, 256, 1, 6, 4, 8), (64, 256, 1, 6, 4, 16), (64, 256, 2, 5, 4, 4), (64, 256, 2, 6, 4, 8),
    (64, 256, 2, 6, 4, 2), (64, 256, 4, 4, 4, 4), (128, 256, 1, 3, 8, 2), (128, 256, 1, 3, 8, 4),
    (128, 128, 1, 5, 8, 8), (64, 256, 1, 4, 4, 2), (128, 128, 1, 5, 8, 2),
)  # fmt: skip
STREAM = (  # BN (both halves of a gated weight), most rows of a tile, split, stages, warps, registers
    (64, 64, 1, 8, 4, 104), (64, 64, 2, 6, 4, 104), (64, 64, 2, 8, 4, 104), (64, 64, 3, 4, 4, 80),
    (64, 64, 4, 4, 4, 80), (64, 64, 4, 6, 4, 104), (64, 64, 8, 3, 4, 64), (128, 64, 1, 4, 4, 104),
    (128, 64, 1, 6, 4, 128), (128, 64, 2, 4, 4, 104), (128, 64, 4, 4, 4, 104), (128, 64, 8, 4, 4, 104),
)  # fmt: skip
STREAM_MANY = (  # the same for more rows than 64
    (128, 64, 1, 4, 4, 104), (128, 64, 2, 4, 4, 104), (128, 128, 1, 3, 4, 168), (128, 128, 1, 4, 4, 168),
    (128, 128, 2, 3, 4, 168), (128, 128, 1, 4, 8, 104), (128, 128, 2, 4, 8, 104), (128, 256, 1, 2, 8, 168),
    (128, 256, 1, 3, 8, 168), (128, 256, 2, 3, 8, 168), (256, 64, 1, 4, 8, 104), (256, 128, 1, 4, 8, 168),
    (256, 128, 1, 3, 8, 168), (256, 128, 2, 4, 8, 168), (128, 128, 2, 4, 4, 168), (128, 128, 4, 4, 4, 168),
    (64, 128, 1, 3, 4, 104), (64, 128, 2, 3, 4, 104), (64, 128, 4, 3, 4, 104), (64, 256, 1, 2, 4, 168),
)  # fmt: skip
HEIGHTS = (16, 32, 48, 64, 96, 112, 128)
"""Rows of the weight in a piece of products/stream.py."""
WIDE = ((128, 128, 128, 3, 8), (128, 128, 128, 4, 4), (64, 128, 128, 4, 4), (128, 256, 64, 4, 8))


def ways(kind: str, name: str, shape: Product, rows: int) -> Iterator[Way]:
    """What is taken now, and what might be faster."""
    yield ()
    chunks = shape[1] // 128
    gated = name == "gate_up"
    if rows == 1:
        yield from (("gemv", *cut) for cut in GEMV if not (gated and cut[0] == 16))
        return
    if kind.startswith("int4"):
        cuts = STREAM if rows <= 64 else STREAM_MANY
        yield from (("stream", *cut) for cut in cuts if not (gated and cut[0] == 64))
        if rows >= 64:
            yield ("widen",)
        return
    if rows <= 64 and kind == "fp8":
        for height in (h for h in HEIGHTS if h <= 64 or not gated):
            yield "stream", *cut_of(height, 1, max(16, rows), gated=gated)
    if rows <= 64:
        for cut in THIN:
            fits = chunks % (cut[2] * cut[1] // 128) == 0
            if fits and not (cut[2] > 2 and (gated or name == "head")):
                yield "thin", *cut
    if rows >= 64:
        if kind == "fp8":
            yield ("library",)
        for cut in WIDE:
            if rows >= 512 or cut[1] == 128:
                yield "wide", *cut


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def matrix(kind: str, out: int, inner: int) -> NarrowMatrix:
    scales = torch.rand(out, 1, device="cuda") / 1000 + 0.001
    if kind == "fp8":
        data = torch.randint(0, 256, (out, inner), dtype=torch.uint8, device="cuda") & 0xBF  # no NaN
        return pack8(data.view(torch.float8_e4m3fn), scales, None)
    if kind == "int8":
        return pack8(torch.randint(-127, 128, (out, inner), dtype=torch.int8, device="cuda"), scales / 100, None)
    q = torch.randint(-8, 8, (out, inner), dtype=torch.int8, device="cuda")
    groups = inner // int(kind.partition("/")[2] or 128)
    return pack4(q, scales.expand(out, groups) * torch.rand(out, groups, device="cuda"), None, None)


@lru_cache(2)
def weights(kind: str, out: int, inner: int, most: int) -> list[NarrowMatrix]:
    """Copies of a matrix, so many that none is found in the L2."""
    first = matrix(kind, out, inner)
    return [first, *(matrix(kind, out, inner) for _ in range(min(most, max(2, ROTATED // first.bytes())) - 1))]


def calls(kind: str, shape: Product, rows: int, way: Way, most: int) -> tuple[list[Callable[[], object]], NarrowMatrix]:
    out, inner, has_norm, act, has_residual = shape
    many = weights(kind, out, inner, most)
    kernels = TritonKernels()
    if way:
        kernels.launch.narrow_ways = {narrow_operation(rungs(rows)[0], many[0], act): way}
    x = rand(rows, inner)
    norm = NormSpec(rand(inner), 1e-5) if has_norm else None
    residual = rand(rows, out) if has_residual else None
    return [lambda w=w: kernels.product(x, w, norm=norm, act=act, residual=residual) for w in many], many[0]


def replayed(steps: list[Callable[[], object]]) -> float:
    """Seconds of one call."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(steps))
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--geometry", default="llama-3-8b")
    parser.add_argument("--only", default="")
    parser.add_argument("--ways", default="", help="only these kinds of ways, and what is taken now")
    parser.add_argument("--compile", default="")
    parser.add_argument("--json")
    parser.add_argument("--tune")
    args = parser.parse_args()
    shapes = [(n, s) for g in args.geometry.split(",") for n, s in products(g).items()]
    found = [(k, n, s, r) for k in KINDS for n, s in shapes if n in KINDS[k] for r in ROWS[k]]
    found = [c for c in found if f"{c[0]} {c[1]} {c[3]} ".startswith(tuple(args.only.split(",")))]
    cases = [(*c, w) for c in found if c[1] != "head" or c[3] in (1, 32, 64) for w in ways(*c)]
    cases = [c for c in cases if not c[4] or not args.ways or c[4][0] in args.ways.split(",")]
    if args.compile:
        share, of = (int(n) for n in args.compile.split("/"))
        cases = cases[share::of]
    best: dict[str, tuple[float, Way, float]] = {}
    now: dict[str, float] = {}
    lines = []
    for kind, name, shape, rows, way in cases:
        try:
            steps, weight = calls(kind, shape, rows, way, 1 if args.compile else 1000)
            if args.compile:
                steps[0]()
                continue
            seconds = replayed(steps)
        except Exception as error:  # a variant that does not fit is no reason to lose the others
            lines.append((f"{kind} {name} {shape[:2]} {rows} {way}", str(error)[:100].replace("\n", " "), 0.0))
            continue
        finally:
            torch.cuda.synchronize()
        rate = weight.bytes() / seconds / 1e12
        flops = 2.0 * rows * weight.shape[0] * weight.shape[1] / seconds / 1e12
        lines.append((f"{kind} {name} {shape[:2]} {rows} {way}", round(seconds * 1e6, 2), round(rate, 3)))
        operation = narrow_operation(rungs(rows)[0], weight, shape[3])
        if not way:
            now[operation] = seconds
        elif operation not in best or seconds < best[operation][0]:
            best[operation] = seconds, way, flops if rows > 64 else rate
    for operation, (seconds, way, rate) in best.items():
        print(f"{operation:40} {seconds * 1e6:9.2f} us (now {now.get(operation, 0.0) * 1e6:.2f}) {rate:8.2f} {way}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(lines, file, indent=0)
    if args.tune:
        table = {torch.cuda.get_device_name(): {name: found[1] for name, found in best.items()}}
        with open(args.tune, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
