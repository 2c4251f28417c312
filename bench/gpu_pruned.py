"""Times products with 2:4 matrices on an NVIDIA GPU beside those with dense ones, by graph replays.

python bench/gpu_pruned.py [--tune] [--rows 1,32,64,256,1024,8192]

Geometry: 8B Llama's layer, bf16 and fp8. A figure is the median of whole operations: norm before, rounding of
activations, activation and residual after; in turn dense, 2:4. --tune times ways of few rows and algorithms of
cuSPARSELt, too. The last lines are
of products outside of a recording, where the host counts.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from gpu_narrow import SHAPES, rand, replayed
from tokenmill.compute.forward import NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.pruned import few_rows, library

ROTATED = 400_000_000
TYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
LAYER = ("qkv", "o", "gate_up", "down")
CONFIGS = [(side, deep, unroll) for side in (1, 2, 4, 8) for deep in (1, 2, 4, 8, 16) for unroll in (1, 2, 4)]
"""Warps side by side, warps behind each other, and blocks of a warp that are read at once."""


def stored(kind: str, out: int, inner: int, *, pruned: bool) -> StoredMatrix:
    """A random matrix as a file has it."""
    numbers = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16)
    if pruned:
        fours = numbers.view(out, -1, 4)
        fours.scatter_(2, torch.rand(fours.shape, device="cuda").topk(2, 2).indices, 0.0)
    if kind == "bf16":
        return StoredMatrix("dense", (out, inner), (("numbers", numbers),), lambda: numbers)
    codes = numbers.to(torch.float8_e4m3fn)
    scales = torch.rand(out, 1, device="cuda")
    return StoredMatrix("fp8", (out, inner), (("codes", codes), ("scales", scales)), lambda: numbers)


def calls(kind: str, name: str, rows: int, *, pruned: bool) -> list:
    """Products with as many matrices as do not fit into the L2."""
    out, inner, has_norm, act, has_residual = SHAPES[name]
    kernels, many = TritonKernels(pruned="packed" if pruned else "dense"), []
    for _ in range(max(1, min(8, ROTATED // (out * inner)))):
        matrix = stored(kind, out, inner, pruned=pruned)
        many.append(kernels.pack(matrix) if pruned or kind == "fp8" else matrix.part("numbers"))
    x = rand(rows, inner)
    norm = NormSpec(rand(inner), 1e-5) if has_norm else None
    residual = rand(rows, out) if has_residual else None
    return [lambda w=w: kernels.product(x, w, norm=norm, act=act, residual=residual) for w in many]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", default="1,8,32,64,128,256,512,1024,2048,8192")
    given = parser.parse_args()
    for kind in ("bf16", "fp8"):
        for rows in map(int, given.rows.split(",")):
            parts, sums = [], [0.0, 0.0]
            for name in LAYER:
                both = [replayed(calls(kind, name, rows, pruned=pruned)) * 1e6 for pruned in (False, True)]
                sums = [a + b for a, b in zip(sums, both, strict=True)]
                parts.append(f"{name} {both[0]:.1f}, {both[1]:.1f}")
            print(f"{kind} {rows:5d} rows: {'; '.join(parts)}; layer {sums[0] / sums[1]:.2f} times", flush=True)
    usual = few_rows.default_config
    for kind, name, rows in itertools.product(("bf16", "fp8"), LAYER, (1, 32, 64) if given.tune else ()):
        found = []
        for config in CONFIGS:
            if not 2 <= config[0] * config[1] <= 16 or (rows <= 8 and config[0] > 2):
                continue
            few_rows.default_config = lambda *_, config=config, **__: config
            try:
                found.append((replayed(calls(kind, name, rows, pruned=True)) * 1e6, config))
            except Exception as error:
                print(name, rows, config, type(error).__name__, str(error)[:80])
        found.sort()
        print(kind, name, rows, [(round(t, 1), c) for t, c in found[:4]], flush=True)
    few_rows.default_config = usual
    for kind, rows in itertools.product(("bf16", "fp8"), (128, 256, 512, 2048) if given.tune else ()):
        found = []
        for way in range(0, 24):
            library.FASTEST[getattr(torch, TYPES[kind])] = ((0, way),)
            try:
                found.append((sum(replayed(calls(kind, name, rows, pruned=True)[:2]) for name in LAYER) * 1e6, way))
            except RuntimeError:
                torch.cuda.synchronize()
        print(kind, rows, [(round(t, 1), way) for t, way in sorted(found)[:6]], flush=True)
    for kind, rows in itertools.product(("bf16", "fp8"), (256, 1024, 2048, 8192)):
        steps = [step for name in LAYER for step in calls(kind, name, rows, pruned=True)[:1]]
        for _ in range(2):
            for step in steps:
                step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            for step in steps:
                step()
        told = time.perf_counter() - began
        torch.cuda.synchronize()
        every = time.perf_counter() - began
        print(f"{kind} {rows} rows, not recorded: {every / 8e-3:.2f} ms a layer, host {told / 8e-3:.2f}")


if __name__ == "__main__":
    main()
