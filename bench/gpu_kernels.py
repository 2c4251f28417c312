"""Times kernel variants on an NVIDIA GPU by graph replays over rotating data, JSON out.

python bench/gpu_kernels.py [--only PREFIX,...] [--compile I/N] [--json OUT] [--tune TABLE]

Geometry: 8B Llama (hidden 4096, inner 14336, 32 heads, 8 key/value heads of 128, vocabulary 128256), bf16, random
data. Every figure is a median over replays; weights rotate through more memory than the L2 holds. With --compile the
variants of share I of N are only compiled (in parallel processes), so that the timed run finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from geometries import PRODUCTS_8B as SHAPES
from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, KVSpec, KVView, NormSpec, RopeSpec
from tokenmill.kernels.triton.attention import decode
from tokenmill.kernels.triton.attention.decode import attend_one
from tokenmill.kernels.triton.attention.gathered import arrange, attend_gathered, gather
from tokenmill.kernels.triton.attention.long import MOST, attend_long
from tokenmill.kernels.triton.attention.prefill import attend_many
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.ways_by_shape import FEW, RUNGS, Way, operation

BF16 = torch.bfloat16


@dataclass
class Case:
    """make() -> (one call per data set, bytes moved, operations)."""

    name: str
    make: Callable[[], tuple[list[Callable[[], object]], float, float]]
    operation: str = ""
    way: Way = ()


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


WEIGHTS: dict[str, list[torch.Tensor]] = {}


def weights(name: str) -> list[torch.Tensor]:
    if name not in WEIGHTS:
        out, inner, *_ = SHAPES[name]
        copies = max(2, min(12, int(6e8 // (out * inner * 2))))
        WEIGHTS[name] = [rand(out, inner) * 0.02 for _ in range(copies)]
    return WEIGHTS[name]


def ways(name: str, rows: int) -> Iterator[Way]:
    """What might be the fastest."""
    yield ("blas",)
    if rows > FEW:
        yield ("wide",)
        return
    gated, normed, head = name == "gate_up", SHAPES[name][2] and name != "head", name == "head"
    if rows == 1:
        for config in ((1, 4096, 4), (2, 2048, 4), (4, 2048, 8), (2, 4096, 8), (1, 4096, 8), (2, 4096, 4)):
            yield "gemv", *config
    if head:
        cuts = ((64, 128, 1, 4, 4, 2), (64, 128, 1, 3, 4, 2), (128, 128, 1, 3, 8, 2), (64, 256, 1, 2, 4, 2))
    elif gated:
        cuts = ((64, 128, 1, 3, 4, 2), (64, 128, 1, 4, 4, 2), (64, 64, 1, 6, 4, 4), (64, 64, 2, 5, 4, 4),
                (128, 64, 1, 4, 8, 4), (128, 64, 1, 3, 8, 4), (128, 128, 1, 2, 8, 2), (64, 64, 1, 5, 4, 4))  # fmt: skip
    else:
        cuts = ((64, 128, 2, 4, 4, 2), (64, 128, 4, 4, 4, 2), (64, 128, 4, 3, 4, 2), (64, 128, 7, 4, 4, 2),
                (64, 256, 2, 3, 4, 2), (64, 256, 4, 2, 4, 2), (128, 128, 4, 3, 8, 2), (64, 64, 4, 6, 4, 4),
                (128, 128, 2, 3, 8, 2), (128, 64, 4, 4, 4, 4), (128, 64, 8, 4, 4, 4), (128, 64, 7, 4, 4, 4),
                (128, 64, 3, 6, 4, 4), (128, 128, 7, 2, 8, 2), (128, 128, 8, 2, 8, 2))  # fmt: skip
    for cut in cuts:
        if rows == 1 and (cut[0] > 64 or not head):
            continue
        yield "thin", *cut, 0
        if normed and cut in ((64, 64, 4, 6, 4, 4), (128, 64, 2, 4, 4, 4)) and rows <= 16:
            yield "thin", *cut, 1


def way_case(name: str, rows: int, way: Way, pdl: bool = True) -> Case:
    out, inner, has_norm, act, has_residual = SHAPES[name]
    has_norm = has_norm and name != "head"

    def make():
        x, many = rand(rows, inner), weights(name)
        norm = NormSpec(rand(inner), 1e-5) if has_norm else None
        residual = rand(rows, out) if has_residual else None
        kernels = TritonKernels(without=() if pdl else ("dependent-launch",))
        kernels.launch.scratch = SCRATCH
        kernels.ways.known = {operation(rows, (out, inner), act, has_norm): way}
        calls = [lambda w=w: kernels.product(x, w, norm=norm, act=act, residual=residual) for w in many]
        return calls, many[0].numel() * 2.0, 2.0 * rows * out * inner

    tuned = operation(rows, (out, inner), act, has_norm) if pdl else ""
    return Case(f"linear {name} m{rows} {' '.join(map(str, way))}{'' if pdl else ' no-pdl'}", make, tuned, way)


LAYERS = 32


def paged(
    lengths: list[int], queries: list[int], shared: int = 0, layers: int = 1
) -> tuple[AttentionSpec, ForwardContext, TritonKernels]:
    """Shuffled blocks of random keys, laid out as in the cache; the last `queries[i]` positions of i are new."""
    size, heads, dim = 16, 8, 128
    held = [-(-n // size) for n in lengths]
    total = sum(held) + 1
    pages = torch.empty(layers, total, 2, heads, size, dim, device="cuda", dtype=torch.bfloat16)
    for layer in range(layers):
        pages[layer].normal_()
    order = torch.randperm(total - 1, device="cuda").int()
    tables = torch.zeros(len(lengths), max(held), dtype=torch.int32, device="cuda")
    at = 0
    for i, count in enumerate(held):
        tables[i, :count] = order[at : at + count]
        at += count
    if shared:
        tables[:, : shared // size] = tables[:1, : shared // size]
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]).cuda()
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(queries)).cuda()
    slots = tables[seq, positions // size].long() * size + positions % size
    plan = GroupPlan(tables, None, torch.tensor(held, dtype=torch.int32, device="cuda"), slots, bool(shared))
    angle = torch.rand(max(lengths), 64, device="cuda")
    rope = RopeSpec(angle.cos(), angle.sin(), 128)
    spec = AttentionSpec(0, 0, 32, KVSpec("full", heads, dim, dim), dim**-0.5, rope=rope)
    kernels = TritonKernels()
    views = [KVView(pages[layer, :, 0], pages[layer, :, 1]) for layer in range(layers)]
    ctx = ForwardContext(kernels, positions, starts, lens, max(queries), views, [plan], block_size=size)
    return spec, ctx, kernels


def with_config(config: tuple, kernels: TritonKernels, q: torch.Tensor, spec: AttentionSpec, ctx: ForwardContext):
    """Attention that decodes so."""
    plain, decode.decode_config = decode.decode_config, lambda *_, **__: config
    try:
        return kernels.attention(q, spec, ctx)
    finally:
        decode.decode_config = plain


def decode_case(
    name: str, lengths: list[int], config: tuple | None = None, shared: int = 0, whole: bool = False,
    fresh: bool = True,
) -> Case:  # fmt: skip
    def make():
        sets = []
        moved = sum(lengths) * 4096.0
        layers = max(1, min(LAYERS, int(3e8 // moved)))
        first, ctx, kernels = paged(lengths, [1] * len(lengths), shared, layers)
        q = rand(len(lengths), 6144) if fresh and not whole else rand(len(lengths), 32, 128)
        out = torch.empty(len(lengths), 4096, device="cuda", dtype=BF16)
        for layer in range(layers):
            spec = replace(first, layer=layer)
            if whole and config:
                sets.append(lambda q=q, s=spec, c=ctx, k=kernels: with_config(config, k, q, s, c))
            elif whole:
                sets.append(lambda q=q, s=spec, c=ctx, k=kernels: k.attention(q, s, c))
            else:
                sets.append(
                    lambda q=q, o=out, s=spec, c=ctx: attend_one(
                        q, o, s, c, SCRATCH, pdl=True, config=config, fresh=fresh
                    )
                )
        return sets, moved, 0.0

    return Case(f"decode {name} {'' if fresh or whole else 'prepared '}{config or ''}", make)


def layer_case(rows: int, length: int, pdl: bool = True, **changes: Way) -> Case:
    """A whole layer in a chain of layers, with operations done in other ways; `attend`: a decode config, () for none,
    "apart" in front: prepared in a launch of its own."""

    def make():
        first, ctx, kernels = paged([length] * rows, [1] * rows, layers=8)
        kernels.launch.pdl = pdl
        kernels.launch.scratch = SCRATCH
        for name, way in changes.items():
            if name != "attend":
                out, inner, normed, act, _ = SHAPES[name]
                kernels.ways.known = {**kernels.ways.known, operation(rows, (out, inner), act, normed): way}
        hidden, gain = rand(rows, 4096), NormSpec(rand(4096), 1e-5)
        plain, config = decode.decode_config, changes.get("attend")

        def attend(qkv, spec):
            if config == ():
                return qkv[:, :4096].contiguous()
            if config is None:
                return kernels.attend(qkv, spec, ctx)
            apart = config[0] == "apart"
            decode.decode_config = lambda *_, **__: config[1:] if apart else config
            y = (
                kernels.attention(kernels.prepare_qkv(qkv, spec, ctx), spec, ctx)
                if apart
                else kernels.attend(qkv, spec, ctx)
            )
            decode.decode_config = plain
            return y

        def call(layer: int):
            x = hidden
            w = {name: weights(name)[layer % len(weights(name))] for name in SHAPES}
            y = attend(kernels.product(x, w["qkv"], norm=gain), replace(first, layer=layer))
            x = kernels.product(y, w["o"], residual=x)
            y = kernels.product(x, w["gate_up"], norm=gain, act="silu_mul")
            return kernels.product(y, w["down"], residual=x)

        moved = sum(SHAPES[name][0] * SHAPES[name][1] * 2.0 for name in SHAPES if name != "head")
        return [lambda i=i: call(i) for i in range(8)], moved + rows * length * 4096.0, 0.0

    words = " ".join(f"{name}:{','.join(map(str, way))}" for name, way in changes.items())
    return Case(f"layer {rows}x{length} {words}{'' if pdl else 'no-pdl'}", make)


def prefill_case(
    name: str, lengths: list[int], queries: list[int], config: tuple | None = None, dense: bool = False
) -> Case:
    def make():
        spec, ctx, _ = paged(lengths, queries)
        q = rand(sum(queries), 32, 128)
        out = torch.empty(sum(queries), 4096, device="cuda", dtype=BF16)
        pairs = sum(k * n - k * (k - 1) / 2 for n, k in zip(lengths, queries, strict=True))
        if not dense:
            return [lambda: attend_many(q, out, spec, ctx, SCRATCH, pdl=True, config=config)], 0.0, pairs * 4 * 32 * 128
        ctx.groups[0].reach = sum(lengths) + 16 * len(lengths)
        assert ctx.groups[0].reach < MOST
        arranged = arrange(ctx, len(q), 4, config[0] if config else 128)

        def call():
            gathered = gather(spec, ctx, arranged[0], q.dtype, pdl=True)
            if config is None:
                attend_long(q, out, spec, ctx, arranged, gathered, pdl=True, hopper=True)
            else:
                attend_gathered(q, out, spec, ctx, arranged, gathered, pdl=True, config=config)

        return [call], 0.0, pairs * 4 * 32 * 128

    return Case(f"prefill {name} {'gathered ' if dense else ''}{config or ''}", make)


def blas_case(name: str, rows: int, library: str) -> Case:
    """What cuBLAS gives, without anything fused."""

    def make():
        x, many = rand(rows, SHAPES[name][1]), weights(name)

        def call(w):
            torch.backends.cuda.preferred_blas_library(library)
            return torch.nn.functional.linear(x, w)

        return [lambda w=w: call(w) for w in many], many[0].numel() * 2.0, 2.0 * rows * many[0].numel()

    return Case(f"blas {name} m{rows} {library}", make)


def norm_case(rows: int) -> Case:
    def make():
        x, kernels, norm = rand(rows, 4096), TritonKernels(), NormSpec(rand(4096), 1e-5)
        return [lambda: kernels.norm(x, norm)], 0.0, 0.0

    return Case(f"norm {rows}", make)


def prepare_case(tokens: int) -> Case:
    def make():
        spec, ctx, kernels = paged([tokens], [tokens])
        qkv = rand(tokens, 6144)
        return [lambda: kernels.prepare_qkv(qkv, spec, ctx)], tokens * 6144 * 4.0, 0.0

    return Case(f"prepare {tokens}", make)


def sdpa_case(which: str, tokens: int) -> Case:
    def make():
        q, k, v = rand(1, 32, tokens, 128), rand(1, 8, tokens, 128), rand(1, 8, tokens, 128)
        backend = getattr(torch.nn.attention.SDPBackend, which)

        def call():
            with torch.nn.attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return [call], 0.0, tokens * (tokens + 1) / 2 * 4 * 32 * 128

    return Case(f"sdpa {which} {tokens}", make)


def ceiling_cases() -> Iterator[Case]:
    def copy():
        a, b = rand(1 << 30), rand(1 << 30)
        return [lambda: b.copy_(a)], 4.0 * (1 << 30), 0.0

    def read():
        a = rand(1 << 31)
        return [lambda: a.view(torch.int32).amax()], 4.0 * (1 << 30), 0.0

    def matmul():
        a, b = rand(8192, 8192), rand(8192, 8192)
        return [lambda: a @ b], 0.0, 2.0 * 8192**3

    yield Case("ceiling copy", copy)
    yield Case("ceiling read (torch amax)", read)
    yield Case("ceiling bf16 matmul 8192", matmul)


def all_cases() -> Iterator[Case]:
    yield from ceiling_cases()
    for name in SHAPES:
        for rows in RUNGS:
            for way in ways(name, rows):
                yield way_case(name, rows, way)
    yield way_case("o", 1, ("gemv", 2, 2048, 4), pdl=False)
    yield way_case("o", 32, ("thin", 64, 128, 4, 4, 4, 2, 0), pdl=False)
    for rows in (1, 32):
        yield norm_case(rows)
    yield from layer_cases()
    for name in SHAPES:
        for rows in (320, 352, 384, 416, 448, 480, 512):
            for library in ("cublas",):
                yield blas_case(name, rows, library)
    for config in ((16, 64, 4, 3, 0, 1), (8, 64, 4, 3, 0, 1), (16, 32, 4, 3, 0, 1)):
        yield decode_case("1x300", [300], config)
    for config in ((2, 64, 4, 3, 2, 1), (4, 32, 1, 3, 0, 1), (4, 32, 2, 3, 0, 1), (2, 64, 2, 5, 0, 1)):
        for fresh in (True, False):
            yield decode_case("32x300", [300] * 32, config, fresh=fresh)
    for config in (
        (1, 64, 4, 3, 1, 1),
        (1, 64, 4, 5, 1, 1),
        (1, 64, 4, 7, 1, 1),
        (1, 32, 4, 7, 1, 1),
        (1, 64, 2, 5, 1, 1),
        (1, 32, 2, 3, 1, 1),
    ):
        for fresh in (True, False):
            yield decode_case("256x800", [800 - i for i in range(256)], config, fresh=fresh)
    for config in ((8, 64, 4, 3, 1, 1), (4, 64, 4, 3, 1, 1), (4, 64, 4, 5, 1, 1), (8, 64, 4, 5, 1, 1)):
        yield decode_case("16x16000", [16000] * 16, config)
    yield decode_case("256x2208 shared 2048", [2208] * 256, shared=2048, whole=True)
    for config in ((1, 64, 2, 5, 1, 1), (1, 32, 1, 5, 1, 1), (1, 32, 2, 3, 1, 1), (1, 64, 4, 3, 1, 1),
                   (1, 64, 2, 3, 0, 1), (1, 32, 1, 3, 0, 1), (1, 64, 2, 3, 2, 1), (1, 16, 1, 5, 0, 1)):  # fmt: skip
        yield decode_case("256x2208 shared 2048", [2208] * 256, config, shared=2048, whole=True)
        yield decode_case("256x2208 shared 2192", [2208] * 256, config, shared=2192, whole=True)
    yield decode_case("256x2208 not shared", [2208] * 256, whole=True)
    for config in ((256, 64, 8, 3), (256, 64, 8, 5), (128, 128, 8, 5), (128, 64, 8, 5), (128, 64, 8, 7)):
        yield prefill_case("8192", [8192], [8192], config)
    for config in (
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (256, 64, 8, 3),
        (64, 64, 4, 3),
    ):
        yield prefill_case("8192", [8192], [8192], config, dense=True)
    yield prefill_case("8192", [8192], [8192], dense=True)
    yield prefill_case("8192 of 16384", [16384], [8192], dense=True)
    yield prefill_case("8x1024", [1024] * 8, [1024] * 8, dense=True)
    yield prefill_case("8x1024", [1024] * 8, [1024] * 8)
    yield prefill_case("16x512", [512] * 16, [512] * 16, dense=True)
    for config in ((128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 5), (64, 64, 4, 5), (128, 64, 4, 5)):
        yield prefill_case("16x512", [512] * 16, [512] * 16, config)
        yield prefill_case("64x128 of 2176", [2176] * 64, [128] * 64, config)
    yield prefill_case("16x512", [512] * 16, [512] * 16, (128, 64, 8, 3), dense=True)
    for name, length, new, count in (("8x1024", 1024, 1024, 8), ("16x512", 512, 512, 16), ("27x300", 300, 300, 27),
                                     ("32x128", 128, 128, 32), ("28x128 of 2176", 2176, 128, 28)):  # fmt: skip
        for dense in (True, False):
            yield prefill_case(f"short {name}", [length] * count, [new] * count, dense=dense)
    yield sdpa_case("CUDNN_ATTENTION", 8192)
    yield sdpa_case("FLASH_ATTENTION", 8192)
    yield prepare_case(1)
    yield prepare_case(8192)


def layer_cases() -> Iterator[Case]:
    """One operation changed at a time: what counts is the chain, where launches overlap."""
    for rows in (1, 32):
        yield layer_case(rows, 300)
        yield layer_case(rows, 300, pdl=False)
        yield layer_case(rows, 300, attend=())
    for config in ((16, 32, 8, 3, 0, 1), (8, 64, 8, 3, 0, 1), (8, 32, 8, 3, 0, 1), (16, 32, 2, 3, 0, 1),
                   ("apart", 16, 32, 2, 3, 0, 1), ("apart", 16, 32, 1, 3, 0, 1)):  # fmt: skip
        yield layer_case(1, 300, attend=config)
    for config in ((1, 64, 4, 3, 4, 1), (1, 128, 8, 3, 1, 1), (1, 64, 8, 3, 2, 1), (4, 32, 2, 3, 0, 1),
                   ("apart", 4, 32, 1, 3, 0, 1), ("apart", 4, 32, 1, 5, 0, 1), ("apart", 2, 32, 1, 5, 0, 1),
                   ("apart", 4, 32, 2, 3, 0, 1), ("apart", 2, 64, 2, 3, 0, 1), ("apart", 2, 64, 2, 5, 0, 1),
                   ("apart", 4, 16, 1, 5, 0, 1), ("apart", 8, 32, 1, 3, 0, 1)):  # fmt: skip
        yield layer_case(32, 300, attend=config)
    for cut in ((64, 128, 1, 5, 4, 8), (64, 128, 2, 3, 4, 2)):
        yield layer_case(32, 300, qkv=("thin", *cut, 0))
    for cut in ((64, 128, 2, 4, 4, 4), (64, 128, 2, 4, 4, 0), (64, 128, 2, 3, 4, 4)):
        yield layer_case(32, 300, o=("thin", *cut, 0))
    for cut in ((64, 256, 2, 3, 4, 2), (64, 256, 2, 3, 4, 4), (64, 256, 2, 3, 4, 8), (64, 128, 4, 4, 4, 8)):
        yield layer_case(32, 300, o=("thin", *cut, 0))
    yield layer_case(32, 300, o=("thin", 64, 256, 2, 3, 4, 8, 0), qkv=("thin", 64, 128, 2, 4, 4, 8, 0))
    for cut in ((128, 64, 1, 4, 8, 8), (128, 64, 1, 4, 8, 2), (64, 64, 1, 5, 4, 4)):
        yield layer_case(32, 300, gate_up=("thin", *cut, 0))


def time_calls(calls: list[Callable[[], object]], slow: bool) -> float:
    """Median seconds of one call, by replays of a graph with several rounds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = 1 if slow else max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for i in range(2 + (3 if slow else 8)):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        if i >= 2:
            times.append(a.elapsed_time(b) * 1e-3 / (rounds * len(calls)))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--tune", default="", help="write the fastest ways here")
    args = parser.parse_args()
    found, best = [], {}
    share, of = (int(n) for n in args.compile.split("/")) if args.compile else (0, 1)
    for i, case in enumerate(all_cases()):
        if not case.name.startswith(tuple(args.only.split(","))) or i % of != share:
            continue
        try:
            calls, moved, operations = case.make()
            if args.compile:
                if not case.name.startswith(("ceiling", "sdpa")) and case.way != ("blas",):
                    calls[0]()
                WEIGHTS.clear()
                continue
            seconds = time_calls(calls, case.name.startswith(("prefill", "sdpa", "ceiling")))
            del calls
            if case.name.startswith(("decode", "ceiling")):
                torch.cuda.empty_cache()
        except Exception as error:
            if not args.compile:
                print(f"{case.name:44s} failed: {type(error).__name__} {str(error).splitlines()[0][:80]}", flush=True)
            continue
        row = {"case": case.name, "us": seconds * 1e6}
        if moved:
            row["TBps"] = moved / seconds / 1e12
        if operations:
            row["TFLOPs"] = operations / seconds / 1e12
        found.append(row)
        if case.operation and seconds < best.get(case.operation, (1e9, ()))[0]:
            best[case.operation] = (seconds, case.way)
        print(
            f"{case.name:44s} {row['us']:9.1f} us {row.get('TBps', 0):6.2f} TB/s {row.get('TFLOPs', 0):6.1f} TF",
            flush=True,
        )
    if args.tune:
        table = {torch.cuda.get_device_name(): {name: list(way) for name, (_, way) in best.items()}}
        with open(args.tune, "w") as file:
            file.write(json.dumps(table, indent=1).replace("\n   ", "").replace("\n  ]", "]") + "\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": found}, file, indent=1
            )


SCRATCH = Scratch()

if __name__ == "__main__":
    torch.manual_seed(0)
    main()
