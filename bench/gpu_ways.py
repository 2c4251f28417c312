"""Times ways of multiplying over the shapes of public geometries: the data that a rule of cost is fitted to.

python bench/gpu_ways.py --json OUT [--rows 1,32] [--seconds N] [--jobs N]

Shapes are taken from geometries.py, in the order of FIRST, until the time is up. Kernels are compiled ahead in `--jobs`
processes, on weights of few rows. Weights rotate through more memory than the L2 holds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from geometries import GEOMETRIES
from gpu_kernels import time_calls
from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import Scratch, shared_memory
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.products.search import Asked, candidates
from tokenmill.kernels.triton.products.ways_by_shape import Way, operation

Shape = tuple[int, int, str | None, bool, bool]
FIRST = (
    "qwen2.5-7b", "llama-3.2-3b", "qwen3-8b", "gemma-2-9b", "llama-3-8b", "qwen3-4b", "llama-3.2-1b", "qwen2.5-1.5b",
    "llama-2-7b", "qwen3-14b", "gemma-3-4b", "qwen2.5-0.5b",
)  # fmt: skip


def shapes() -> Iterator[Shape]:
    """Of one layer and the head of each geometry, once."""
    seen: set[Shape] = set()
    for name in FIRST:
        c = GEOMETRIES[name]
        hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        act = "gelu_tanh_mul" if name.startswith("gemma") else "silu_mul"
        plain = name.startswith("gemma")  # norms behind the products, too: the residual is added elsewhere
        for shape in (
            ((heads + 2 * kv) * dim, hidden, None, True, False), (hidden, heads * dim, None, False, not plain),
            (2 * inner, hidden, act, True, False), (hidden, inner, None, False, not plain),
            (c["vocab_size"], hidden, None, False, False),
        ):  # fmt: skip
            if shape not in seen:
                seen.add(shape)
                yield shape


def ways_of(shape: Shape, rows: int) -> Iterator[Way]:
    """What might be the fastest."""
    out, inner, act, normed, added = shape
    asked = Asked(rows, (out, inner), act, act is not None, normed, added, torch.bfloat16, ())
    return candidates(asked, shared_memory())


def calls_of(shape: Shape, rows: int, way: Way, weights: list[torch.Tensor]) -> list[Callable[[], object]]:
    """One call for each copy of the weight."""
    out, inner = weights[0].shape
    _, _, act, normed, added = shape
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    norm = NormSpec(torch.rand(inner, device="cuda", dtype=torch.bfloat16), 1e-5) if normed else None
    residual = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16) if added else None
    kernels = TritonKernels()
    kernels.launch.scratch = SCRATCH
    kernels.ways.known = {operation(rows, (out, inner), act, normed): way}
    return [lambda w=w: kernels.product(x, w, norm=norm, act=act, residual=residual) for w in weights]  # type: ignore[misc]


def compile_share(share: int, jobs: int, rows: list[int]) -> None:
    """Have every jobs-th candidate in Triton's cache."""
    todo = [(shape, m, way) for shape in shapes() for m in rows for way in ways_of(shape, m)]
    for shape, m, way in todo[share::jobs]:
        if way[0] == "blas":
            continue
        few = [torch.randn(512, shape[1], device="cuda", dtype=torch.bfloat16)]
        try:
            calls_of(shape, m, way, few)[0]()
        except Exception as error:
            print("compile", shape, m, way, type(error).__name__, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--share", type=int, default=-1)
    options = parser.parse_args()
    rows = [int(m) for m in options.rows.split(",")]
    if options.share >= 0:
        compile_share(options.share, options.jobs, rows)
        return
    began = time.perf_counter()
    command = [sys.executable, __file__, "--json", str(options.json), "--rows", options.rows, "--jobs"]
    workers = [subprocess.Popen([*command, str(options.jobs), "--share", str(i)]) for i in range(options.jobs)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    found: list[list[object]] = []
    for shape in shapes():
        out, inner = shape[:2]
        copies = max(2, min(12, int(4e8 // (out * inner * 2))))
        weights = [torch.randn(out, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for m in rows:
            best: tuple[float, Way] = (1e9, ())
            for way in ways_of(shape, m):
                if time.perf_counter() - began > options.seconds:
                    break
                try:
                    us = 1e6 * time_calls(calls_of(shape, m, way, weights), False)
                except Exception as error:
                    print(shape, m, way, type(error).__name__, flush=True)
                    continue
                found.append([*shape, m, list(way), round(us, 2)])
                best = min(best, (us, way))
            if best[1]:
                moved = 2e-6 * out * inner / best[0]
                print(f"{shape} m{m}: {best[0]:.1f} us {moved:.2f} TB/s {best[1]}", flush=True)
        del weights
    options.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")


SCRATCH = Scratch()

if __name__ == "__main__":
    torch.manual_seed(0)
    main()
