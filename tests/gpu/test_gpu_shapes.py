"""Every size of heads, norms made before attention, kernels compiled ahead, and the search for fast products."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.cpu.kernels.paged_batch import PagedBatch
from tests.gpu.gpu_helpers import relative

from tokenmill.compute.forward import AttentionSpec, KVSpec, NormSpec, Touches
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
ROOT = pathlib.Path(__file__).parents[2]
STEPS = [[("a", 70), ("b", 5)], [("a", 1), ("b", 1), ("c", 300)], [("a", 1), ("b", 1), ("c", 1)]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads(dim, dtype, steady):
    from tokenmill.kernels.triton import TritonKernels

    kernels, heads, kv = TritonKernels(steady=steady), 6, KVSpec("full", 2, dim, dim)
    spec = AttentionSpec(
        0, 0, heads, kv, dim**-0.5,
        touches=Touches(NormSpec(torch.rand(heads * dim, device="cuda", dtype=dtype) + 0.5, 1e-6),
                        NormSpec(torch.rand(2 * dim, device="cuda", dtype=dtype) + 0.5, 1e-6)),
    )  # fmt: skip
    ours, exact = (PagedBatch((kv,), k, dtype=dtype, blocks=60, device="cuda") for k in (kernels, REFERENCE))
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), (heads + 4) * dim, device="cuda", dtype=dtype)
        a, b = ours.step(grants), exact.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x.float(), spec, b)
        assert relative(q, expected_q) < 1e-2
        assert relative(kernels.attention(q, spec, a), REFERENCE.attention(q.float(), spec, b)) < 1e-2
    counted = {op: n["fallbacks"] for op, n in kernels.counters().items() if n["fallbacks"]}
    assert not counted or (dim == 512 and dtype == torch.float32), counted


def test_the_engine_finds_what_was_compiled_ahead(tmp_path):
    """In a fresh process with empty caches: nothing is compiled by the engine itself."""
    if len(os.sched_getaffinity(0)) < 4:
        pytest.skip("too few cores for compilers beside the engine")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = f"""
import json, sys, triton
hits = []
triton.knobs.compilation.listener = lambda **told: hits.append(bool(told.get("cache_hit")))
from tokenmill import LLM
llm = LLM({str(tmp_path)!r}, load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8)
print(json.dumps([hits.count(True), hits.count(False), llm.built.facts.reasons]))
llm.close()
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TOKENMILL_CACHE": str(tmp_path / "c")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    (found, compiled, reasons), (again, anew, quiet) = seen
    assert any("were compiled ahead" in reason for reason in reasons), reasons
    assert found > 20 and compiled == 0, f"{compiled} were compiled by the engine: {reasons}"
    assert again == found and anew == 0 and not any("ahead" in reason for reason in quiet), "noted"


def test_the_search_keeps_right_ways(tmp_path):
    from tokenmill.kernels.triton import TritonKernels

    kernels = TritonKernels(cache=tmp_path, without=("few-rows",))
    kernels.ways.known, kernels.ways.measured = {}, []
    x = torch.randn(32, 1536, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3072, 1536, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 32):
        kernels.product(x[:rows], weight)
        kernels.product(x[:rows], weight, act="silu_mul", norm=NormSpec(torch.ones_like(x[0]), 1e-5))
    report = kernels.search(20.0)
    print(report)
    assert report.operations == 4 and report.tried > 20
    assert all(gain > 1.0 for gain in report.gains.values())
    for rows in (1, 32):
        assert relative(kernels.product(x[:rows], weight), x[:rows].float() @ weight.float().T) < 1e-2
    again = TritonKernels(cache=tmp_path, without=("few-rows",))
    assert all(again.ways.known[name] == way for name, way in report.found.items())
    assert not TritonKernels(cache=tmp_path, steady=True).ways.found
