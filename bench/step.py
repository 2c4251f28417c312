"""Python time of one decode step: the demo-sized model with kernels that compute nothing. JSON on stdout.

python bench/step.py [ROWS ...]      (default 1 8 64)

`forward_ms` is the model alone; `step_ms` a whole Runner step: rows, batch, forward, logits, sampling, result.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.compute.forward import AttentionSpec, ForwardContext, KVFormat, NormSpec
from tokenmill.core.step import RowSampling, RowStart, StepPlan, TableEdit
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kvcache.pool import KVPool, make_layout
from tokenmill.models.registry import build_model
from tokenmill.runner.batch import make_batch
from tokenmill.runner.runner import Runner

DEMO = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 6144,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class NullKernels(ReferenceKernels):
    """Every operation returns a tensor made the first time it was asked for that shape."""

    def __init__(self) -> None:
        super().__init__()
        self.arena: dict[tuple, Tensor] = {}

    def out(self, *shape: int) -> Tensor:
        found = self.arena.get(shape)
        if found is None:
            found = self.arena[shape] = torch.zeros(shape)
        return found

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        return self.out(ids.shape[0], table.shape[1])

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        return x

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return self.out(x.shape[0], weight.shape[0])

    def activate(self, x: Tensor, act: Any, gate: Tensor | None = None) -> Tensor:
        return self.out(x.shape[0], x.shape[1] // 2)

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0, *, within: NormSpec | None = None) -> Tensor:
        return x

    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        return self.out(qkv.shape[0], spec.heads, spec.kv.key_dim)

    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        return self.out(q.shape[0], spec.heads * spec.kv.value_dim)


def measure(rows: int, steps: int = 300) -> dict[str, float]:
    """Median milliseconds of the forward pass and of the whole step."""
    kernels = NullKernels()
    model = build_model(DEMO, DummyCheckpoint(), dtype=torch.float32, device="cpu", kernels=kernels)
    layout = make_layout(model.spec.kv_specs, 16, KVFormat("float32"))
    runner = Runner(model, kernels, KVPool(layout, [rows * 64], "cpu"), rows, 1024)
    start = StepPlan(id=0)
    for row in range(rows):
        start.starts.append(
            RowStart(row=row, tokens=[1] * 33, num_prompt=32, computed=32, sampling=RowSampling(), adapter=0)
        )
        blocks = list(range(row * 64, row * 64 + 64))
        start.edits.append(TableEdit(row, 0, 0, 0, blocks, [16 * i for i in range(64)]))
    grants: dict[str, Any] = {"rows": list(range(rows)), "counts": [1] * rows, "samples": [True] * rows}
    start.rows, start.counts, start.samples = grants["rows"], grants["counts"], grants["samples"]
    runner.run_plan(start)
    whole, forward = [], []
    for step in range(1, steps):
        plan = StepPlan(id=step, **grants)
        begin = time.perf_counter()
        runner.run_plan(plan)
        whole.append((time.perf_counter() - begin) * 1e3)
    with torch.inference_mode():
        for step in range(steps):
            batch = make_batch(StepPlan(id=step, **grants), runner.rows, runner.pool, kernels)
            begin = time.perf_counter()
            model.forward(batch.tokens, batch.ctx)
            forward.append((time.perf_counter() - begin) * 1e3)
    return {"forward_ms": round(statistics.median(forward), 4), "step_ms": round(statistics.median(whole), 4)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({n: measure(n) for n in ([int(a) for a in sys.argv[1:]] or [1, 8, 64])}))
