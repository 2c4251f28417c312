"""Every family against Transformers in float32, and the same bytes however its sequences are computed."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from family_cases import Case
from parity import load, make, ours, theirs

SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
BASE = {**SIZES, **HEADS, "max_position_embeddings": 128}
ONE = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 6.0], "rope_theta": 10000.0}
PHI = {**BASE, "num_key_value_heads": 4, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
        "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
MLA = {**ONE, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
MOE = {"n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 12, "num_experts_per_tok": 3,
       "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip

HYBRID = {**BASE, "num_hidden_layers": 4, "head_dim": 16, "rms_norm_eps": 1e-3,  # random states are small
          "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}


def cases() -> dict[str, Case]:
    gemma = {**BASE, "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 20}
    falcon = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    opt = {"vocab_size": 67, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 128}  # fmt: skip
    tight = {**BASE, "num_hidden_layers": 3}
    return {
        "qwen2": Case(hf.Qwen2Config(**BASE)),
        "qwen2-window": Case(hf.Qwen2Config(**tight, use_sliding_window=True, sliding_window=20, max_window_layers=1)),
        "qwen3-moe": Case(hf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=6, num_experts_per_tok=3,
                                            moe_intermediate_size=20, mlp_only_layers=[0], norm_topk_prob=True)),
        "qwen3-moe-raw-gates": Case(hf.Qwen3MoeConfig(**BASE, head_dim=8, num_experts=4, num_experts_per_tok=2,
                                                      moe_intermediate_size=24, decoder_sparse_step=2)),
        "mixtral": Case(hf.MixtralConfig(**BASE, num_local_experts=4, sliding_window=24)),
        "gemma2": Case(hf.Gemma2Config(**gemma, attn_logit_softcapping=3.0, final_logit_softcapping=2.0)),
        "gemma3": Case(hf.Gemma3TextConfig(**{**gemma, "num_hidden_layers": 3}, sliding_window_pattern=3,
            rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
        "phi3": Case(hf.Phi3Config(**PHI, sliding_window=30)),
        "phi3-short": Case(hf.Phi3Config(**{**PHI, "hidden_size": 24}, original_max_position_embeddings=96,
                                         rope_parameters=dict(LONG)), longest=96),
        "phi3-long": Case(hf.Phi3Config(**{**PHI, "hidden_size": 24}, original_max_position_embeddings=64,
                                        rope_parameters=dict(LONG))),
        "phi3-partial": Case(hf.Phi3Config(**PHI, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                                    "partial_rotary_factor": 0.75})),
        "gpt2": Case(hf.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
        "gpt2-by-depth": Case(hf.GPT2Config(vocab_size=67, n_embd=36, n_layer=3, n_head=3, n_positions=128, n_inner=50,
                                            scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
        "opt": Case(hf.OPTConfig(**opt)),
        "opt-350m": Case(hf.OPTConfig(**opt, word_embed_proj_dim=16, do_layer_norm_before=False)),
        "bloom": Case(hf.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4)),
        "bloom-6-heads": Case(hf.BloomConfig(vocab_size=67, hidden_size=48, n_layer=2, n_head=6)),
        "falcon-7b": Case(hf.FalconConfig(**falcon)),
        "falcon-40b": Case(hf.FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2)),
        "falcon-11b": Case(hf.FalconConfig(**falcon, new_decoder_architecture=True, num_kv_heads=2,
                                           num_ln_in_parallel_attn=1, tie_word_embeddings=False)),
        "falcon-rw": Case(hf.FalconConfig(**falcon, multi_query=False, parallel_attn=False, alibi=True, bias=True),
                          attention="sdpa"),  # the eager one of Transformers 5 adds the biases twice,
        "gpt-neox": Case(hf.GPTNeoXConfig(**ONE)),
        "gpt-neox-serial": Case(hf.GPTNeoXConfig(**ONE, use_parallel_residual=False, attention_bias=False)),
        "deepseek-v2": Case(hf.DeepseekV2Config(**MLA, **MOE, q_lora_rank=20, n_group=4, topk_group=2,
                                                topk_method="group_limited_greedy", rope_parameters=dict(YARN))),
        "deepseek-v2-lite": Case(hf.DeepseekV2Config(**MLA, **MOE, q_lora_rank=None)),
        "qwen3-next": Case(hf.Qwen3NextConfig(**HYBRID, **DELTA, num_experts=6, num_experts_per_tok=2,
                                              moe_intermediate_size=20, shared_expert_intermediate_size=24,
                                              mlp_only_layers=[1])),
        "qwen3-next-all-dense": Case(hf.Qwen3NextConfig(**HYBRID, **{**DELTA, "linear_num_value_heads": 2},
                                                        num_experts=0, attention_bias=True)),
        "qwen3-5": Case(hf.Qwen3_5TextConfig(**HYBRID, **DELTA)),
        "qwen3-5-moe": Case(hf.Qwen3_5MoeTextConfig(**HYBRID, **DELTA, num_experts=6, num_experts_per_tok=2,
                                                    moe_intermediate_size=20, shared_expert_intermediate_size=24)),
        "gpt-oss": Case(hf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                        sliding_window=20)),
    }  # fmt: skip


CASES = cases()


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 67, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CASES)
def test_same_logits_and_same_bytes(name, backend, tmp_path):
    case = CASES[name]
    reference, config, tensors = make(case.config, tmp_path, attention=case.attention)
    model = load(config, tensors, max_positions=case.longest, kernels=backend)
    prompts = {"a": prompt(80), "b": prompt(3, 2)}
    whole = {k: ours(model, {k: v}, [[(k, len(v))]], backend)[k] for k, v in prompts.items()}
    for key, tokens in prompts.items():
        if name == "phi3-long" and key == "b":
            continue  # Transformers goes back to the short factors for a short prompt; a served run cannot.
        expected = theirs(reference, tokens)
        assert expected.std() > 0.05
        assert (whole[key] - expected).abs().max() <= 1e-4, key

    steps = [[("a", 7)], [("b", 1), ("a", 40)], [("a", 1), ("b", 2)]] + [[("a", 1)]] * 5 + [[("a", 27)]]
    for key, logits in ours(model, prompts, steps, backend).items():
        assert torch.equal(logits, whole[key]), key


FACTORS = {k: LONG[k] for k in ("short_factor", "long_factor")}
OLD_YARN = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}
OLD = {
    "qwen2": {"rope_theta": 10000.0},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
               "sliding_window_pattern": 3, "layer_types": None},
    "gpt-neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "phi3-long": {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **FACTORS}},
    "falcon-7b": {"rope_theta": 10000.0},
    "gpt-oss": {"rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False}},
    "deepseek-v2": {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **OLD_YARN}},
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_configs_as_transformers_4_wrote_them(name, tmp_path):
    _, config, tensors = make(CASES[name].config, tmp_path)
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype", "_sliding_window_pattern")}
    old |= {"torch_dtype": "float32", **OLD[name]}
    prompts = {"a": prompt(70)}
    new_logits, old_logits = (ours(load(c, tensors), prompts, [[("a", 70)]])["a"] for c in (config, old))
    assert torch.equal(new_logits, old_logits)


@pytest.mark.parametrize(
    ("name", "block", "parts"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("deepseek-v2", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_fused_experts_load_like_separate_ones(name, block, parts, tmp_path):
    _, config, tensors = make(CASES[name].config, tmp_path)
    fused = dict(tensors)
    for layer in range(2):
        at = f"model.layers.{layer}.{block}.experts"
        count = sum(f"{at}.{i}.{parts[0]}.weight" in tensors for i in range(64))
        if count:
            gate, up, down = ([fused.pop(f"{at}.{i}.{p}.weight") for i in range(count)] for p in parts)
            to = at.replace("block_sparse_moe", "mlp")
            fused[f"{to}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
            fused[f"{to}.down_proj"] = torch.stack(down)
            router = fused.pop(f"model.layers.{layer}.{block}.gate.weight")
            fused[f"model.layers.{layer}.mlp.gate.weight"] = router
    assert len(fused) < len(tensors)
    prompts = {"a": prompt(20)}
    one, other = (ours(load(config, t), prompts, [[("a", 20)]])["a"] for t in (tensors, fused))
    assert torch.equal(one, other)
