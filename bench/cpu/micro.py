"""Micro benchmarks of the CPU kernels: GB/s of weights at one row, GFLOP/s at many, and what torch does on the same.

    python bench/cpu/micro.py [--json OUT] [--rows 1 4 16 128] [--shape 4096x4096] [--only linear]

Each case cycles through enough copies of its operands to miss the caches (64 MB), takes the median of many calls, and
names the memory ceiling measured in the same run. Run on a quiet machine: the load average is part of the output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, KVSpec, KVView
from tokenmill.kernels.cpu import CpuKernels
from tokenmill.kernels.cpu.packed import pack_dense, pack_quantised, quantise

# ruff: noqa: B023 (every closure is used up within its own turn of the loop)
MISS_BYTES = 64 << 20


def median_seconds(call: Callable[[int], object], budget_s: float) -> float:
    """Median over calls with rising index, at least 5, for about `budget_s`."""
    call(0)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_ceiling() -> float:
    """GB/s of a plain sum over 256 MB."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    return data.nbytes / median_seconds(lambda _: data.sum(), 0.5) / 1e9


def linear_cases(kernels: CpuKernels, n: int, k: int, rows: list[int], budget_s: float) -> list[dict[str, Any]]:
    """All formats at each row count, and torch's bf16 for comparison."""
    weight = torch.randn(n, k)
    q8, q4 = quantise(weight, "int8"), quantise(weight, "int4")
    makers: dict[str, Callable[[], Any]] = {
        "f32": lambda: pack_dense(weight),
        "bf16": lambda: pack_dense(weight.bfloat16()),
        "int8": lambda: pack_quantised(*q8, "int8"),
        "int4": lambda: pack_quantised(*q4, "int4"),
        "torch bf16": lambda: weight.bfloat16().clone(),
    }
    out = []
    for name, make in makers.items():
        first = make()
        size = first.nbytes if isinstance(first, Tensor) else first.bytes()
        copies = [first] + [make() for _ in range(max(0, MISS_BYTES // size))]
        for m in rows:
            x = torch.randn(m, k).to(torch.float32 if name == "f32" else torch.bfloat16)
            if name == "torch bf16":
                seconds = median_seconds(lambda i: torch.nn.functional.linear(x, copies[i % len(copies)]), budget_s)
            else:
                seconds = median_seconds(lambda i: kernels.product(x, copies[i % len(copies)]), budget_s)
            out.append(
                {"op": "linear", "format": name, "rows": m, "n": n, "k": k, "us": seconds * 1e6,
                 "gb_per_s": size / seconds / 1e9, "gflop_per_s": 2 * m * n * k / seconds / 1e9}
            )  # fmt: skip
    return out


def attention_cases(kernels: CpuKernels, budget_s: float) -> list[dict[str, Any]]:
    """Decode at several contexts and a prefill, 32 query heads over 8 key/value heads of 64, bf16."""
    heads, kv_heads, dim, block = 32, 8, 64, 16
    spec = AttentionSpec(0, 0, heads, KVSpec("full", kv_heads, dim, dim), dim**-0.5)
    out = []
    for name, sequences, queries, length in (
        ("decode", 1, 1, 1024), ("decode", 1, 1, 8192), ("decode", 8, 1, 1024), ("prefill", 1, 512, 512),
        ("prefill", 1, 1024, 1024),
    ):  # fmt: skip
        used = sequences * -(-length // block)
        size = used * block * kv_heads * dim * 2 * 2
        copies = max(1, min(64, MISS_BYTES // size)) if name == "decode" else 1
        blocks = used * copies
        view = KVView(*(torch.randn(blocks, kv_heads, block, dim).bfloat16() for _ in range(2)))
        tables = torch.randperm(blocks).int().view(copies, sequences, -1)
        q = torch.randn(sequences * queries, heads, dim).bfloat16()
        contexts = [
            ForwardContext(
                kernels, torch.arange(length - queries, length).repeat(sequences),
                torch.arange(sequences + 1, dtype=torch.int32) * queries,
                torch.full((sequences,), length, dtype=torch.int32), queries, [view],
                [GroupPlan(table, None, torch.full((sequences,), table.shape[1], dtype=torch.int32),
                           torch.zeros(sequences * queries, dtype=torch.int64))], block_size=block,
            )
            for table in tables
        ]  # fmt: skip
        seconds = median_seconds(lambda i: kernels.attention(q, spec, contexts[i % copies]), budget_s)
        pairs = sequences * sum(range(length - queries + 1, length + 1))
        out.append(
            {"op": "attention", "format": name, "rows": sequences * queries, "context": length, "us": seconds * 1e6,
             "gb_per_s": size / seconds / 1e9, "gflop_per_s": 4 * pairs * heads * dim / seconds / 1e9}
        )  # fmt: skip
    return out


def row_cases(kernels: CpuKernels, budget_s: float) -> list[dict[str, Any]]:
    """Small operations, where the call itself is what costs."""
    from tokenmill.compute.forward import NormSpec

    out = []
    spec = NormSpec(torch.ones(256, dtype=torch.bfloat16), 1e-5)
    small = pack_dense(torch.randn(512, 256).bfloat16())
    for rows in (1, 32):
        x, gate_up = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 1536).bfloat16()
        calls: dict[str, Callable[[int], object]] = {
            "norm 256": lambda _: kernels.norm(x, spec),
            "silu_mul 1536": lambda _: kernels.activate(gate_up, "silu_mul"),
            "add 256": lambda _: kernels.add(x, x),
            "linear 512x256": lambda _: kernels.product(x, small),
            "torch rms_norm 256": lambda _: torch.nn.functional.rms_norm(x, (256,), spec.weight),
        }
        for name, call in calls.items():
            out.append({"op": "small", "format": name, "rows": rows, "us": median_seconds(call, budget_s) * 1e6})
    return out


def main() -> None:
    """Print a table; write it with what the machine was doing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--shape", default="4096x4096", help="N x K of the weight")
    parser.add_argument("--only", choices=["linear", "attention", "small"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", choices=_native.isas())
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a case")
    options = parser.parse_args()
    if options.isa:
        _native.set_isa(options.isa)
    kernels = CpuKernels(options.threads)
    torch.set_num_threads(_native.threads())
    load = os.getloadavg()
    n, k = map(int, options.shape.split("x"))
    cases: list[dict[str, Any]] = []
    if options.only in (None, "linear"):
        cases += linear_cases(kernels, n, k, options.rows, options.budget)
    if options.only in (None, "attention"):
        cases += attention_cases(kernels, options.budget)
    if options.only in (None, "small"):
        cases += row_cases(kernels, options.budget)
    report = {
        "machine": platform.processor() or platform.machine(), **kernels.describe(), "load_before": load,
        "load_after": os.getloadavg(), "read_ceiling_gb_per_s": read_ceiling(), "cases": cases,
    }  # fmt: skip
    print(f"{report['isa']}, {report['threads']} threads, load {load[0]:.2f}, torch sum reads "
          f"{report['read_ceiling_gb_per_s']:.1f} GB/s")  # fmt: skip
    for case in cases:
        shape = f"{case['rows']:5} rows" + (f" x {case['context']}" if "context" in case else "")
        rates = f"{case['gb_per_s']:7.1f} GB/s {case['gflop_per_s']:8.1f} GFLOP/s" if "gb_per_s" in case else ""
        print(f"{case['op']:10} {case['format']:20} {shape:18} {case['us']:10.1f} us {rates}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
