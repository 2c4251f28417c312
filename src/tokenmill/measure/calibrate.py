"""What this engine's own kernels reach on this machine, measured in seconds. Owns: curves over rows, attention, hosts.

A plain read and one large product (ceilings.py) bound what is possible; a prediction wants what is usual. Nothing here
looks at a model that will be predicted. Weights are cycled, so that they come from memory as in a real step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenmill.core.forward import AttentionSpec, ForwardContext, GroupPlan, KVSpec, KVView
from tokenmill.device.graphs import Recorder
from tokenmill.engine.llm import LLM
from tokenmill.kernels import make_kernels
from tokenmill.measure.ceilings import measure, read_measured
from tokenmill.measure.closed import closed_loop
from tokenmill.measure.devices import Device

FORMATS = ("float32", "bfloat16", "int8", "int4")
BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0625, "int4": 0.5625}
GROUP = 32
_SHAPE = {"cpu": (8192, 2048), "gpu": (14336, 4096)}
_MISS_BYTES = {"cpu": 160 << 20, "gpu": 1 << 30}
_ROWS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 256, 1024), "gpu": (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)}
_ROUNDS = 5
_BLOCK = 16
_HOST_LAYERS = (2, 10)
_HOST_ROWS = (1, 32)
_HOST_TOKENS = 48


def calibrate(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Plain JSON, for `doctor --measure`; types that this machine cannot multiply are left out."""
    kind = "cpu" if device == "cpu" else "gpu"
    linear = {}
    for dtype in dtypes:
        points = _linear(device, kind, dtype)
        if points:
            linear[dtype] = {"bytes_per_weight": BYTES_PER_WEIGHT[dtype], "ps_per_weight": points}
    compute = "bfloat16" if "bfloat16" in dtypes else "float32"
    decode, prefill = _attention(device, kind, compute)
    return {
        "linear": linear,
        "attention": {"decode_gb_per_s": round(decode / 1e9, 3), "prefill_tflops": round(prefill / 1e12, 5)},
        "host": _host(device),
    }


def calibrated(device: str, dtypes: tuple[str, ...]) -> Device:
    """This machine's device: its ceilings, and what this engine's kernels reach on it."""
    return read_measured(measure_calibrated(device, dtypes), f"measured on {device}")


def measure_calibrated(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Everything that `doctor --measure --json` prints."""
    return {**measure(device, dtypes), "calibration": calibrate(device, dtypes)}


# ---------------------------------------------------------------- products


def _linear(device: str, kind: str, dtype: str) -> list[tuple[int, float]]:
    """(rows, picoseconds per weight) of products with matrices that come from memory."""
    kernels, (n, k) = make_kernels(device), _SHAPE[kind]
    copies = max(2, -(-_MISS_BYTES[kind] // int(n * k * BYTES_PER_WEIGHT[dtype])))
    weights = [_weight(kernels, device, dtype, n, k) for _ in range(copies)]
    if weights[0] is None:
        return []
    compute = torch.bfloat16 if dtype in ("int8", "int4") else getattr(torch, dtype)
    points = []
    for rows in _ROWS[kind]:
        x = torch.randn(rows, k, device=device).to(compute)
        some = weights if rows <= 64 else weights[:2]
        seconds = _seconds(device, lambda x=x, some=some: [kernels.fused_linear(x, w) for w in some])  # type: ignore[misc]
        points.append((rows, round(1e12 * seconds / len(some) / (n * k), 6)))
    return points


def _weight(kernels: Any, device: str, dtype: str, n: int, k: int) -> Any:
    if dtype in ("int8", "int4"):
        bits = 8 if dtype == "int8" else 4
        dense = torch.randn(n, k, device=device)
        return kernels.pack_grid(*kernels.quantise(dense, bits, GROUP), bits)
    dense = torch.randn(n, k, device=device).to(getattr(torch, dtype))
    packed = kernels.pack_dense(dense)
    return dense if packed is None else packed


# ---------------------------------------------------------------- attention


def _attention(device: str, kind: str, dtype: str) -> tuple[float, float]:
    """Bytes per second while decoding over long contexts, operations per second of one long prompt."""
    length = 2048 if kind == "cpu" else 8192
    seqs = 4 if kind == "cpu" else 32
    spec = AttentionSpec(0, 0, 32, KVSpec("full", 8, 64, 64), 0.125)
    made = _Attention(device, dtype, spec)
    decode = made.seconds(seqs, 1, length)
    moved = seqs * length * spec.kv.heads * 128 * getattr(torch, dtype).itemsize
    prefill = made.seconds(1, length, length)
    return moved / decode, 4.0 * (length * (length + 1) // 2) * spec.heads * 64 / prefill


class _Attention:
    """Attention over made-up pages."""

    def __init__(self, device: str, dtype: str, spec: AttentionSpec) -> None:
        self.device, self.dtype, self.spec = device, getattr(torch, dtype), spec
        self.kernels = make_kernels(device)

    def seconds(self, seqs: int, queries: int, length: int) -> float:
        """One call: `queries` new tokens of each of `seqs` sequences of `length` tokens."""
        used, on, heads = -(-length // _BLOCK), self.device, self.spec.kv.heads
        blocks = seqs * used
        view = KVView(*(torch.randn(blocks, heads, _BLOCK, 64, device=on).to(self.dtype) for _ in range(2)))
        tables = torch.arange(blocks, dtype=torch.int32, device=on).view(seqs, used)
        entries = torch.full((seqs,), used, dtype=torch.int32, device=on)
        slots = torch.zeros(seqs * queries, dtype=torch.int64, device=on)
        context = ForwardContext(
            self.kernels,
            torch.arange(length - queries, length, device=on).repeat(seqs),
            torch.arange(seqs + 1, dtype=torch.int32, device=on) * queries,
            torch.full((seqs,), length, dtype=torch.int32, device=on),
            queries,
            [view],
            [GroupPlan(tables, None, entries, slots)],
            spans=[(i * queries, queries, length) for i in range(seqs)] if on == "cpu" else None,
            block_size=_BLOCK,
        )
        q = torch.randn(seqs * queries, self.spec.heads, 64, device=on).to(self.dtype)
        return _seconds(on, lambda: self.kernels.attention(q, self.spec, context))


def _seconds(device: str, work: Callable[[], Any]) -> float:
    """The median of a few rounds; on a GPU of a recording, so that launching costs nothing."""
    work()
    run, probe = work, torch.ones(1, device=device)
    if device != "cpu":
        run = Recorder().record(work).replay
    times = []
    for _ in range(_ROUNDS):
        probe.item()
        start = time.perf_counter()
        run()
        probe.item()  # waits for everything before it
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---------------------------------------------------------------- the host


def _host(device: str) -> dict[str, float]:
    """Milliseconds around a step, per layer and per row, from small models whose products cost next to nothing."""
    few, many = _HOST_LAYERS
    shallow = [_step_seconds(device, few, rows) for rows in _HOST_ROWS]
    deep = [_step_seconds(device, many, rows) for rows in _HOST_ROWS]
    layer = max(0.0, (deep[0] - shallow[0]) / (many - few))
    row = max(0.0, (shallow[1] - shallow[0]) / (_HOST_ROWS[1] - _HOST_ROWS[0]))
    step = max(0.0, shallow[0] - few * layer - row)
    return {f"{name}_ms": round(1e3 * value, 6) for name, value in (("step", step), ("layer", layer), ("row", row))}


def _step_seconds(device: str, layers: int, rows: int) -> float:
    """The usual time between two tokens."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": device}
        with LLM(folder, kv_cache_memory_bytes=1 << 24, max_num_seqs=rows, **options) as llm:
            jobs = [([1 + i % 500] * 8, _HOST_TOKENS) for i in range(rows)]
            usual = []
            for _ in range(_ROUNDS):
                llm.reset_prefix_cache()
                found = closed_loop(llm.engine, time.perf_counter, jobs, rows)
                usual.append(1e-3 * float(found["itl_ms"]["p50"]))
    return min(usual)
