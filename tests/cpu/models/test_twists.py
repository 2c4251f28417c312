"""Configs that no published model has: sizes, counts and switches changed, and the model made anew with them.

test_config_fields.py changes keys under the same tensors; here tensors follow. The model is equal to Transformers', or
refused by a sentence that names the key. With TOKENMILL_RELIABILITY=1 every twist meets every family.
"""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.models.config_fields_helpers import SMALL, numbers
from tests.cpu.models.families_helpers import LONG, YARN
from tests.cpu.models.parity import load, make, ours, theirs

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels
from tokenmill.models.config import ModelConfig
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.positions import hunyuan_rope
from tokenmill.models.registry import architectures

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
FULL = os.environ.get("TOKENMILL_RELIABILITY") == "1"
KERNELS = make_kernels("cpu")
PROMPT = torch.randint(0, 60, (70,), generator=torch.Generator().manual_seed(5)).tolist()
GONE = object()
"""A key that is taken out."""


@cache
def base(architecture: str) -> dict[str, Any]:
    """The family's smallest config, as a file holds it."""
    said = json.loads(SMALL[architecture].config.to_json_string(use_diff=False))
    return {**said, "architectures": [architecture], "model_type": FIELDS[architecture].model_type}


def verdict(architecture: str, changes: dict[str, Any], folder: Path) -> str:
    """equal, refused (why), WRONG, or what there is no reference for."""
    case = SMALL[architecture]
    config = {key: value for key, value in {**base(architecture), **changes}.items() if value is not GONE}
    try:
        made = type(case.config).from_dict(numbers(copy.deepcopy(config)))
        model, _, tensors = make(made, folder, attention=case.attention)
        expected = theirs(model, PROMPT)
    except Exception as error:
        return f"no reference: {error}"
    try:
        built = load(config, tensors, max_positions=len(PROMPT), kernels=KERNELS)
        found = ours(built, {"a": PROMPT}, [[("a", len(PROMPT))]], KERNELS)["a"]
    except ModelError as error:
        return f"refused: {error}"
    away, most = float((found - expected).abs().max()), max(1.0, float(expected.abs().max()))
    return "equal" if away <= 1e-4 * most else f"WRONG by {away:.2g} of {most:.2g}"


_OLD = {"rope_parameters": GONE, "rope_theta": 1e4}
_OWN_YARN = {key: value for key, value in YARN.items() if key not in ("rope_theta", "mscale", "mscale_all_dim")}
_SHORT = {key: value for key, value in LONG.items() if key != "rope_theta"}
_TWO = {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
TWISTS: list[tuple[str, dict[str, Any], str]] = [
    ("LlamaForCausalLM", {**_OLD, "rope_scaling": {"rope_type": "proportional"}, "partial_rotary_factor": 0.25}, ""),
    ("LlamaForCausalLM", {"head_dim": 6, "num_key_value_heads": 1, "vocab_size": 61, "intermediate_size": 47}, ""),
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "no reference"),
    ("LlamaForCausalLM", {"hidden_act": "relu"}, ""),
    ("LlamaForCausalLM", {"hidden_act": "gelu_accurate"}, ""),
    ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("Gemma3ForCausalLM", {**_OLD, "rope_scaling": {**_OWN_YARN, "original_max_position_embeddings": GONE},
                           "original_max_position_embeddings": 32}, ""),
    ("Gemma3ForCausalLM", {**_OLD, "rope_scaling": {**_OWN_YARN, "truncate": False}}, "'truncate'"),
    ("Olmo3ForCausalLM", {"rope_parameters": {**_TWO, "full_attention": {**YARN, "truncate": False}}}, "'truncate'"),
    ("Olmo3ForCausalLM", {"rope_parameters": {**_TWO, "full_attention": {
        **YARN, "truncate": None, "rope_theta": 100.0, "original_max_position_embeddings": 128, "beta_fast": 8}}}, ""),
    ("Gemma4ForCausalLM", {"rope_parameters": {**_TWO, "sliding_attention": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}}, "'partial_rotary_factor'"),
    ("PhimoeForCausalLM", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
    ("GlmForCausalLM", {"head_dim": 6}, "'head_dim'"),
    ("GraniteForCausalLM", {"attention_multiplier": 0.0}, "'attention_multiplier'"),
    ("FalconH1ForCausalLM", {"key_multiplier": 0.0}, "'key_multiplier'"),
    ("ArceeForCausalLM", {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
    ("GPTJForCausalLM", {"activation_function": "xielu"}, "activation_function 'xielu'"),
    ("DbrxForCausalLM", {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2,
                                        "moe_normalize_expert_weights": 0.0}}, "'ffn_config.moe_normalize"),
    ("GraniteMoeHybridForCausalLM", {"layers_block_type": ["linear_attention", "full_attention"] * 2}, ""),
    ("FalconForCausalLM", {"n_layer": 9}, "'n_layer' = 9 contradicts"),
    ("JambaForCausalLM", {"num_local_experts": 2}, "'num_local_experts' = 2 contradicts"),
    ("BambaForCausalLM", {"mamba_conv_bias": None}, ""),
    ("NemotronHForCausalLM", {"layer_types": ["full_attention", "moe"], "num_local_experts": 5}, ""),
    ("NemotronHForCausalLM", {"layers_block_type": None, "num_hidden_layers": 9}, ""),
    ("NemotronHForCausalLM", {"layers_block_type": GONE}, ""),
    ("NemotronHForCausalLM", {"layers_block_type": None, "hybrid_override_pattern": "M*-"}, ""),
    ("RecurrentGemmaForCausalLM", {"head_dim": 16}, ""),
    ("Cohere2ForCausalLM", {"head_dim": 16}, ""),
    ("Glm4MoeForCausalLM", {"n_shared_experts": 0}, ""),
    ("Glm4MoeForCausalLM", {"num_experts_per_tok": 6}, "'num_experts_per_tok' = 6"),
    ("GPTNeoXForCausalLM", {"num_key_value_heads": 1}, "'num_key_value_heads'"),
    ("Lfm2ForCausalLM", {"intermediate_size": 1}, "'intermediate_size'"),
    ("CodeGenForCausalLM", {"n_head": 2, "num_attention_heads": GONE}, "'n_head'"),
    ("YoutuForCausalLM", {"head_dim": 2}, "'head_dim' = 2 contradicts 'qk_rope_head_dim'"),
    ("DeepseekV3ForCausalLM", {"head_dim": 2}, "'head_dim' = 2 contradicts 'qk_rope_head_dim'"),
    ("Glm4MoeLiteForCausalLM", {"head_dim": 2}, "'head_dim' = 2 contradicts 'qk_rope_head_dim'"),
    ("DeepseekV2ForCausalLM", {"head_dim": 2}, ""),
    ("MiniCPM3ForCausalLM", {"head_dim": 2}, ""),
    ("SarvamMLAForCausalLM", {"head_dim": 22}, ""),
    ("SarvamMLAForCausalLM", {"q_head_dim": 22}, "'q_head_dim' = 22 contradicts 'qk_nope_head_dim' and"),
    ("DeepseekV3ForCausalLM", {"qk_head_dim": 22}, "'qk_head_dim' = 22 contradicts"),
    ("Qwen3_5MoeForCausalLM", {"norm_topk_prob": None}, ""),
    ("GptOssForCausalLM", {"rope_parameters": None, "rope_scaling": {}}, ""),
    ("ApertusForCausalLM", {"rope_parameters": None, "rope_scaling": {}}, ""),
    ("MambaForCausalLM", {"mixer_rms_eps": 1e-3}, ""),
    ("BambaForCausalLM", {"partial_rotary_factor": None, "rope_parameters": GONE}, ""),
    ("OlmoHybridForCausalLM", {"rope_parameters": None}, ""),
    ("OlmoHybridForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ""),
    ("OlmoHybridForCausalLM", {"rope_parameters": GONE, "rope_theta": 500.0}, ""),
    ("KimiLinearForCausalLM", {"rope_scaling": {**_OWN_YARN, "mscale_all_dim": 1.0}, "rope_theta": 500.0}, ""),
    ("KimiLinearForCausalLM", {"linear_attn_config": GONE, "linear_head_dim": 8, "layer_types": GONE}, ""),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": [1, 2, 4]}}, "full_attn_layers' is missing"),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "'linear_attn_config.gate_lower"),
    ("KimiLinearForCausalLM", {"linear_head_dim": 5}, "'linear_head_dim' = 5 contradicts"),
    ("KimiLinearForCausalLM", {"num_experts_per_tok": 2}, "'num_experts_per_tok' = 2 contradicts"),
    ("KimiLinearForCausalLM", {"mla_use_nope": False}, "'mla_use_nope' = False"),
    ("KimiLinearForCausalLM", {"tie_word_embeddings": True}, "'tie_word_embeddings' = True"),
    ("BailingHybridForCausalLM", {"linear_head_dim": GONE, "head_dim": 8, "rotary_dim": 6}, ""),
    ("BailingHybridForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                      "partial_rotary_factor": 0.5}}, ""),
    ("BailingHybridForCausalLM", {"layer_types": GONE, "layer_group_size": 3}, ""),
    ("BailingHybridForCausalLM", {"mlp_layer_types": GONE}, ""),
    ("BailingHybridForCausalLM", {"expert_swiglu_limit_list": [0, 0, 0, 0], "share_expert_swiglu_limit_list": None,
                                  "moe_shared_expert_intermediate_size": 20, "num_nextn_predict_layers": 0}, ""),
    ("BailingHybridForCausalLM", {"expert_swiglu_limit_list": [0, 0, 0, 7.0]}, "'expert_swiglu_limit_list'"),
    ("BailingHybridForCausalLM", {"moe_shared_expert_intermediate_size": 7}, "'moe_shared_expert_intermediate_size'"),
    ("BailingHybridForCausalLM", {"kda_lower_bound": 1.0}, "'kda_lower_bound'"),
    ("BailingHybridForCausalLM", {"linear_attention": "gla"}, "'linear_attention'"),
    ("BailingHybridForCausalLM", {"tie_word_embeddings": True}, "'tie_word_embeddings' = True"),
    ("MiniMaxForCausalLM", {"attn_type_list": [0, 1]}, "must hold a 0 or 1 for each of 4 layers"),
    ("MiniMaxForCausalLM", {"layernorm_mlp_alpha": 9.0}, "'layernorm_mlp_alpha' = 9.0 contradicts"),
    ("MiniMaxForCausalLM", {"attn_type_list": [0, 0, 0, 0]}, "contradicts 'attn_type_list'"),
    ("MiniMaxForCausalLM", {"postnorm": False}, "'postnorm' = False"),
    ("MiniMaxForCausalLM", {"shared_intermediate_size": 9}, "'shared_intermediate_size' = 9"),
    ("MiniMaxForCausalLM", {"layer_types": GONE, "block_size": 7}, ""),
    ("HYV4ForCausalLM", {"mlp_layer_types": GONE, "indexer_types": GONE, "layer_types": GONE,
                         "num_hidden_layers": 6}, ""),
    ("HYV4ForCausalLM", {"head_dim": 2, "qk_head_dim": GONE}, ""),
    ("HYV4ForCausalLM", {"hc_mult": 2, "hc_magnitude": 0.5, "hc_eps": 0.25, "rms_norm_eps": 0.5}, ""),
    ("HYV4ForCausalLM", {"swiglu_limit": 7.0}, "'swiglu_limit' = 7.0"),
    ("HYV4ForCausalLM", {"learnable_sink_init": 3.0}, ""),
    ("Zamba2ForCausalLM", {"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
                           "attention_head_dim": GONE, "hybrid_layer_ids": GONE, "mamba_headdim": GONE}, ""),
    ("Zamba2ForCausalLM", {"use_long_context": True}, "'use_long_context' = True"),
    ("Zamba2ForCausalLM", {"tie_word_embeddings": False}, "'tie_word_embeddings' = False"),
    ("BloomForCausalLM", {"slow_but_exact": True, "pretraining_tp": 2}, "'slow_but_exact' = True"),
    ("GPTNeoXJapaneseForCausalLM", {"intermediate_multiple_size": 0}, "'intermediate_multiple_size' = 0"),
    ("FalconForCausalLM", {"multi_query": None, "new_decoder_architecture": False, "num_kv_heads": 4}, ""),
]  # fmt: skip
"""(family, what is changed, what the refusal says; "": equal)."""


def _without(said: Any) -> Any:
    return {k: _without(v) for k, v in said.items() if v is not GONE} if isinstance(said, dict) else said


@pytest.mark.parametrize(("architecture", "changes", "why"), TWISTS)
def test_a_twist_that_was_missed_once(architecture, changes, why, tmp_path):
    changes = {key: value if value is GONE else _without(value) for key, value in changes.items()}
    said = verdict(architecture, changes, tmp_path)
    assert why in said and (why == "no reference" or said.startswith("refused:" if why else "equal")), said


SIZES: list[dict[str, Any]] = [
    {"head_dim": 12}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"vocab_size": 61},
    {"intermediate_size": 47}, {"hidden_size": 40}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False},
    {"attention_bias": True}, {"mlp_bias": True}, {"num_attention_heads": 8}, {"max_position_embeddings": 64},
    {"rope_parameters": {**_SHORT, "rope_theta": 1e4, "original_max_position_embeddings": 32}},
    {"rope_parameters": dict(YARN)}, {**_OLD, "rope_scaling": _OWN_YARN},
    {**_OLD, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    {"rms_norm_eps": 0.3}, {"layer_norm_eps": 0.3}, {"layer_norm_epsilon": 0.3}, {"norm_eps": 0.3},
    {"num_experts": 5}, {"num_local_experts": 5}, {"n_routed_experts": 16}, {"num_experts_per_tok": 1},
    {"norm_topk_prob": False}, {"norm_topk_prob": True}, {"moe_intermediate_size": 13}, {"n_shared_experts": 3},
    {"sliding_window": 7}, {"sliding_window": 69}, {"final_logit_softcapping": 1.5}, {"logits_scaling": 3.0},
]  # fmt: skip


def _meant(architecture: str) -> list[dict[str, Any]]:
    """The twists whose keys this family's config has."""
    known = {*base(architecture), "rope_theta", "rope_scaling"}
    return [one for one in SIZES if known.issuperset(one)]


@pytest.mark.parametrize("architecture", architectures())
def test_sizes_and_switches_are_followed_or_refused(architecture, tmp_path):
    """One of them for each family, another one for the next family; all of them in a long run."""
    twists = _meant(architecture)
    chosen = twists if FULL else [twists[architectures().index(architecture) % len(twists)]]
    found = []
    for number, twist in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append((twist, verdict(architecture, twist, folder)))
    assert not [(twist, said) for twist, said in found if said.startswith("WRONG")]
    assert not [(twist, said) for twist, said in found if said.startswith("refused") and not _names(twist, said)]


def _names(twist: dict[str, Any], said: str) -> bool:
    """Does the sentence say which key it is about?"""
    inner = [name for value in twist.values() if isinstance(value, dict) for name in value]
    return any(name in said for name in (*twist, *inner))


def test_heads_too_small_for_an_alpha():
    config = {**base("HunYuanDenseV1ForCausalLM"), "head_dim": 2}
    config["rope_parameters"] = {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 1e4}
    with pytest.raises(ModelError, match="'head_dim' = 2 leaves nothing"):
        hunyuan_rope(ModelConfig(config), 2, "full_attention")
