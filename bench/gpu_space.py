"""How long Mamba-2's recurrence takes for prompts on a GPU: in chunks, and token by token (--deterministic).

python bench/gpu_space.py [--tokens N,...] [--rows N,...] [--repeat N]

Shapes are those of published models: heads, head size, groups, keys. Times are medians in microseconds; the last column
is how far the two results are apart, as a share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cpu" / "kernels"))
SHAPES = {"granite-4 small": (128, 64, 1, 128), "nemotron-h 8b": (128, 64, 8, 128), "falcon-h1 34b": (32, 128, 2, 256)}


def main() -> int:
    """One line a shape, a count of rows and a count of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,2048,8192")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    print(f"{'shape':16} {'rows':>5} {'tokens':>7} {'chunks us':>10} {'single us':>10} {'apart':>9}")
    for name, shape in SHAPES.items():
        for rows in map(int, options.rows.split(",")):
            for tokens in map(int, options.tokens.split(",")):
                (fast, one), (slow, two) = (
                    timed(shape, rows, tokens, options.repeat, steady=steady) for steady in (False, True)
                )
                apart = float((one - two).norm() / two.norm())
                print(f"{name:16} {rows:5} {tokens:7} {fast:10.0f} {slow:10.0f} {apart:9.1e}")
    return 0


def timed(
    shape: tuple[int, int, int, int], rows: int, tokens: int, repeat: int, *, steady: bool
) -> tuple[float, torch.Tensor]:
    """Median time of a step in which each row has so many tokens, and what it gives."""
    from paged_batch import PagedBatch

    from tokenmill.compute.forward import SpaceSpec, StateSpec
    from tokenmill.kernels.triton import TritonKernels

    heads, dim, groups, keys = shape
    torch.manual_seed(0)
    kernels, dtype = TritonKernels(steady=steady), torch.bfloat16
    fixed = (torch.rand(heads).cuda() * 4, torch.randn(heads).cuda(), torch.randn(heads).cuda())
    batch = PagedBatch((), kernels, states=(StateSpec((("float32", (heads, keys, dim)),)),), device="cuda")
    total = rows * tokens
    mixed = torch.randn(total, heads * dim + 2 * groups * keys, device="cuda").to(dtype)
    rates = torch.randn(total, heads, device="cuda").to(dtype)
    ctx, state, spec = (
        batch.step([(str(i), tokens) for i in range(rows)]),
        batch.states[0][0],
        SpaceSpec(*shape, *fixed),
    )
    times = []
    for _ in range(repeat + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        found = kernels.recur_((mixed, rates), spec, state, ctx)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[3:]), found.float().cpu()


if __name__ == "__main__":
    sys.exit(main())
