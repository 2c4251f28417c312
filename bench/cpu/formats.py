"""How fast each form of stored weights is multiplied by one row, as a part of what plain reads of its bytes reach.

    python bench/cpu/formats.py [--shape 4096x4096] [--only nf4 ...] [--json OUT]

A line a form: bits a weight in its file and in memory, GB/s of what is held, and that over a plain read measured before
and after the form's calls (the larger of both). Weights are random, settled as a model's are, and there are so many
copies that they miss the caches (64 MB). Run on a quiet machine: the load average is part of the output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from micro import MISS_BYTES, median_seconds
from torch import Tensor

from tokenmill import _native
from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.kernels.cpu import CpuKernels
from tokenmill.kernels.fp8 import BLOCK, FP8, round_rows
from tokenmill.kernels.grid import FP4
from tokenmill.measure.ceilings import reading
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.fp8 import Fp8Weight
from tokenmill.quant.gguf_weight import BlockWeight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.table import TableWeight

KIND = torch.bfloat16


def integers(n: int, k: int, bits: int, group: int, zeros: str = "") -> GridWeight:
    """Codes with scales of half precision; zeros: "whole" (4 bits alike in a file) or "fractions" (half precision)."""
    half = 1 << (bits - 1)
    q = torch.randint(-half + (bits == 8), half, (n, k), dtype=torch.int8)
    points = None
    if zeros:
        points = torch.randint(-half, half, (n, k // group), dtype=torch.int16)
        points = points if zeros == "whole" else points + 0.5
    scales = (torch.rand(n, k // group) * 0.01).half()
    return GridWeight(q, scales, bits=bits, group=group, dtype=KIND, zeros=points)


def table(n: int, k: int, group: int, entries: Tensor, *, fine: bool = False) -> TableWeight:
    """Codes of 16 entries; fine: scales are e4m3 with a factor for all."""
    codes, scales = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.rand(n, k // group)
    scales = scales.to(FP8).float() if fine else scales
    return TableWeight(codes, entries, scales, KIND, None, "table", torch.full((n,), 0.01))


def blocks(n: int, k: int, name: str) -> BlockWeight:
    """Random GGUF blocks with finite scales."""
    from gguf import GGMLQuantizationType, quantize

    kind = next(kind for kind in TYPES.values() if kind.name == name)
    rows = torch.randn(64, k).numpy()
    try:
        raw = torch.from_numpy(quantize(rows, GGMLQuantizationType[name]))
    except NotImplementedError:  # scales at both ends: small numbers whatever their place
        raw = torch.randint(0, 28, (64, k // kind.elements * kind.size), dtype=torch.uint8)
    return BlockWeight([Blocks(kind, raw.repeat(n // 64, 1).contiguous())], KIND)


def float8(n: int, k: int, *, whole: bool) -> Fp8Weight:
    """e4m3 with a scale per row, or per block of 128 x 128."""
    data, scales = round_rows(torch.randn(n, k))
    return Fp8Weight(data, scales, KIND) if whole else Fp8Weight(data, torch.rand(n // BLOCK, k // BLOCK), KIND,
                                                                 blocks=True)  # fmt: skip


FORMS: dict[str, tuple[float, Callable[[int, int], Any]]] = {
    "bf16": (16, lambda n, k: DenseWeight(torch.randn(n, k).to(KIND))),
    "fp8 rows": (8, lambda n, k: float8(n, k, whole=True)),
    "fp8 blocks": (8, lambda n, k: float8(n, k, whole=False)),
    "int8 g32": (8.5, lambda n, k: integers(n, k, 8, 32)),
    "int8 g128 zeros": (8.1875, lambda n, k: integers(n, k, 8, 128, "whole")),
    "int6 g128": (6.125, lambda n, k: integers(n, k, 6, 128)),
    "int5 g128": (5.125, lambda n, k: integers(n, k, 5, 128)),
    "int4 g32": (4.5, lambda n, k: integers(n, k, 4, 32)),
    "int4 g128": (4.125, lambda n, k: integers(n, k, 4, 128)),
    "int4 g128 zeros": (4.156, lambda n, k: integers(n, k, 4, 128, "whole")),
    "hqq 4 g64": (4.5, lambda n, k: integers(n, k, 4, 64, "fractions")),
    "int3 g128": (3.125, lambda n, k: integers(n, k, 3, 128)),
    "int3 g128 zeros": (3.149, lambda n, k: integers(n, k, 3, 128, "whole")),
    "int2 g64": (2.25, lambda n, k: integers(n, k, 2, 64)),
    "int2 g64 zeros": (2.281, lambda n, k: integers(n, k, 2, 64, "whole")),
    "bitnet": (2, lambda n, k: integers(n, k, 2, 256)),
    "nf4 g64": (4.5, lambda n, k: table(n, k, 64, torch.randn(16))),
    "fp4 g64": (4.5, lambda n, k: table(n, k, 64, torch.tensor(FP4))),
    "nvfp4": (4.5, lambda n, k: table(n, k, 16, torch.tensor(FP4), fine=True)),
    **{
        kind.name: (8 * kind.size / kind.elements, partial(blocks, name=kind.name))
        for kind in TYPES.values()
        if kind.elements > 1
    },
}


def measured(kernels: CpuKernels, make: Callable[[int, int], Any], shape: tuple[int, int], budget_s: float) -> Any:
    """Bits a weight held, GB/s of them, and GB/s of plain reads."""
    n, k = shape
    torch.manual_seed(0)
    first = make(n, k).settle(kernels)
    size = first.bytes()
    copies = [first] + [make(n, k).settle(kernels) for _ in range(MISS_BYTES // size)]
    context, x = SimpleNamespace(kernels=kernels), torch.randn(1, k).to(KIND)
    before = reading("cpu")
    seconds = median_seconds(lambda i: copies[i % len(copies)].matmul(x, context), budget_s)
    read = max(before, reading("cpu"))
    return {
        "bits": 8 * size / n / k,
        "gb_per_s": size / seconds / 1e9,
        "read_gb_per_s": read / 1e9,
        "us": 1e6 * seconds,
        "changed": list(first.changed),
    }


def main() -> None:
    """Print a table; write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x4096", help="N x K of the weight")
    parser.add_argument("--only", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", choices=_native.isas())
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.isa:
        _native.set_isa(options.isa)
    kernels = CpuKernels(options.threads)
    torch.set_num_threads(_native.threads())
    n, k = map(int, options.shape.split("x"))
    print(f"{kernels.describe()}, {n} x {k}, load {os.getloadavg()[0]:.2f}")
    print(f"{'form':18} {'in file':>8} {'held':>6} {'us':>9} {'GB/s':>7} {'read':>6} {'of reads':>9} {'of file':>8}")
    found = {}
    for name in options.only:
        bits, make = FORMS[name]
        case = measured(kernels, make, (n, k), options.budget)
        found[name] = {"file_bits": bits, **case}
        part = case["gb_per_s"] / case["read_gb_per_s"]
        print(f"{name:18} {bits:8.2f} {case['bits']:6.2f} {case['us']:9.1f} {case['gb_per_s']:7.2f} "
              f"{case['read_gb_per_s']:6.1f} {part:9.2f} {part * bits / case['bits']:8.2f} "
              f"{'rounded anew' if case['changed'] else ''}")  # fmt: skip
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"load": os.getloadavg(), "forms": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
