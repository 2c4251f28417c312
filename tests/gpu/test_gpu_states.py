"""Recurrent layers on the device: against plain torch, and in recorded steps, where a state must go on just once."""

from __future__ import annotations

import json

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.gpu.gpu_helpers import triton_kernels as make_kernels

from tokenmill import LLM, SamplingParams
from tokenmill.compute.forward import ConvSpec, DeltaSpec, NormSpec, SpaceSpec, StateSpec
from tokenmill.kernels.reference import ReferenceKernels

STEPS = [
    [("a", 20)],
    [("b", 1), ("a", 700), ("c", 2)],
    [("a", 1), ("b", 1), ("c", 1)],
    [("c", 17), ("d", 130), ("b", 3)],
    [("d", 64), ("a", 7)],
]
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096, "full_attention_interval": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def run(kernels, device, part, compute):
    """What compute(ctx, state, tokens so far, count) gives in every step, and the states that are left."""
    batch = PagedBatch((), kernels, states=(StateSpec((part,)),), device=device)
    found, at = [], 0
    for grants in STEPS:
        count = sum(n for _, n in grants)
        found.append(compute(batch.step(grants), batch.states[0][0], slice(at, at + count)))
        at += count
    return torch.cat(found).float().cpu(), batch.states[0][0][: len(batch.seqs)].float().cpu()


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


TOTAL = sum(n for grants in STEPS for _, n in grants)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("heads", [(16, 32, 128, 128), (2, 4, 64, 128), (3, 3, 40, 24), (4, 4, 96, 192)])
def test_delta_rule(heads, by_key, dtype, steady):
    hk, hv, dk, dv = heads
    paces = hv * dk if by_key else hv
    floor = -5.0 if by_key and hk == hv else 0.0
    spec = DeltaSpec(*heads, rate=torch.rand(hv) * 4, shift=torch.randn(paces), floor=floor)
    mixed, gates = torch.randn(TOTAL, 2 * hk * dk + hv * dv).to(dtype), torch.randn(TOTAL, hv + paces).to(dtype)
    plain, part = ReferenceKernels(), ("float32", (hv, dk, dv))
    exact, states = run(
        plain, "cpu", part, lambda ctx, s, at: plain.recur_((mixed[at].float(), gates[at].float()), spec, s, ctx)
    )
    on = DeltaSpec(*heads, rate=spec.rate.cuda(), shift=spec.shift.cuda(), floor=floor)
    kernels, x, g = make_kernels(steady=steady), mixed.cuda(), gates.cuda()
    found, left = run(kernels, "cuda", part, lambda ctx, s, at: kernels.recur_((x[at], g[at]), on, s, ctx))
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(found, exact) < bound and error(left, states) < bound
    assert kernels.counters()["delta_rule"]["fallbacks"] == 0


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 64, 1, 128), (24, 128, 2, 256), (8, 64, 8, 64), (5, 24, 1, 40)])
def test_state_space(shape, dtype, steady):
    """Mamba-2, in chunks where rows have many tokens: Granite 4's and Falcon-H1's heads among others."""
    heads, dim, groups, keys = shape
    fixed = torch.rand(heads) * 4, torch.randn(heads), torch.randn(heads)
    mixed = torch.randn(TOTAL, heads * dim + 2 * groups * keys).to(dtype)
    rates, plain, part = torch.randn(TOTAL, heads).to(dtype), ReferenceKernels(), ("float32", (heads, keys, dim))
    spec = SpaceSpec(*shape, *fixed)
    exact, states = run(
        plain, "cpu", part, lambda ctx, s, at: plain.recur_((mixed[at].float(), rates[at].float()), spec, s, ctx)
    )
    on = SpaceSpec(*shape, *(one.cuda() for one in fixed))
    kernels, x, r = make_kernels(steady=steady), mixed.cuda(), rates.cuda()
    found, left = run(kernels, "cuda", part, lambda ctx, s, at: kernels.recur_((x[at], r[at]), on, s, ctx))
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(found, exact) < bound and error(left, states) < bound
    assert kernels.counters()["state_space"]["fallbacks"] == 0


@pytest.mark.parametrize("kept_as", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [3, 16, 60])
@pytest.mark.parametrize("kind", ["delta", "space"])
def test_one_token_of_each_row(kind, rows, kept_as):
    """Steps of one token, of few rows and of many, with states in 32 and in 16 bits."""
    fixed = torch.rand(32) * 4, torch.randn(32), torch.randn(32)
    wide, narrow, parts = (8192, 64, (32, 128, 128)) if kind == "delta" else (32 * 64 + 256, 32, (32, 128, 64))

    def spec(device):
        on = [one.to(device) for one in fixed]
        return DeltaSpec(16, 32, 128, 128, *on[:2]) if kind == "delta" else SpaceSpec(32, 64, 1, 128, *on)

    given = [(torch.randn(rows, wide).bfloat16(), torch.randn(rows, narrow).bfloat16()) for _ in range(3)]
    found = []
    for kernels, device in ((ReferenceKernels(), "cpu"), (make_kernels(), "cuda")):
        batch = PagedBatch((), kernels, states=(StateSpec(((kept_as, parts),)),), device=device, rows=64)
        outs = []
        for mixed, more in given:
            ctx = batch.step([(str(row), 1) for row in range(rows)])
            outs.append(kernels.recur_((mixed.to(device), more.to(device)), spec(device), batch.states[0][0], ctx))
        found.append((torch.cat(outs).float().cpu(), batch.states[0][0][:rows].float().cpu()))
    assert error(found[1][0], found[0][0]) < 1e-2 and error(found[1][1], found[0][1]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_conv(dtype):
    x, weight, bias = torch.randn(TOTAL, 8200).to(dtype), torch.randn(4, 8192), torch.randn(8192)
    plain, part = ReferenceKernels(), (str(dtype).removeprefix("torch."), (3, 8192))
    spec, given = ConvSpec(weight, bias), ConvSpec(weight.cuda(), bias.cuda())
    exact, states = run(plain, "cpu", part, lambda ctx, s, at: plain.recur_((x[at, :8192],), spec, s, ctx))
    kernels, on = make_kernels(), x.cuda()
    found, left = run(kernels, "cuda", part, lambda ctx, s, at: kernels.recur_((on[at, :8192],), given, s, ctx))
    assert error(found, exact) < (1e-5 if dtype == torch.float32 else 5e-3) and torch.equal(left, states)


@pytest.mark.parametrize("first", [True, False])
def test_gated_norm(first):
    x, gate, spec = torch.randn(300, 4096), torch.randn(300, 4096), NormSpec(torch.randn(128), 1e-6)
    expected = ReferenceKernels().gated_norm(x, gate, spec, 128, first=first)
    on = NormSpec(spec.weight.cuda(), 1e-6)
    found = make_kernels().gated_norm(x.cuda(), gate.cuda(), on, 128, first=first)
    assert error(found.cpu(), expected) < 1e-5


GRIFFIN = {
    "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "hidden_size": 256,
    "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
    "vocab_size": 2048, "max_position_embeddings": 4096, "attention_window_size": 96, "torch_dtype": "bfloat16",
}  # fmt: skip
CHUNKED = {
    "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_size": 256, "intermediate_size": 256,
    "intermediate_size_mlp": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096, "num_local_experts": 4,
    "attention_chunk_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


SPARSEMIXER = {
    "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 4096, "num_local_experts": 8, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
    "torch_dtype": "bfloat16",
}  # fmt: skip
BESIDE = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 96,
    "vocab_size": 2048, "max_position_embeddings": 4096, "enable_moe_block": True, "num_experts": 8,
    "top_k_experts": 2, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
RECORDED = {"delta": CONFIG, "griffin": GRIFFIN, "chunks": CHUNKED, "sparsemixer": SPARSEMIXER, "beside": BESIDE}


@pytest.mark.parametrize("config", RECORDED.values(), ids=RECORDED)
def test_recorded_steps_go_on_once(config, tmp_path):
    """The same tokens with and without recordings, with shared beginnings, in company and alone."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    stem = torch.randint(0, 2048, (150,)).tolist()
    asked = [{"prompt_token_ids": stem[: 9 * i] + torch.randint(0, 2048, (4 + i,)).tolist()} for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(
            model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=16,
            dtype="float32", enforce_eager=eager, kv_cache_memory_bytes=1 << 28,
        ) as llm:  # fmt: skip
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False)])
            if not eager:
                recordings = [r.recordings for r in llm.engine.executor.runner.recorders]
                assert all(one.possible for one in recordings) and all(one.made for one in recordings)
    same = sum(a == b for one, two in zip(*found, strict=True) for a, b in zip(one, two, strict=True))
    assert same > 0.97 * 24 * 40
