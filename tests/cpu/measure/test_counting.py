"""Counts from the model's own layers, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.measure.counting_helpers import LLAMA_8B

from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.counting import CountingKernels, count_model
from tokenmill.measure.roofline import Grant, attention_work, experts_touched, floor, step_cost

BF16 = KVFormat("bfloat16")

MOE_30B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "hidden_act": "silu", "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

# Llama 8B, one layer: q and o 4096 x 4096, k and v 1024 x 4096, gate and up 14336 x 4096, down 4096 x 14336.
LAYER_8B = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
HEAD_8B = 128256 * 4096
NORMS_8B = (2 * 32 + 1) * 4096
# Qwen3 30B-A3B, one layer beside its experts: q 4096 x 2048, k and v 512 x 2048, o 2048 x 4096, router 128 x 2048.
LAYER_30B = 2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048
EXPERT_30B = 3 * 768 * 2048
HEAD_30B = 151936 * 2048
NORMS_30B = (2 * 48 + 1) * 2048 + 48 * 2 * 128


def count(config, **options):
    return count_model(config, dtype=torch.bfloat16, step=(64, 4), **options)


def test_llama_8b_decodes_one_token():
    sheet = count(LLAMA_8B)
    cost = step_cost(sheet, [Grant(1, 999)], BF16)
    assert sum(cost.weight_bytes.values()) == 2 * (32 * LAYER_8B + HEAD_8B + NORMS_8B)
    assert cost.flops["matrices"] == 2 * 32 * LAYER_8B
    assert cost.flops["head"] == 2 * HEAD_8B
    assert cost.flops["attention"] == 32 * 4 * 32 * 128 * 1000
    # 1000 positions are read (the new one too) and one is written: 8 heads x (128 + 128) numbers of 2 bytes.
    assert cost.kv_bytes == 32 * 1001 * 8 * 256 * 2
    assert sheet.weight_bytes == sum(cost.weight_bytes.values())
    # Held besides: the embedding table, and cosines and sines in float32.
    assert sheet.held_bytes == sheet.weight_bytes + 2 * HEAD_8B + 131072 * 128 * 4


def test_llama_8b_reads_a_prompt():
    cost = step_cost(count(LLAMA_8B), [Grant(512, 0)], BF16)
    assert cost.flops["matrices"] == 512 * 2 * 32 * LAYER_8B
    assert cost.flops["head"] == 2 * HEAD_8B, "only the last token of a prompt meets the head"
    assert cost.flops["attention"] == 32 * 4 * 32 * 128 * (512 * 513 // 2)
    assert cost.kv_bytes == 32 * (512 + 512) * 8 * 256 * 2
    unfinished = step_cost(count(LLAMA_8B), [Grant(512, 0, samples=False)], BF16)
    assert unfinished.flops["head"] == unfinished.weight_bytes["head"] == 0


def test_long_prompts_of_latent_attention_see_heads_on_a_gpu():
    latent = {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
        "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 1000,
        "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    one, many = [Grant(1, 999)], [Grant(1000, 0)]
    for kind, sizes in (("gpu", 192 + 128), ("cpu", 576 + 512)):
        sheet = count(latent, kind=kind)
        assert step_cost(sheet, one, BF16).flops["attention"] == 2 * 2 * 4 * (576 + 512) * 1000
        assert step_cost(sheet, many, BF16).flops["attention"] == 2 * 2 * 4 * sizes * 1000 * 1001 / 2


@pytest.mark.parametrize(("scheme", "bits", "head_bits"), [("int8", 8.5, 8.5), ("int4", 4.5, 8.5)])
def test_llama_8b_in_integers(scheme, bits, head_bits):
    sheet = count(LLAMA_8B, quantization=scheme)
    assert sheet.weight_bytes == 32 * LAYER_8B * bits / 8 + HEAD_8B * head_bits / 8 + 2 * NORMS_8B
    assert sheet.body.flops == 2 * 32 * LAYER_8B


def test_moe_reads_the_experts_that_are_expected():
    sheet = count(MOE_30B)
    assert [m.experts for m in sheet.body.mixtures] == [128] * 48
    one = step_cost(sheet, [Grant(1, 0)], BF16)
    assert one.weight_bytes["matrices"] == 2 * (48 * LAYER_30B + NORMS_30B)
    assert one.weight_bytes["experts"] == pytest.approx(2 * 48 * 8 * EXPERT_30B)
    assert one.flops["experts"] == 2 * 48 * 8 * EXPERT_30B
    assert sum(one.weight_bytes.values()) == pytest.approx(6.08e9, rel=0.001)
    many = step_cost(sheet, [Grant(1, 0)] * 32, BF16)
    touched = 128 * (1 - (120 / 128) ** 32)
    assert many.weight_bytes["experts"] == pytest.approx(2 * 48 * touched * EXPERT_30B)
    assert many.flops["experts"] == 32 * one.flops["experts"]
    assert sheet.weight_bytes == 2 * (48 * (LAYER_30B + 128 * EXPERT_30B) + HEAD_30B + NORMS_30B)


def test_experts_touched_agrees_with_drawing_them():
    source = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 16, 60, generator=source).topk(4, dim=-1).indices.flatten(1)
    seen = torch.zeros(4000, 60).scatter_(1, draws, 1.0).sum(1).mean().item()
    assert experts_touched(60, 4, 16) == pytest.approx(seen, rel=0.01)
    assert experts_touched(8, 8, 1) == 8 and experts_touched(8, 2, 0) == 0


def test_ranks_of_a_cpu_hold_the_embeddings_each():
    """They exchange what they multiply, and add nothing up: not even rows of the embeddings with zeros."""
    gpu, cpu = count(LLAMA_8B, ranks=2), count(LLAMA_8B, ranks=2, kind="cpu")
    assert cpu.held_bytes - gpu.held_bytes == 2 * HEAD_8B // 2
    assert cpu.weight_bytes == gpu.weight_bytes
    alone, cpu = count(MOE_30B, kind="cpu"), count(MOE_30B, ranks=2, kind="cpu")
    assert [each.bytes for each in cpu.body.mixtures] == [each.bytes / 2 for each in alone.body.mixtures]
    assert sum(each.flops for each in cpu.body.mixtures) == sum(each.flops for each in alone.body.mixtures) / 2
    assert cpu.held_bytes > alone.held_bytes / 2 + 2 * HEAD_30B // 2


def test_ranks_share_the_work_and_sum_up():
    whole, half = count(LLAMA_8B), count(LLAMA_8B, ranks=2)
    assert half.body.flops == whole.body.flops / 2
    assert half.weight_bytes == 2 * ((32 * LAYER_8B + HEAD_8B) // 2 + NORMS_8B)
    assert half.body.attended[0].kv.heads == 4
    assert half.body.reductions == 65  # two a layer, and the embeddings', which are shared out by vocabulary
    assert half.body.reduced == 65 * 4096 * 2
    # Logits are gathered: each rank puts half of the vocabulary in, in float32.
    assert half.head.reductions == 1 and half.head.reduced == 128256 // 2 * 4
    assert whole.body.reductions == whole.head.reductions == 0


@pytest.mark.parametrize("window", [0, 1, 5, 8, 100])
@pytest.mark.parametrize(("count", "before"), [(1, 0), (1, 20), (7, 0), (7, 3), (12, 4), (30, 50)])
def test_attention_work_agrees_with_a_mask(window, count, before):
    queries = torch.arange(before, before + count)[:, None]
    keys = torch.arange(before + count)[None]
    mask = (keys <= queries) & (keys > queries - (window or 10**9))
    seen, read = attention_work(window, [Grant(count, before)])
    assert seen == mask.sum() and read == mask.any(0).sum()


def test_windows_and_latents_are_counted_by_layer():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 32,
             "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 3,
             "max_position_embeddings": 256}  # fmt: skip
    cost = step_cost(count(gemma), [Grant(1, 99)], BF16)
    assert cost.kv_bytes == 2 * 2 * 16 * (2 * (16 + 1) + (100 + 1))
    latent = {"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
              "intermediate_size": 48, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
              "qk_rope_head_dim": 6, "v_head_dim": 10, "q_lora_rank": None, "first_k_dense_replace": 1,
              "max_position_embeddings": 64}  # fmt: skip
    sheet = count(latent)
    assert [a.kv for a in sheet.body.attended] == [KVSpec("latent", 1, 22, 16)]
    cost = step_cost(sheet, [Grant(1, 9)], BF16)
    assert cost.kv_bytes == 2 * 22 * (10 + 1)
    assert cost.flops["attention"] == 2 * 4 * (22 + 16) * 10


def test_the_floor_adds_parts_and_names_the_largest():
    sheet = count(LLAMA_8B)
    speeds = Speeds(bytes_per_s=4.4e12, flops_per_s=790e12)
    one = floor(step_cost(sheet, [Grant(1, 0)], BF16), speeds)
    assert one.seconds == pytest.approx(3.41e-3, rel=0.005) and one.limit == "memory bandwidth (weights)"
    prompt = floor(step_cost(sheet, [Grant(8192, 0)], BF16), speeds)
    assert prompt.limit == "compute"
    long = floor(step_cost(sheet, [Grant(1, 16000)] * 16, BF16), speeds)
    assert long.limit == "memory bandwidth (K/V)"
    slow = floor(step_cost(sheet, [Grant(1, 0)], BF16), Speeds(4.4e12, 790e12, step_s=1.0))
    assert slow.seconds == pytest.approx(1 + one.seconds) and slow.limit == "launching a step"


def test_the_largest_step_needs_what_it_holds_at_once():
    sheet = count_model(LLAMA_8B, dtype=torch.bfloat16, step=(1024, 16))
    gate_up, gated, hidden = (1024 * width * 2 for width in (2 * 14336, 14336, 4096))
    assert gate_up + gated <= sheet.activation_bytes <= gate_up + gated + 3 * hidden
    few = count_model(LLAMA_8B, dtype=torch.bfloat16, step=(512, 512))
    logits = 512 * 128256 * (2 + 4)
    assert logits <= few.activation_bytes <= logits + 3 * hidden


def test_an_unknown_operation_is_refused():
    class Newer(ReferenceKernels):
        def surprise(self):
            self.count("surprise")

    kernels = type("Counting", (CountingKernels, Newer), {})()
    with pytest.raises(ModelError, match="'surprise', whose cost is not known"):
        kernels.surprise()
    with pytest.raises(ModelError, match="is not built here"):
        count({**LLAMA_8B, "architectures": ["NoSuchModel"]})
