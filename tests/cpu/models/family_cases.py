"""Tiny configs of every family of the table: what real checkpoints switch on, one line each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cpu.models.config_types_helpers import Absent, hf
from tests.cpu.models.parity import make

from tokenmill.models.table import TABLE

BASE: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
                       "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 1e5}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
MINISTRAL3 = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
              "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}  # fmt: skip
PHIMOE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.5, 6.0, 7.0],
          "short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 128,
          "rope_theta": 1e4}  # fmt: skip


def part(share: float, **more: Any) -> dict[str, Any]:
    """Rope settings that turn a share of each head."""
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share, **more}


@dataclass
class Case:
    """A config, and the longest run where the result depends on it."""

    config: Any
    longest: int | None = None
    attention: str = "eager"
    architecture: str | None = None
    """What published files say where Transformers saves another name."""

    def make(self, folder: Path) -> tuple[Any, dict, dict[str, Any]]:
        """Transformers' model, config.json and tensors."""
        return make(self.config, folder, attention=self.attention, architecture=self.architecture)


def several(kind: Any, base: dict[str, Any], *twists: dict[str, Any], **more: Any) -> list[Case]:
    """One case a twist, on the same base; none of a type that this Transformers lacks."""
    return [] if kind is Absent else [Case(kind(**{**base, **twist}), **more) for twist in twists]


WIDE = {"head_dim": 16}
ODD = {"hidden_size": 42, "intermediate_size": 51, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14}
DEEP = {"num_hidden_layers": 4}
TIED, LOOSE = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
PLAIN = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
MIX = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
GROUPED = {**MIX, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
           "routed_scaling_factor": 1.7, "norm_topk_prob": True, "first_k_dense_replace": 1}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
INDEX = {"q_lora_rank": 20, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
FLAT = {k: BASE[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id",
                             "pad_token_id")}  # fmt: skip
SPACE = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "rms_norm_eps": 1e-3}
DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 67}


def dbrx(attention: dict[str, Any], experts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """DBRX says it in objects."""
    inner = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, **experts}
    return {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, **attention}, "ffn_config": inner, **more}


# Transformers finds this class by itself only inside models that see.
if hf.Mistral4Config is not Absent:
    hf.AutoModelForCausalLM.register(hf.Mistral4Config, hf.Mistral4ForCausalLM, exist_ok=True)


def families() -> dict[str, list[Case]]:
    """Family -> its cases. The first shows most of it and is compared on every backend."""
    alternating = ["sliding_attention", "full_attention"] * 2
    small = {**BASE, "head_dim": 8}
    hybrid = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    short = ["conv", "full_attention", "conv", "full_attention"]
    typed = {"full_attention": {**YARN}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    return {
        "llama": several(hf.LlamaConfig, BASE, {**BIASED, "mlp_bias": True, "rope_parameters": LLAMA3}, ODD,
                         {**TIED, "rope_parameters": LINEAR}, {"rope_parameters": YARN}),
        "mistral": several(hf.MistralConfig, BASE, {"sliding_window": 20}, {"sliding_window": None, **WIDE}, ODD),
        "ministral": several(hf.MinistralConfig, small, {**DEEP, "sliding_window": 20, "layer_types": alternating},
                             {"sliding_window": 50, **TIED}, {"sliding_window": 16, **WIDE}),
        "ministral3": several(hf.Ministral3Config, small, {"rope_parameters": MINISTRAL3},
                              {"rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.5}, "sliding_window": 30},
                              {"rope_parameters": {**MINISTRAL3, "factor": 2.0}, **TIED, **WIDE}),
        "qwen2": several(hf.Qwen2Config, BASE, {**DEEP, "use_sliding_window": True, "sliding_window": 20,
                                                "max_window_layers": 1}, TIED, {"rope_parameters": YARN}),
        "qwen3": several(hf.Qwen3Config, small, {}, {**BIASED, **WIDE, **TIED}, {"rope_parameters": YARN}),
        "phi3": several(hf.Phi3Config, BASE, {"sliding_window": 30}, {"rope_parameters": part(0.75)}, TIED),
        "phi": several(hf.PhiConfig, BASE, {"qk_layernorm": True}, {"rope_parameters": part(0.25), **TIED},
                       {"num_key_value_heads": 4, "hidden_act": "gelu"}),
        "gemma": several(hf.GemmaConfig, BASE, WIDE, {"head_dim": 8, **BIASED}, {**LOOSE, "head_dim": 8}),
        "gemma2": several(hf.Gemma2Config, {**small, "query_pre_attn_scalar": 16, "sliding_window": 20},
                          {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}, BIASED, DEEP),
        "gemma3": several(hf.Gemma3TextConfig, {**small, "query_pre_attn_scalar": 16, "sliding_window": 20},
                          {"num_hidden_layers": 3, "layer_types": alternating[:3]}, {**BIASED, **WIDE},
                          {"final_logit_softcapping": 2.0}),
        "gemma4": several(
            hf.Gemma4TextConfig, {**small, **DEEP, "global_head_dim": 16, "sliding_window": 20,
                                  "layer_types": alternating, "vocab_size_per_layer_input": 67,
                                  "hidden_size_per_layer_input": 6},
            {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}, {"final_logit_softcapping": 2.0, **BIASED},
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20,
             "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        "gemma3n": several(
            hf.Gemma3nTextConfig, {**small, **DEEP, "sliding_window": 20, "layer_types": alternating,
                                   "vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 6,
                                   "laurel_rank": 5, "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0},
            {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0], "intermediate_size": [48, 40, 48, 52]},
            {"altup_num_inputs": 2, "altup_correct_scale": False, "num_kv_shared_layers": 0, **BIASED},
            {"altup_active_idx": 2, "altup_num_inputs": 3, "final_logit_softcapping": 2.0, "num_kv_shared_layers": 1,
             "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        "vaultgemma": several(hf.VaultGemmaConfig, {**small, "query_pre_attn_scalar": 16, "sliding_window": 20}, {},
                              BIASED, {"attn_logit_softcapping": None, "layer_types": alternating[:2], **LOOSE}),
        "persimmon": several(hf.PersimmonConfig, PLAIN, {}, {"qk_layernorm": False}, {"rope_parameters": part(1.0)}),
        "olmo": several(hf.OlmoConfig, BASE, {"clip_qkv": 0.5}, {**BIASED, **TIED}, {"num_key_value_heads": 4}),
        "olmo2": several(hf.Olmo2Config, BASE, {}, {**BIASED, "num_key_value_heads": 4}, {"rope_parameters": YARN}),
        "olmo3": several(hf.Olmo3Config, BASE, {**DEEP, "sliding_window": 20, "rope_parameters": typed},
                         {**DEEP, "sliding_window": 9, "layer_types": alternating}, {"num_key_value_heads": 4}),
        "granite": several(hf.GraniteConfig, BASE, {**GRANITE, "mlp_bias": True}, {**GRANITE, **TIED, **BIASED}, {}),
        "cohere": several(hf.CohereConfig, BASE, {"use_qk_norm": True}, BIASED, {**LOOSE, "logit_scale": 2.0}),
        "cohere2": several(hf.Cohere2Config, {**BASE, **DEEP, "sliding_window": 20}, {},
                           {"layer_types": alternating, **BIASED, "logit_scale": 0.25}, {**LOOSE, "logit_scale": 0.5}),
        "cohere2_moe": several(
            hf.Cohere2MoeConfig, {**small, **DEEP, "num_experts": 4, "sliding_window": 20},
            {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "prefix_dense_intermediate_size": 40,
             "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
            {"rms_norm_eps": 1e-5, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum",
             "num_experts_per_tok": 3, **BIASED, **LOOSE},
            {"layer_types": ["full_attention", *alternating[:3]], "expert_selection_fn": "sigmoid",
             "norm_topk_prob": False, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
             "prefix_dense_sliding_window_pattern": 2, **WIDE}),
        "starcoder2": several(hf.Starcoder2Config, BASE, {"sliding_window": 20}, {"use_bias": False, **LOOSE}, {}),
        "stablelm": several(hf.StableLmConfig, BASE, {"use_qkv_bias": True, "qk_layernorm": True},
                            {"use_parallel_residual": True}, {"rope_parameters": part(0.5), **TIED}),
        "smollm3": several(hf.SmolLM3Config, {**BASE, **DEEP}, {}, {"no_rope_layers": [1, 0, 1, 1], **BIASED},
                           {"use_sliding_window": True, "sliding_window": 20, "rope_parameters": YARN, **LOOSE}),
        "exaone4": several(hf.Exaone4Config, {**BASE, **DEEP, **WIDE}, {"sliding_window": 20},
                           {"sliding_window": None, "layer_types": ["full_attention"] * 4},
                           {"sliding_window": 20, "layer_types": alternating, "rope_parameters": LLAMA3, **TIED}),
        "glm": several(hf.GlmConfig, BASE, WIDE, {"head_dim": 8, "attention_bias": False},
                       {"head_dim": 8, "rope_parameters": part(0.25), **TIED}),
        "glm4": several(hf.Glm4Config, BASE, WIDE, {"head_dim": 8, "attention_bias": False},
                        {"head_dim": 8, "rope_parameters": part(1.0), **TIED}),
        "ernie4_5": several(hf.Ernie4_5Config, BASE, {**WIDE, "use_bias": True}, {"head_dim": 8, **LOOSE}, ODD),
        "hunyuan_v1_dense": several(
            hf.HunYuanDenseV1Config, small, {},
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4, "factor": 1.0,
                                 "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {**BIASED, **WIDE, **TIED}),
        "seed_oss": several(hf.SeedOssConfig, BASE, WIDE, {"head_dim": 8, "attention_out_bias": True,
                                                           "mlp_bias": True}, {"head_dim": 8, **TIED}),
        "apertus": several(hf.ApertusConfig, BASE, {}, {**BIASED, "rope_parameters": LINEAR}, TIED),
        "arcee": several(hf.ArceeConfig, BASE, {}, {**BIASED, "mlp_bias": True, **TIED}, {"rope_parameters": YARN}),
        "nemotron": several(hf.NemotronConfig, BASE, {}, {**BIASED, "mlp_bias": True},
                            {**WIDE, "rope_parameters": part(1.0), **TIED}),
        "helium": several(hf.HeliumConfig, small, {}, {**BIASED, "mlp_bias": True}, {"num_key_value_heads": 4, **TIED}),
        "jais2": several(hf.Jais2Config, BASE, {}, {"attention_bias": False, "mlp_bias": False}, {**WIDE, **TIED}),
        "internlm3": several(hf.InternLM3Config, small, {}, {**BIASED, "mlp_bias": True},
                             {"rope_parameters": DYNAMIC}, longest=128, architecture="InternLM3ForCausalLM"),
        "bitnet": several(hf.BitNetConfig, BASE, {}, BIASED, {"hidden_act": "silu", **TIED}),
        "qwen2_moe": several(hf.Qwen2MoeConfig, {**BASE, **MIX, "num_experts": 4,
                                                    "shared_expert_intermediate_size": 24},
                             {"norm_topk_prob": True}, {"decoder_sparse_step": 2, "qkv_bias": False},
                             {**DEEP, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 20,
                              "max_window_layers": 3}),
        "qwen3_moe": several(hf.Qwen3MoeConfig, {**small, **MIX, "num_experts": 6},
                             {"mlp_only_layers": [0], "norm_topk_prob": True}, {"decoder_sparse_step": 2, **WIDE},
                             {**BIASED, "use_sliding_window": True, "sliding_window": 20}),
        "mixtral": several(hf.MixtralConfig, {**BASE, "num_local_experts": 4}, {"sliding_window": 24}, WIDE,
                           {"num_experts_per_tok": 3, **TIED}),
        "phimoe": several(hf.PhimoeConfig, {**BASE, "num_local_experts": 4},
                          {**BIASED, "lm_head_bias": True, "router_jitter_noise": 0.3}, {"sliding_window": 20},
                          {"rope_parameters": PHIMOE}),
        "olmoe": several(hf.OlmoeConfig, {**BASE, "num_experts": 4, "num_experts_per_tok": 2}, {"clip_qkv": 0.8},
                         {"norm_topk_prob": True, "num_key_value_heads": 4}, BIASED),
        "granitemoe": several(hf.GraniteMoeConfig, {**BASE, "num_local_experts": 4}, GRANITE, {**BIASED, **TIED},
                              {"num_experts_per_tok": 3}),
        "granitemoeshared": several(hf.GraniteMoeSharedConfig, {**BASE, "num_local_experts": 4},
                                    {**GRANITE, "shared_intermediate_size": 24}, {"shared_intermediate_size": 0},
                                    {**BIASED, **TIED, "shared_intermediate_size": 16}),
        "glm4_moe": several(hf.Glm4MoeConfig, {**BASE, **GROUPED}, {"use_qk_norm": True, **BIASED},
                            {"n_group": 1, "topk_group": 1, "n_shared_experts": 2},
                            {"norm_topk_prob": False, "first_k_dense_replace": 0, **WIDE}),
        "dots1": several(hf.Dots1Config, {**BASE, **GROUPED, "n_shared_experts": 2},
                         {**DEEP, "sliding_window": 20, "max_window_layers": 2}, {"sliding_window": None, **BIASED},
                         {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        "minimax_m2": several(hf.MiniMaxM2Config, {**BASE, "num_local_experts": 6, "num_experts_per_tok": 3},
                              {**WIDE, "rotary_dim": 8}, {"head_dim": 8}, {**WIDE, "rope_parameters": part(0.25)}),
        "ernie4_5_moe": several(hf.Ernie4_5_MoeConfig, {**BASE, "moe_num_experts": 6, "moe_k": 3,
                                                        "moe_intermediate_size": 20},
                                {"use_bias": True}, {"moe_num_shared_experts": 0, **LOOSE},
                                {**DEEP, "moe_layer_start_index": 0, "moe_layer_end_index": 2,
                                 "moe_layer_interval": 2}),
        "hunyuan_v1_moe": several(hf.HunYuanMoEV1Config, {**small, "num_experts": 4, "moe_topk": 2}, {}, BIASED,
                                  {"moe_topk": [3, 2], **TIED, **WIDE}),
        "deepseek_v3": several(
            hf.DeepseekV3Config, {**BASE, **LATENT, **GROUPED, "q_lora_rank": 20},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "n_shared_experts": 2},
            {"q_lora_rank": None, "rope_interleave": False, **BIASED},
            {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, **TIED}),
        # Indices with several heads: where all of few are below zero, many keys have equal scores.
        "deepseek_v32": several(
            hf.DeepseekV32Config, {**BASE, **LATENT, **GROUPED, **INDEX},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "n_shared_experts": 2},
            {**DEEP, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], **BIASED, "index_topk": 1},
            {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "index_head_dim": 6, "index_topk": 70, **TIED},
            {"index_topk": 128}),
        "glm_moe_dsa": several(
            hf.GlmMoeDsaConfig, {**BASE, **LATENT, **GROUPED, **INDEX}, {"rope_parameters": YARN},
            {**DEEP, "indexer_types": ["full", "shared", "full", "shared"], **BIASED},
            {**DEEP, "index_topk_freq": 2, "index_skip_topk_offset": 1, "index_topk": 33, **TIED}),
        "glm4_moe_lite": several(
            hf.Glm4MoeLiteConfig, {**{k: v for k, v in {**BASE, **LATENT, **GROUPED}.items()
                                      if k != "first_k_dense_replace"}, "q_lora_rank": 20},
            {}, {**DEEP, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], **BIASED},
            {"n_group": 1, "topk_group": 1, "rope_parameters": YARN, "q_lora_rank": None}),
        "llama4": several(
            hf.Llama4TextConfig, {**small, **DEEP, "num_local_experts": 4, "intermediate_size_mlp": 20,
                                  "attention_chunk_size": 32},
            {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attn_temperature_tuning": False},
            {"floor_scale": 8, "attn_scale": 0.4, "no_rope_layers": [1, 0, 1, 1], **BIASED, "attention_chunk_size": 16},
            {"use_qk_norm": False, "moe_layers": [0, 3], "rope_parameters": LLAMA3, **TIED, "attention_chunk_size": 21,
             "layer_types": ["chunked_attention", "full_attention", "full_attention", "chunked_attention"]}),
        "dbrx": several(hf.DbrxConfig, DBRX, dbrx({"clip_qkv": 0.7}, {}), dbrx({"clip_qkv": 3.0}, {"moe_top_k": 1}),
                        dbrx({"clip_qkv": 2.0, "kv_n_heads": 4}, {"moe_normalize_expert_weights": None})),
        "mamba": several(hf.MambaConfig, {**FLAT, "state_size": 8}, {"time_step_rank": 5},
                         {"use_bias": True, "conv_kernel": 3, "expand": 1}, {"use_conv_bias": False, **LOOSE}),
        "falcon_mamba": several(hf.FalconMambaConfig, {**FLAT, "state_size": 8}, {"mixer_rms_eps": 1e-3},
                                {"use_bias": True, "conv_kernel": 3, "expand": 1}, {"use_conv_bias": False, **LOOSE}),
        "mamba2": several(hf.Mamba2Config, {**FLAT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2,
                                            "layer_norm_epsilon": 1e-3},
                          {"time_step_limit": (0.1, 0.8)}, {"use_bias": True, "n_groups": 1, "conv_kernel": 3},
                          {"use_conv_bias": False, "n_groups": 4, "num_heads": 4, "head_dim": 16, **TIED}),
        "bamba": several(hf.BambaConfig, {**BASE, **DEEP, **SPACE, "attn_layer_indices": [1, 3]},
                         {}, {**BIASED, "mlp_bias": True, "mamba_proj_bias": True, "mamba_n_groups": 1},
                         {"mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": (0.05, 1.0), **TIED}),
        "granitemoehybrid": several(
            hf.GraniteMoeHybridConfig, {**BASE, **DEEP, **SPACE, "num_local_experts": 4, "shared_intermediate_size": 24,
                                        "layer_types": hybrid},
            GRANITE, {"num_local_experts": 0, "position_embedding_type": "rope", **BIASED, "mamba_proj_bias": True},
            {"num_experts_per_tok": 3, "mamba_n_groups": 4, **TIED}),
        "nemotron_h": several(
            hf.NemotronHConfig, {**{k: v for k, v in BASE.items() if k != "num_hidden_layers"}, "head_dim": 8,
                                 "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2,
                                 "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24,
                                 "n_routed_experts": 6, "layer_norm_epsilon": 1e-3},
            {}, {"layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
                 "mlp_bias": True, "use_bias": True, "time_step_min": 0.3},
            {"layers_block_type": ["full_attention", "moe", "linear_attention", "moe"], "n_group": 2, "topk_group": 1,
             "norm_topk_prob": False, "routed_scaling_factor": 1.7, "mlp_hidden_act": "gelu"}),
        "jamba": several(hf.JambaConfig, {**BASE, **DEEP, "num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2,
                                          "attn_layer_offset": 1},
                         {}, {"mamba_proj_bias": True, "mamba_dt_rank": 5, "expert_layer_period": 3},
                         {"num_experts": 1, "mamba_conv_bias": False, "attn_layer_period": 3, **TIED}),
        "recurrent_gemma": several(
            hf.RecurrentGemmaConfig, {**BASE, "num_hidden_layers": 3, "attention_window_size": 20, "rms_norm_eps": 1e-3,
                                      "tie_word_embeddings": True},
            {"num_key_value_heads": 1}, {"block_types": ["recurrent", "attention"], "conv1d_width": 3, **BIASED},
            {"lru_width": 48, "logits_soft_cap": 4.0, "rope_parameters": part(1.0), "num_hidden_layers": 4,
             "hidden_activation": "gelu"}),
        # Heads of the delta rule are narrower than values, and what a new value replaces may be more than the old one.
        "olmo_hybrid": several(
            hf.OlmoHybridConfig, {**BASE, **DEEP},
            {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **TIED},
            {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
             "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "linear_conv_kernel_dim": 3},
            {"linear_allow_neg_eigval": False, "attention_bias": True, "num_hidden_layers": 2}),
        # Heads of the delta rule are others than those of attention, and layers are listed in one of two ways.
        "kimi_linear": several(
            hf.KimiLinearConfig,
            {**{key: value for key, value in BASE.items() if key != "max_position_embeddings"}, **LATENT, **DEEP,
             "model_max_length": 128, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts": 8,
             "num_experts_per_token": 3, "moe_intermediate_size": 20},
            {"linear_attn_config": {"head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4,
                                    "kda_layers": [1, 2, 4], "full_attn_layers": [3]}},
            {"layer_types": hybrid, "num_expert_group": 4, "topk_group": 2, "q_lora_rank": 20,
             "first_k_dense_replace": 2, "linear_conv_kernel_dim": 3},
            {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"], "num_hidden_layers": 5,
             "moe_renormalize": False, "num_shared_experts": 2, "linear_num_heads": 2, **BIASED}),
        # Saved configs say the head size of the delta rule beside that of rotation.
        "bailing_hybrid": several(
            hf.BailingHybridConfig,
            {**BASE, **LATENT, **DEEP, "head_dim": 8, "layer_group_size": 2, "num_local_experts": 8,
             "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2,
             "first_k_dense_replace": 1},
            {}, {"kda_safe_gate": False, "layer_group_size": 3, "q_lora_rank": 20, "n_shared_experts": 2,
                 "short_conv_kernel_size": 3, **BIASED},
            {"layer_types": hybrid, "kda_lower_bound": -1.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
             "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "rope_parameters": {
                 **YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "head_dim": 12}),
        "minimax": several(
            hf.MiniMaxConfig, {**small, **DEEP, "num_local_experts": 4, "block_size": 16},
            {"linear_attn_alpha_factor": 3.5, "linear_attn_beta_factor": 0.9, "full_attn_alpha_factor": 2.5,
             "full_attn_beta_factor": 1.2, "mlp_alpha_factor": 3.0, "mlp_beta_factor": 0.8},
            {"layer_types": hybrid, "sliding_window": 20, "head_dim": None, **TIED},
            {"num_experts_per_tok": 3, "num_key_value_heads": 4, "mlp_alpha_factor": 2, "rope_parameters": YARN,
             **WIDE}),
        # Blocks that several layers share: one, or two in turn.
        "zamba2": several(
            hf.Zamba2Config,
            {**FLAT, "num_hidden_layers": 5, "intermediate_size": 48, "num_attention_heads": 4, "n_mamba_heads": 8,
             "mamba_d_state": 8, "mamba_ngroups": 2, "adapter_rank": 5, "rms_norm_eps": 1e-3,
             "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]},
            {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True},
            {"add_bias_linear": True, "mamba_d_conv": 3, "num_key_value_heads": 2},
            {"use_mem_rope": True, "mamba_ngroups": 1, "time_step_min": 0.3, "rope_parameters": YARN,
             "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3}),
        "aria_text": several(hf.AriaTextConfig, {**BASE, "moe_num_experts": 4}, {"moe_topk": 3},
                             {**BIASED, "moe_num_shared_experts": 1, "num_key_value_heads": 4},
                             {**WIDE, **TIED, "rope_parameters": YARN}),
        "lfm2": several(hf.Lfm2Config, {**BASE, **DEEP, "block_multiple_of": 8}, {"layer_types": short},
                        {"full_attn_idxs": [0, 3], "conv_bias": True, "block_auto_adjust_ff_dim": False, **LOOSE},
                        {"layer_types": short[::-1], "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3}),
        "lfm2_moe": several(hf.Lfm2MoeConfig, {**BASE, **DEEP, **MIX, "num_experts": 4, "layer_types": short},
                            {"num_dense_layers": 1},
                            {"conv_bias": True, "num_dense_layers": 0, "norm_topk_prob": False},
                            {"routed_scaling_factor": 1.7, "conv_L_cache": 4, **LOOSE}),
        "lfm3": several(
            hf.Lfm3Config, {**small, **DEEP, "sliding_window": 20}, {},
            {"layer_types": ["full_attention", "conv", "sliding_attention", "conv"], "conv_bias": True, **BIASED,
             "conv_L_cache": 3, "use_sandwich_norm": False, **LOOSE},
            {"use_attention_gate": False, "rope_parameters": typed, "num_hidden_layers": 3, **WIDE}),
        "falcon_h1": several(
            hf.FalconH1Config, {**BASE, **SPACE, "mamba_d_ssm": 48, "lm_head_multiplier": 2.0},
            {"ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9], "mlp_multipliers": [0.6, 1.4], "ssm_in_multiplier": 1.2,
             "ssm_out_multiplier": 0.8, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7,
             "key_multiplier": 0.5, "embedding_multiplier": 1.5},
            {"mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True, "mamba_conv_bias": False,
             "ssm_multipliers": [0.005, 1.3, 0.8, 1.2, 0.9], "ssm_in_multiplier": 1.2},
            {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None, "mamba_n_groups": 1,
             "time_step_limit": (0.1, 0.9), **TIED}),
        "cwm": several(hf.CwmConfig, {**small, **DEEP, "sliding_window": 20, "bos_token_id": 1},
                       {"rope_parameters": LLAMA3}, {"layer_types": alternating, **WIDE, "rope_parameters": part(1.0)},
                       {"sliding_window": 9, **TIED, "rope_parameters": YARN}),
        "iquestcoder": several(hf.IQuestCoderConfig, small, BIASED, {"mlp_bias": True, **WIDE, **TIED},
                               {"rope_parameters": YARN}, architecture="IQuestCoderForCausalLM"),
        "exaone": several(hf.ExaoneConfig, BASE, {}, {**BIASED, "mlp_bias": True, "rope_parameters": LLAMA3},
                          {**TIED, "rope_parameters": DYNAMIC}, longest=128, architecture="ExaoneForCausalLM"),
        "sarvam_moe": several(hf.SarvamMoEConfig, {**BASE, **GROUPED, "head_dim": 8}, {"use_qk_norm": False, **BIASED},
                              {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_parameters": part(0.5)},
                              {"norm_topk_prob": False, "first_k_dense_replace": 0, **WIDE, **TIED},
                              architecture="SarvamMoEForCausalLM"),
        "sarvam_mla": several(
            hf.SarvamMLAConfig, {**BASE, **LATENT, **GROUPED},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "n_shared_experts": 2},
            {"q_lora_rank": 20, "rope_interleave": False, **BIASED},
            {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, **TIED},
            architecture="SarvamMLAForCausalLM"),
        "axk1": several(
            hf.AXK1Config, {**{k: v for k, v in {**BASE, **LATENT, **GROUPED}.items()
                               if k != "first_k_dense_replace"}, "q_lora_rank": 20},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
            {**DEEP, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "rope_interleave": False, **BIASED},
            {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, **TIED}),
        "axk2": several(
            hf.AXK2Config, {**{k: v for k, v in {**BASE, **LATENT, **GROUPED, **INDEX}.items()
                               if k != "first_k_dense_replace"}, "gated_norm_rank": 5},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
            {**DEEP, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "n_group": None, "topk_group": None,
             "n_shared_experts": 2, **BIASED, "index_topk": 33},
            {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "index_topk": 128, **TIED}),
        "hy_v4": several(
            hf.HYV4Config, {**{k: v for k, v in {**BASE, **LATENT, **GROUPED, **INDEX}.items()
                               if k != "first_k_dense_replace"}, "n_group": 1, "topk_group": 1},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
            {"num_hidden_layers": 6, "mlp_layer_types": ["sparse", "dense"] * 3, "hc_mult": 3, "hc_magnitude": 1.5,
             "n_group": 4, "topk_group": 2, "n_shared_experts": 2, **BIASED, "index_topk": 33, "hidden_act": "gelu"},
            {**DEEP, "indexer_types": ["full", "shared", "shared", "full"], "hc_mult": 1, "norm_topk_prob": False,
             "rms_norm_eps": 1e-2, "hc_eps": 0.1, "index_head_dim": 6, **TIED},
            {"index_topk": 128}),
        "gpt_neox_japanese": several(
            hf.GPTNeoXJapaneseConfig, {k: v for k, v in PLAIN.items() if k != "intermediate_size"}, {},
            {"rope_parameters": part(0.5), "intermediate_multiple_size": 3, "hidden_act": "relu",
             "num_hidden_layers": 1},
            {**LOOSE, "rope_parameters": YARN, "layer_norm_eps": 1e-2}),
        "openai-gpt": several(
            hf.OpenAIGPTConfig, GPT, {}, {"afn": "swish", "layer_norm_epsilon": 1e-2, **LOOSE},
            {"afn": "relu", "n_head": 2, "n_layer": 3}),
        "longcat_flash": several(
            hf.LongcatFlashConfig,
            {**{k: v for k, v in {**BASE, **LATENT}.items() if k not in ("num_hidden_layers", "intermediate_size")},
             "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 20, "moe_topk": 3, "q_lora_rank": 20,
             "n_routed_experts": 4, "zero_expert_num": 3, "head_dim": 6},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
            {"zero_expert_num": 0, "moe_topk": 2, **BIASED, "num_layers": 1},
            {"routed_scaling_factor": 1.7, "zero_expert_num": 6, "moe_topk": 5, **TIED}),
        "mistral4": several(
            hf.Mistral4Config, {**BASE, **LATENT, **GROUPED},
            {"rope_parameters": {**MINISTRAL3, "partial_rotary_factor": 6 / 14, "mscale_all_dim": 0.9}},
            {"rope_parameters": {**MINISTRAL3, "llama_4_scaling_beta": 0.0}, "q_lora_rank": 20,
             "rope_interleave": False, "norm_topk_prob": False, **BIASED},
            {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2, **TIED}),
        "hyperclovax": several(hf.HyperCLOVAXConfig, BASE, GRANITE, {"use_post_norm": False, **BIASED},
                               {"mlp_bias": True, "logits_scaling": 0.5, **WIDE, **TIED}),
        "granite_swa": several(
            hf.GraniteSWAConfig, {**BASE, **DEEP, **GRANITE, "sliding_window": 20},
            {"layer_rope_theta": [0, 1e4, 500.0, 1e4]}, {"layer_types": alternating, **LOOSE, **BIASED},
            {"sliding_window": 9, "layer_rope_theta": [1e4, 0, 0, 99.0], "mlp_bias": True}),
        "granitemoe_swa": several(
            hf.GraniteMoeSWAConfig, {**BASE, **DEEP, **GRANITE, "num_local_experts": 4, "sliding_window": 20},
            {"shared_intermediate_size": 24, "layer_rope_theta": [0, 1e4, 500.0, 1e4]},
            {"layer_types": alternating, "num_experts_per_tok": 3, "shared_intermediate_size": 0},
            {"shared_intermediate_size": 16, **TIED, **BIASED}),
        "nanochat": several(hf.NanoChatConfig, BASE, {"final_logit_softcapping": 2.0}, {**BIASED, **TIED},
                            {"num_key_value_heads": 4, "hidden_act": "gelu", "rope_parameters": LINEAR}),
        "solar_open": several(
            hf.SolarOpenConfig, {**{k: v for k, v in {**BASE, **GROUPED}.items()
                                    if k not in ("first_k_dense_replace", "intermediate_size")}, "head_dim": 8},
            BIASED, {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, **WIDE},
            {"norm_topk_prob": False, "rope_parameters": YARN, **TIED}),
        "mellum": several(
            hf.MellumConfig, {**small, **DEEP, **MIX, "num_experts": 4, "sliding_window": 20},
            {"layer_types": alternating, "rope_parameters": typed},
            {"mlp_layer_types": ["dense", "sparse"] * 2, **BIASED},
            {"norm_topk_prob": False, "layer_types": alternating[::-1], **WIDE, **TIED}),
        "exaone_moe": several(
            hf.ExaoneMoeConfig, {**BASE, **DEEP, **MIX, **WIDE, "num_experts": 8, "num_experts_per_tok": 3,
                                 "sliding_window": 20},
            {"n_group": 4, "topk_group": 2}, {"layer_types": alternating, "num_shared_experts": 2, **TIED},
            {"sliding_window": 7, "norm_topk_prob": False,
             "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "rope_parameters": LLAMA3}),
        "flex_olmo": several(hf.FlexOlmoConfig, {**BASE, "num_experts": 4, "num_experts_per_tok": 2}, {},
                             {"norm_topk_prob": True, "num_key_value_heads": 4, **TIED},
                             {**BIASED, "rope_parameters": YARN}),
        "hy_v3": several(
            hf.HYV3Config, {**small, **MIX, "num_experts": 4}, {},
            {**BIASED, "num_shared_experts": 2, **TIED},
            {**DEEP, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "router_scaling_factor": 0.7, **WIDE}),
        "kolibri1": several(
            hf.Kolibri1Config, {**{k: v for k, v in {**small, **DEEP, **MIX}.items() if k != "intermediate_size"},
                                "num_experts": 6, "sliding_window": 20, "shared_expert_intermediate_size": 24},
            {"layer_types": alternating}, {"num_hidden_layers": 5, "norm_topk_prob": True, **WIDE},
            {"sliding_window": 9, "layer_types": alternating[::-1], "rope_parameters": YARN, **TIED}),
        "laguna": several(
            hf.LagunaConfig, {**small, **DEEP, **MIX, "num_experts": 6, "sliding_window": 20,
                              "shared_expert_intermediate_size": 24},
            {"layer_types": alternating, "num_attention_heads_per_layer": [4, 2, 6, 2], "gating": "per-head",
             "moe_routed_scaling_factor": 1.7, "rope_parameters": {
                 "full_attention": {**YARN, "partial_rotary_factor": 0.5, "attention_factor": 1.3},
                 "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}},
            {"gating": "per-element", "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], **BIASED, **WIDE},
            {"layer_types": alternating[::-1], **TIED}),
        "mimo_v2_flash": several(
            hf.MiMoV2FlashConfig, {**BASE, **DEEP, **MIX, "n_routed_experts": 8, "num_experts_per_tok": 3,
                                   "head_dim": 12, "v_head_dim": 10, "sliding_window": 20},
            {"layer_types": alternating, "n_group": 4, "topk_group": 2},
            {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "attention_value_scale": None,
             "v_head_dim": 16, "routed_scaling_factor": 1.7, **BIASED},
            {"layer_types": alternating[::-1], "norm_topk_prob": False, "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0}},
             "attention_value_scale": 1.3, **TIED}),
        "afmoe": several(
            hf.AfmoeConfig, {**small, **DEEP, **MIX, "num_experts": 4, "sliding_window": 20},
            {"mup_enabled": True, "route_scale": 1.7}, {"num_dense_layers": 2, "global_attn_every_n_layers": 2, **WIDE},
            {"layer_types": alternating, **BIASED, **TIED, "num_shared_experts": 1}),
        "youtu": several(
            hf.YoutuConfig, {**BASE, **LATENT, "q_lora_rank": 20}, {},
            {"q_lora_rank": None, "rope_interleave": False, **BIASED},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, **LOOSE}),
        "minicpm3": several(
            hf.MiniCPM3Config, {**BASE, **LATENT, "q_lora_rank": 20},
            {"scale_emb": 3, "dim_model_base": 16}, {"q_lora_rank": None, "v_head_dim": None, **BIASED},
            {"scale_depth": None, "dim_model_base": None, "scale_emb": 1, "rope_parameters": YARN, **LOOSE}),
        "gpt_neox": several(hf.GPTNeoXConfig, PLAIN, {},
                            {"use_parallel_residual": False, "attention_bias": False},
                            {"rope_parameters": part(0.5), **TIED}),
        "bloom": several(hf.BloomConfig, {"vocab_size": 67, "n_layer": 2}, {"hidden_size": 48, "n_head": 6},
                         {"hidden_size": 32, "n_head": 4}, {"hidden_size": 32, "n_head": 2, **LOOSE}),
        "gptj": several(hf.GPTJConfig, GPT, {"rotary_dim": 4}, {"rotary_dim": 8, "n_inner": 50},
                        {"rotary_dim": 2, "activation_function": "gelu"}),
        "codegen": several(hf.CodeGenConfig, GPT, {"rotary_dim": 4}, {"n_head": 8, "rotary_dim": 4},
                           {"rotary_dim": 8, "n_inner": 50}),
        "gpt_bigcode": several(hf.GPTBigCodeConfig, GPT, {}, {"multi_query": False, "n_inner": 50},
                               {"scale_attn_weights": False, **LOOSE}),
        "gpt_neo": several(hf.GPTNeoConfig, {"vocab_size": 67, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                             "max_position_embeddings": 128, "bos_token_id": None,
                                             "eos_token_id": None},
                           {"attention_types": [[["global", "local"], 1]], "window_size": 20},
                           {"attention_types": [[["global"], 2]], "intermediate_size": 50},
                           {"attention_types": [[["local"], 2]], "window_size": 9, **LOOSE}),
        "mpt": several(hf.MptConfig, {"vocab_size": 67, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 128},
                       {}, {"attn_config": {"clip_qkv": 0.6}, "d_model": 32, "n_heads": 4},
                       {"attn_config": {"softmax_scale": 0.3}, **LOOSE}),
        "xglm": several(hf.XGLMConfig, {"vocab_size": 67, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
                                        "attention_heads": 4, "max_position_embeddings": 128},
                        {}, {"scale_embedding": False}, {"activation_function": "relu", **LOOSE}),
        "biogpt": several(hf.BioGptConfig, {k: v for k, v in BASE.items() if k not in (
            "num_key_value_heads", "pad_token_id")}, {}, {"scale_embedding": False},
            {"hidden_act": "relu", **LOOSE}),
    }  # fmt: skip


FAMILIES = {name: cases for name, cases in families().items() if cases}
ALL = {f"{name}-{i}": case for name, cases in FAMILIES.items() for i, case in enumerate(cases)}


FILES = {"mistral4": "Mistral4ForCausalLM", "sarvam_mla": "SarvamMLAForCausalLM", "youtu": "YoutuForCausalLM",
         "minicpm3": "MiniCPM3ForCausalLM", "axk1": "AXK1ForCausalLM", "axk2": "AXK2ForCausalLM",
         "longcat_flash": "LongcatFlashForCausalLM", "hy_v4": "HYV4ForCausalLM",
         "openai-gpt": "OpenAIGPTLMHeadModel",
         "deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM",
         "glm_moe_dsa": "GlmMoeDsaForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
         "gemma3n": "Gemma3nForCausalLM", "gemma4": "Gemma4ForCausalLM",
         "falcon_h1": "FalconH1ForCausalLM", "kimi_linear": "KimiLinearForCausalLM",
         "bailing_hybrid": "BailingHybridForCausalLM", "minimax": "MiniMaxForCausalLM",
         "zamba2": "Zamba2ForCausalLM"}  # fmt: skip
"""Families here that have a file of their own."""


def first_of_each() -> dict[str, Case]:
    """Architecture -> the first case of its family."""
    kinds = {cases[0].config.model_type: cases[0] for cases in FAMILIES.values()} | {"mimo": FAMILIES["qwen2"][1]}
    known = {name: family.fields.model_type for name, family in TABLE.items() if family.fields.model_type in kinds}
    return {name: kinds[model_type] for name, model_type in known.items()} | {
        FILES[name]: cases[0] for name, cases in FAMILIES.items() if name in FILES
    }


FIRST = first_of_each()
