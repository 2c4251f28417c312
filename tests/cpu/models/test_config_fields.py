"""Every key of every family's config: deleted or changed, the model equals Transformers' or is refused; never wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tests.cpu.models.config_fields_helpers import SMALL, numbers
from tests.cpu.models.families_helpers import LONG, YARN
from tests.cpu.models.parity import load, make, ours, theirs
from transformers.initialization import no_init_weights

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels
from tokenmill.models.config_fields import _HARMLESS, _ONLY, FIELDS, check_fields
from tokenmill.models.registry import architectures

FULL = os.environ.get("TOKENMILL_RELIABILITY") == "1"
KERNELS = make_kernels("cpu")
"""The machine's best ones: the reference takes fifty times as long, and tests/cpu/models compares it everywhere."""
PROMPT = torch.randint(0, 67, (70,), generator=torch.Generator().manual_seed(5)).tolist()


@cache
def base(architecture: str, folder: str) -> tuple[Any, dict, dict]:
    """The family's smallest model: Transformers' own, its config.json, its tensors."""
    case = SMALL[architecture]
    from pathlib import Path

    model, config, tensors = make(copy.deepcopy(case.config), Path(folder), attention=case.attention)
    return model, {**config, "architectures": [architecture], "model_type": FIELDS[architecture].model_type}, tensors


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return lambda architecture: base(architecture, str(tmp_path_factory.getbasetemp() / f"fields-{architecture}"))


def reference(model: Any, config: dict, known: dict[str, Any]) -> torch.Tensor | None:
    """Logits of Transformers with these weights and another config; None where it cannot be built or run.

    What it reads as the same config gives the same logits: `known` has them."""
    try:
        made = type(model.config).from_dict(numbers(config))
        key = repr(sorted(vars(made).items()))
        if key not in known:
            with no_init_weights():
                other = type(model)._from_config(made, attn_implementation=model.config._attn_implementation)
            other.load_state_dict(model.state_dict(), strict=True)
            known[key] = theirs(other.float().eval(), PROMPT)
        return known[key]
    except Exception:
        return None


def verdict(model: Any, tensors: dict, config: dict, known: dict[str, Any]) -> str:
    """equal, refused, WRONG, or what there is no reference for."""
    try:
        built = load(config, tensors, max_positions=len(PROMPT), kernels=KERNELS)
        found = ours(built, {"a": PROMPT}, [[("a", len(PROMPT))]], KERNELS)["a"]
    except ModelError as error:
        return f"refused: {error}"
    expected = reference(model, config, known)
    if expected is None:
        return "no reference"
    near = 1e-4 + 1e-6 * expected.abs().max()  # a logit scale of a hundred widens what the last bit means
    return "equal" if (found - expected).abs().max() <= near else f"WRONG by {(found - expected).abs().max():.2g}"


def keys(config: dict) -> list[str]:
    return [key for key in config if not _HARMLESS.fullmatch(key)]


ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {**YARN},
    {**YARN, "truncate": False},
    {**YARN, "mscale": None, "mscale_all_dim": None, "attention_factor": 1.3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
     "original_max_position_embeddings": 32},
    {**LONG, "original_max_position_embeddings": 64},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    {"rope_theta": 1e4, "factor": 8.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 99.0}},
]  # fmt: skip
SPECIAL: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES[2:10],
    "layer_types": [["full_attention"] * 2, ["full_attention"] * 3, ["sliding_attention"] * 3, ["linear_attention"] * 3,
                    ["chunked_attention", "full_attention", "full_attention"], [], "full_attention",
                    ["full_attention", "sliding_attention", "full_attention"], None],
    "sliding_window": [None, 0, 1, 7, 20, 64, 128, 4096],
    "use_sliding_window": [True, False, None],
    "max_window_layers": [0, 1, 2, 3, None],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu", None],
    "hidden_activation": ["gelu", "silu", "relu", None],
    "activation_function": ["gelu", "gelu_new", "relu", "silu", None],
    "activation": ["gelu", "gelu_fast", "relu", None],
    "partial_rotary_factor": [0.5, 1.0, 0.25],
    "rope_theta": [500.0, 1e6],
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [500],
    "rope_local_base_freq": [500.0],
    "original_max_position_embeddings": [32, 64, 96, 4096],
    "sliding_window_pattern": [1, 2, 3, 6],
    "_sliding_window_pattern": [2, 6],
    "swiglu_limit": [1.0], "swiglu_alpha": [1.0],
    "clip_qkv": [8.0], "logit_scale": [0.5], "attention_multiplier": [0.5], "qk_layernorm": [True],
    "is_causal": [False],
    "lm_head_bias": [True], "mlp_bias": [True], "attention_bias": [True, False], "use_mrope": [True],
    "no_rope_layers": [[0, 1]], "scale_emb": [12], "norm_topk_prob": [True, False], "scoring_func": ["sigmoid"],
    "topk_method": ["greedy", "noaux_tc"], "moe_layer_freq": [2], "num_experts": [3, 6], "head_dim": [None, 4, 16],
    "embedding_multiplier": [2.0], "layernorm_embedding": [True], "cross_attention": [True],
}  # fmt: skip


def other_values(key: str, value: Any) -> list[Any]:
    """Legal values beside this one."""
    if key in SPECIAL:
        found = SPECIAL[key]
    elif isinstance(value, bool):
        found = [not value, None]
    elif isinstance(value, int):
        found = [value + 1, max(1, value // 2), value * 2, None]
    elif isinstance(value, float):
        found = [value * 3, value / 3, None, 1e-2]
    elif value is None:
        found = [1, 2, 0.5, True]
    else:
        found = [None]
    return [one for one in found if one != value or type(one) is not type(value)]


def variants(config: dict, deep: bool) -> Iterator[tuple[str, dict]]:
    """(what was done, config) with one key deleted, and (deep) with each key changed or added."""
    for key in keys(config):
        yield f"no {key}", {k: v for k, v in config.items() if k != key}
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "layer_types")}
    if "rope_parameters" in config:
        yield "old spelling", {**old, "rope_theta": 500.0}
        yield "both spellings", {**config, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    for key in SPECIAL if deep else ():
        for value in other_values(key, config.get(key, ...)):
            yield f"{key}={value!r}", {**config, key: value}
            yield f"old spelling, {key}={value!r}", {**old, key: value}
    for key in keys(config) if deep else ():
        for value in other_values(key, config[key]) if key not in SPECIAL else ():
            yield f"{key}={value!r}", {**config, key: value}


@pytest.mark.parametrize("architecture", FIELDS)
def test_a_deleted_or_changed_key_is_equal_or_refused(architecture, models, caplog):
    caplog.set_level("CRITICAL")
    model, config, tensors = models(architecture)
    known: dict[str, Any] = {}
    assert verdict(model, tensors, config, known) == "equal"
    found = {what: verdict(model, tensors, variant, known) for what, variant in variants(config, deep=FULL)}
    if FULL and (folder := os.environ.get("TOKENMILL_SWEEP")):
        with open(f"{folder}/{architecture}.txt", "w") as file:
            file.writelines(f"{what}: {said}\n" for what, said in found.items())
    assert [(what, said) for what, said in found.items() if said.startswith("WRONG")] == []
    equal = sum(said == "equal" for said in found.values())
    refused = sum(said.startswith("refused") for said in found.values())
    assert equal >= 3 and refused >= 3


def test_every_architecture_has_its_fields():
    assert sorted(FIELDS) == architectures() and sorted(SMALL) == architectures()


@pytest.mark.parametrize("architecture", FIELDS)
def test_defaults_are_those_of_transformers(architecture):
    row, kind = FIELDS[architecture], type(SMALL[architecture].config)
    aliases = {own: other for other, own in getattr(kind, "attribute_map", {}).items()}
    for key in kind().to_dict():
        known = row.knows(key) or key in row.only or key in _ONLY or _HARMLESS.fullmatch(key)
        assert known or aliases.get(key) in row.needed, f"{key} is on no list"
    for key, value in row.defaults.items():
        if value is not None and hasattr(kind, key) and key not in ("rope_theta", "rope_parameters"):
            assert getattr(kind, key) == value, key
    theta = getattr(kind, "rope_theta", getattr(kind, "default_theta", None))
    if isinstance(theta, float) and "rope_theta" in row.defaults:
        assert (row.defaults["rope_theta"] or 10000.0) == theta


def test_keys_that_nobody_knows_are_named_and_harmless_ones_are_not(models, caplog):
    _, config, tensors = models("LlamaForCausalLM")
    harmless = {"unsloth_fixed": True, "attention_probs_dropout_prob": 0.1, "use_cache": False, "bos_token_id": 7}
    harmless |= {"torch_dtype": "float16", "_flash_attn_2_enabled": True, "max_length": 20}
    load({**config, **harmless}, tensors)
    assert not caplog.messages
    load({**config, "some_new_switch": {"a": [1]}, "qk_layernorm": False}, tensors)
    assert len(caplog.messages) == 1 and "'some_new_switch', 'qk_layernorm': not known" in caplog.messages[0]


CHANGES = {
    "clip_qkv": 8.0, "qk_layernorm": True, "use_qk_norm": True, "logits_scaling": 8.0, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2, "attention_multiplier": 0.1, "scale_emb": 12, "scale_depth": 1.4, "logit_scale": 0.06,
    "no_rope_layers": [1], "rope_interleaved": True, "alibi_bias_max": 8, "sliding_window_size": 64, "rotary_dim": 4,
    "final_logit_soft_cap": 30.0, "attention_sinks": True, "attention_chunk_size": 64,
    "is_causal": False, "use_bidirectional_attention": True, "mrope_section": [1, 2], "input_layernorm": True,
}  # fmt: skip


OTHERS = {
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu", "num_experts": 8, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "kv_lora_rank": 512, "hidden_size_per_layer_input": 8, "scoring_func": "sigmoid",
    "moe_intermediate_size": 64, "first_k_dense_replace": 3, "num_kv_shared_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_what_another_family_reads_is_refused_unless_it_says_nothing_new(architecture):
    config = {"architectures": [architecture], "max_position_embeddings": 64, "num_attention_heads": 4,
              "hidden_size": 32, "hidden_act": "gelu_new"}  # fmt: skip
    same = {"hidden_activation": "gelu_new", "num_heads": 4, "num_experts": 1, "n_inner": 128, "n_group": 1,
            "query_pre_attn_scalar": None, "layer_norm_epsilon": 1e-3, "max_seq_len": 99}  # fmt: skip
    for name, value in same.items():
        check_fields({**config, name: value}, architecture)
    for name, value in OTHERS.items():
        with pytest.raises(ModelError, match=f"'{name}'.*--hf-overrides"):
            check_fields({**config, name: value}, architecture)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_names_that_change_other_families_are_refused_unless_they_are_off(architecture):
    config = {"architectures": [architecture], "max_position_embeddings": 64}
    for name, value in CHANGES.items():
        with pytest.raises(ModelError, match=f"'{name}'"):
            check_fields({**config, name: value}, architecture)
        if name not in ("is_causal",):
            check_fields({**config, name: False}, architecture)
            check_fields({**config, name: None}, architecture)


def test_an_architecture_and_another_ones_model_type_contradict():
    for kind in ("mistral", "qwen2", "gemma3_text"):
        with pytest.raises(ModelError, match="contradict"):
            check_fields({"model_type": kind}, "LlamaForCausalLM")
    assert check_fields({"model_type": "something_else"}, "LlamaForCausalLM") == []


def test_a_null_that_transformers_takes_for_false_is_refused():
    for value in (None, False):
        with pytest.raises(ModelError, match="'is_causal'"):
            check_fields({"is_causal": value}, "LlamaForCausalLM")


@pytest.mark.parametrize(
    "kinds", [["full_attention", "sliding_attention"] * 2, ["full_attention"] * 4], ids=["swapped", "full"]
)
def test_heads_that_do_not_fit_the_keys_they_borrow_are_refused(kinds, models):
    _, config, tensors = models("Gemma4ForCausalLM")
    with pytest.raises(ModelError, match=r"'per_layer_config'.* gives layer [23] other heads than layer"):
        load({**config, "layer_types": kinds}, tensors, max_positions=16, kernels=KERNELS)


@pytest.mark.parametrize("architecture", ["MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"])
def test_heads_of_attention_say_nothing_where_there_is_none(architecture, models):
    model, config, tensors = models(architecture)
    for heads in (None, 7):
        said = {**config, "num_attention_heads": heads, "num_key_value_heads": heads and 3}
        assert verdict(model, tensors, said, {}) == "equal"


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_second_count_of_experts_adds_nothing_or_is_refused(name):
    check_fields({"n_routed_experts": 8, name: 8}, "DeepseekV2ForCausalLM")
    with pytest.raises(ModelError, match=f"'{name}'"):
        check_fields({"n_routed_experts": 8, name: 9}, "DeepseekV2ForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [("GPTNeoForCausalLM", "attention_layers", ["local", "global"]), ("XGLMForCausalLM", "pad_token_id", 3)],
)
def test_keys_that_change_one_family_alone_are_refused_there(architecture, name, value, models):
    _, config, tensors = models(architecture)
    load({**config, name: None}, tensors, max_positions=16, kernels=KERNELS)
    with pytest.raises(ModelError, match=f"'{name}'"):
        load({**config, name: value}, tensors, max_positions=16, kernels=KERNELS)
