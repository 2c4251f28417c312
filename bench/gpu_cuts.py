"""Which cuts of decode attention and of one token's experts are fastest on this GPU, for heads and experts of any size.

python bench/gpu_cuts.py [attention|latent|experts] [--only NAME,...] [--rows 1,32] [--length 400] [--processes 15]
    [--form bf16|fp8|fp8-blocks|int8]      (of experts)

Every figure is the time of a layer's part within a chain of layers, by graph replays: attention between the products
around it, experts behind a product. So what overlaps in an engine overlaps here, too. `now` is what the engine takes.
Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gpu_experts import stack_of
from tokenmill.compute.forward import (
    AttentionSpec,
    ForwardContext,
    GroupPlan,
    KVSpec,
    KVView,
    Mixture,
    NormSpec,
    RopeSpec,
    RouteSpec,
    Touches,
)
from tokenmill.kernels.triton.attention import decode, stepping
from tokenmill.kernels.triton.attention import latent as latent_kernels
from tokenmill.kernels.triton.experts import experts as one_token
from tokenmill.kernels.triton.experts import mixture
from tokenmill.kernels.triton.experts.route import pick
from tokenmill.kernels.triton.experts.route_few import pick_few
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.quant.dense import DenseWeight

BF16, LAYERS, PAGE = torch.bfloat16, 4, 16
HEADS = {  # query heads, key heads, size, hidden, normed queries
    "qwen3.6": (16, 2, 256, 2048, True), "gemma-2-9b": (16, 8, 256, 3584, False),
    "gemma-3-4b": (8, 4, 256, 2560, True), "llama-3-8b": (32, 8, 128, 4096, False),
    "qwen3-30b": (32, 4, 128, 2048, True), "qwen2.5-0.5b": (14, 2, 64, 896, False),
    "qwen2.5-7b": (28, 4, 128, 3584, False), "glm-4-9b": (32, 2, 128, 4096, False),
    "llama-2-7b": (32, 32, 128, 4096, False), "phi-3-mini": (32, 32, 96, 3072, False),
    "gpt-oss-20b": (64, 8, 64, 2880, False), "llama-3.2-1b": (32, 8, 64, 2048, False),
    "falcon-7b": (71, 1, 64, 4544, False),
}  # fmt: skip
LATENT = {  # heads, their keys without and with rotation, their values, vectors without rotation, hidden
    "deepseek-lite": (16, 128, 64, 128, 512, 2048), "glm-4.7-flash": (20, 192, 64, 256, 512, 2048),
    "kimi-linear": (32, 128, 64, 128, 512, 2304), "minicpm3": (40, 64, 32, 64, 256, 2560),
    "deepseek-v3": (128, 128, 64, 128, 512, 7168),
}  # fmt: skip
EXPERTS = {  # experts, hidden, inner, chosen, one shared with a gate (None: without)
    "qwen3.6": (256, 2048, 512, 8, True), "qwen3-30b": (128, 2048, 768, 8, False),
    "mixtral": (8, 4096, 14336, 2, False), "olmoe": (64, 2048, 1024, 8, False),
    "deepseek-lite": (64, 2048, 1408, 6, False), "granite-4-small": (72, 4096, 768, 10, None),
    "glm-4.7-flash": (64, 2048, 1536, 4, None), "kimi-linear": (256, 2304, 1024, 8, None),
    "ernie-21b": (64, 2560, 1536, 6, False), "glm-4.5-air": (128, 4096, 1408, 8, None),
}  # fmt: skip
Cut = tuple[int, ...]
Case = tuple[str, Callable[[int], object]]
"""Name, and the call for a layer."""


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


CUTS = (
    (32, 32, 8, 3, 0, 1), (16, 32, 8, 3, 0, 1), (8, 32, 8, 3, 0, 1), (16, 64, 4, 2, 1, 1), (8, 64, 8, 2, 0, 1),
    (8, 32, 4, 3, 1, 1), (8, 16, 2, 3, 1, 1), (4, 64, 8, 2, 0, 1), (4, 64, 4, 2, 1, 1), (4, 32, 4, 3, 1, 1),
    (2, 64, 4, 2, 1, 1), (2, 32, 4, 3, 1, 1), (1, 64, 8, 2, 0, 1), (1, 64, 4, 2, 1, 1), (1, 32, 4, 3, 1, 1),
    (1, 32, 2, 5, 1, 1), (1, 16, 2, 3, 1, 1), (16, 32, 4, 3, 1, 1), (8, 64, 4, 3, 1, 1), (4, 64, 8, 3, 2, 8),
    (2, 64, 4, 3, 1, 1), (1, 64, 2, 5, 1, 1), (1, 128, 4, 3, 1, 1),
)  # fmt: skip
"""Of attention: most splits, BN, warps, stages, tiles to bring near, least tiles of a split."""


def decoding(kernels: TritonKernels, views: list[KVView], rows: int, length: int) -> ForwardContext:
    """A step of so many sequences, each with one new token, the last of so many, in shuffled pages."""
    held = -(-length // PAGE)
    tables = torch.randperm(rows * held, device="cuda").int().view(rows, held)
    positions = torch.full((rows,), length - 1, device="cuda")
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    slots = tables[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    entries = torch.full((rows,), held, dtype=torch.int32, device="cuda")
    plan = GroupPlan(tables, None, entries, slots)
    return ForwardContext(kernels, positions, starts, lens, 1, views, [plan], block_size=PAGE)


def attention(name: str, rows: int, length: int) -> Iterator[Case]:
    heads, kv_heads, dim, hidden, normed = HEADS[name]
    kernels = TritonKernels()
    held, wide = -(-length // PAGE), (heads + 2 * kv_heads) * dim
    pages = rand(LAYERS, rows * held + 1, 2, kv_heads, PAGE, dim)
    angle = torch.rand(length, dim // 2, device="cuda")
    norm = NormSpec(rand(dim), 1e-6) if normed else None
    spec = AttentionSpec(
        0, 0, heads, KVSpec("full", kv_heads, dim, dim), dim**-0.5, rope=RopeSpec(angle.cos(), angle.sin(), dim),
        touches=Touches(norm, norm),
    )  # fmt: skip
    views = [KVView(pages[layer, :, 0], pages[layer, :, 1]) for layer in range(LAYERS)]
    ctx = decoding(kernels, views, rows, length)
    ins = [rand(wide, hidden, scale=0.02) for _ in range(LAYERS)]
    outs = [rand(hidden, heads * dim, scale=0.02) for _ in range(LAYERS)]
    x, own, early = rand(rows, hidden), decode.decode_config, stepping.early_keys

    def layer(i: int, fresh: bool | None, cut: Cut | None) -> object:
        if cut is not None:
            decode.decode_config = lambda *_, **__: cut
        if fresh is not None:
            stepping.early_keys = lambda *_, **__: fresh
        try:
            qkv = kernels.product(x, ins[i])
            return kernels.product(kernels.attend(qkv, replace(spec, layer=i), ctx), outs[i], residual=x)
        finally:
            decode.decode_config, stepping.early_keys = own, early

    units, longest = rows * kv_heads, held * PAGE
    now = own(units, longest, spec)
    yield (
        f"now {now} {'fresh' if early(units, wide=2 * dim > decode.WIDE_HEAD, narrow=False) else 'apart'}",
        lambda i: layer(i, None, None),
    )
    for fresh, cut in itertools.product((True, False), CUTS):
        if cut[0] * units <= 2112 and (cut[0] > 1 or units >= 32):
            yield f"{cut} {'fresh' if fresh else 'apart'}", lambda i, f=fresh, c=cut: layer(i, f, c)


LATENT_CUTS = tuple(itertools.product((16, 32, 64), (32, 64, 128), (1, 2, 4, 8, 16, 32), (8,), (2, 3)))
"""Rows, BN, splits, warps, stages."""


def latents(name: str, rows: int, length: int) -> Iterator[Case]:
    heads, plain, rest, values, latent, hidden = LATENT[name]
    kernels, wide, held = TritonKernels(), heads * (plain + rest), -(-length // PAGE)
    pages = rand(LAYERS, rows * held + 1, 1, PAGE, latent + rest)
    views = [KVView(pages[layer], pages[layer][..., :latent]) for layer in range(LAYERS)]
    angle = torch.rand(length, rest // 2, device="cuda")
    spec = AttentionSpec(
        0, 0, heads, KVSpec("latent", 1, latent + rest, latent), plain**-0.5,
        rope=RopeSpec(angle.cos(), angle.sin(), rest, start=latent),
    )  # fmt: skip
    ctx = decoding(kernels, views, rows, length)
    ins = [rand(wide + latent + rest, hidden, scale=0.02) for _ in range(LAYERS)]
    outs = [rand(hidden, heads * values, scale=0.02) for _ in range(LAYERS)]
    ups = [rand(heads, latent, plain, scale=0.05) for _ in range(LAYERS)]
    downs = [rand(heads, values, latent, scale=0.05) for _ in range(LAYERS)]
    x, own = rand(rows, hidden), latent_kernels.latent_config

    def layer(i: int, cut: Cut | None) -> object:
        if cut is not None:
            latent_kernels.latent_config = lambda *_, **__: cut
        try:
            q, low, high = kernels.product(x, ins[i]).split((wide, latent, rest), dim=1)
            mixed = kernels.attend_latent(
                q.unflatten(1, (heads, plain + rest)), (low, high), (ups[i], downs[i]), replace(spec, layer=i), ctx
            )
            assert mixed is not None, "this is not how an engine computes it"
            return kernels.product(mixed.flatten(1), outs[i], residual=x)
        finally:
            latent_kernels.latent_config = own

    yield f"now {own(rows, held * PAGE, spec, 2, one=True)}", lambda i: layer(i, None)
    for cut in LATENT_CUTS:
        if cut[2] * rows <= 2112 and cut[2] * 16 <= length:
            yield f"latent {cut}", lambda i, c=cut: layer(i, c)


UPS = (
    (1, 4096, 4), (1, 4096, 8), (2, 4096, 8), (1, 2048, 2), (2, 2048, 16), (1, 2048, 8),
    (1, 1024, 4), (1, 2048, 4), (2, 512, 2), (2, 512, 4), (2, 1024, 2), (2, 1024, 4), (2, 1024, 8), (2, 2048, 4),
    (2, 2048, 8), (4, 512, 4), (4, 512, 8), (4, 1024, 8), (4, 256, 4), (8, 256, 4), (8, 512, 8), (8, 256, 8),
)  # fmt: skip
DOWNS = (
    (1, 128, 2), (1, 256, 2), (1, 256, 4), (1, 512, 4), (2, 128, 2), (2, 256, 2), (2, 256, 4), (2, 512, 4), (4, 64, 2),
    (4, 128, 4), (4, 256, 8), (2, 64, 1), (4, 64, 4),
)  # fmt: skip
NARROW_UPS = (
    (1, 512, 1), (1, 1024, 1), (1, 2048, 1), (1, 4096, 1), (1, 2048, 2), (1, 4096, 2), (1, 4096, 4), (2, 1024, 1),
    (2, 2048, 2), (2, 1024, 2), (2, 512, 1), (4, 512, 2),
)  # fmt: skip
FEW = ((16, 4), (16, 8), (32, 4), (32, 8), (64, 4), (64, 8), (128, 4))
NEARS = tuple(n << 20 for n in (0, 3, 6, 16, 24))
PICKS = ((1, 4), (2, 4), (4, 4), (8, 4), (2, 2), (4, 8), (8, 8))


def experts(name: str, rows: int, repeated: int, form: str) -> Iterator[Case]:
    count, hidden, inner, top, shared = EXPERTS[name]
    kernels, spec = TritonKernels(), RouteSpec(count, top)
    layers, keep = [], []
    for _ in range(repeated):
        ups, downs = rand(count, 2 * inner, hidden, scale=0.02), rand(count, hidden, inner, scale=0.02)
        beside = (DenseWeight(rand(2 * inner, hidden, scale=0.02)), DenseWeight(rand(hidden, inner, scale=0.02)))
        gate = DenseWeight(rand(1, hidden)) if shared else None
        lists = [DenseWeight(w) for w in ups], [DenseWeight(w) for w in downs]
        router = DenseWeight(rand(count, hidden))
        made = Mixture(router, spec, *lists, "silu_mul", None if shared is False else beside, gate)
        keep.append((ups, downs))
        packed = kernels.pack_mixture(made)
        if form != "bf16":
            each = packed.experts
            packed.ups, packed.downs = (stack_of(form, each, *size) for size in ((2 * inner, hidden), (hidden, inner)))
        layers.append(packed)
    norm, x = NormSpec(rand(hidden), 1e-6), rand(rows, hidden)
    before = [rand(hidden, hidden * 2, scale=0.02) for _ in range(LAYERS)]
    wide = rand(rows, hidden * 2)
    ctx = ForwardContext(kernels, x, x, x, 1, [], [])

    def layer(i: int) -> object:
        return layers[i](kernels.product(wide, before[i], residual=x), ctx, norm=norm, residual=x)

    def changed(i: int, name: str, value: Any, place: Any = one_token) -> object:
        own = getattr(place, name)
        setattr(place, name, value)
        try:
            return layer(i)
        finally:
            setattr(place, name, own)

    yield "now", layer
    if rows > 1:
        for cut in FEW:
            few = lambda *a, c=cut, **k: pick_few(*a, **k, config=c)  # noqa: E731
            yield f"pick few {cut}", lambda i, f=few: changed(i, "pick_few", f, mixture)
        return
    for cut in UPS if form == "bf16" else NARROW_UPS:
        yield f"up {cut}", lambda i, c=cut: changed(i, "up_config", lambda *_: c)
    for cut in DOWNS:
        yield f"down {cut}", lambda i, c=cut: changed(i, "down_config", lambda *_: c)
    for size in NEARS:
        yield f"near {size >> 20}", lambda i, s=size: changed(i, "NEAR", s)
    for cut in PICKS:
        put = lambda *a, c=cut, **k: pick(*a, **k, config=c)  # noqa: E731
        yield f"pick {cut}", lambda i, p=put: changed(i, "pick", p, mixture)


def measure(call: Callable[[int], object]) -> float:
    """Median microseconds of a layer."""
    for i in range(LAYERS):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(8 * LAYERS):
            call(i % LAYERS)
    start, stop, times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(9):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / (8 * LAYERS))
    return statistics.median(times)


def every(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    only = options.only.split(",") if options.only else []
    if options.what in ("all", "latent"):
        for name, rows in itertools.product(only or LATENT, options.rows.split(",")):
            if name in LATENT:
                for case in latents(name, int(rows), options.length):
                    yield f"latent {name} {rows}x{options.length}", case
    if options.what in ("all", "attention"):
        for name, rows in itertools.product(only or HEADS, options.rows.split(",")):
            if name in HEADS:
                for case in attention(name, int(rows), options.length):
                    yield f"attention {name} {rows}x{options.length}", case
    if options.what in ("all", "experts"):
        for name, rows in itertools.product(only or EXPERTS, options.rows.split(",")):
            if name in EXPERTS:
                for case in experts(name, int(rows), LAYERS if options.compile < 0 else 1, options.form):
                    yield f"experts {name} {rows}", case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("all", "attention", "latent", "experts"))
    parser.add_argument("--only", default="")
    parser.add_argument("--kinds", default="", help="of cuts, by the beginning of their names: up,down,pick")
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--form", default="bf16", help="of experts: bf16, fp8, fp8-blocks, int8")
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--compile", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile < 0 and options.processes:
        others = [
            subprocess.Popen([sys.executable, *sys.argv, "--compile", str(n)], stderr=subprocess.DEVNULL)
            for n in range(options.processes)
        ]
        for other in others:
            other.wait()
    group, found = "", []
    kinds = ("now", *options.kinds.split(","))
    for at, (title, (name, call)) in enumerate(every(options)):
        if not name.startswith(kinds):
            continue
        if options.compile >= 0:
            if at % options.processes == options.compile:
                try:
                    call(0)
                except Exception:  # the timed run says so
                    torch.cuda.empty_cache()
            continue
        if title != group:
            tell(group, found)
            group, found = title, []
            measure(call)  # the clock is not there yet
        try:
            found.append((measure(call), name))
        except Exception as error:  # a cut may not fit the chip
            found.append((float("inf"), f"{name}: {str(error)[:60]}"))
    if options.compile < 0:
        tell(group, found)


def tell(group: str, found: list[tuple[float, str]]) -> None:
    """What the engine takes, and the fastest of each kind."""
    if not found:
        return
    now = found[0]
    print(f"{group}: now {now[0]:.2f} us {now[1]}")
    for kind in sorted({name.partition("(")[0] for _, name in found[1:]}):
        best = sorted(each for each in found[1:] if each[1].partition("(")[0] == kind)
        print("  ", "; ".join(f"{us:.2f} {name}" for us, name in best[:7]), flush=True)


if __name__ == "__main__":
    main()
