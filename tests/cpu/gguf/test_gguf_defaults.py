"""Metadata that a file leaves out, or spells in an older way, means what the format's usual reader takes it for."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.checkpoint.gguf_config import read_config
from tokenmill.checkpoint.gguf_file import TYPES, TensorInfo
from tokenmill.core.errors import ModelError

LAYERS = 6
TENSORS = {"token_embd.weight": TensorInfo("token_embd.weight", TYPES[0], (64, 32), 0, 64 * 32 * 4)}
SIZES = {"block_count": LAYERS, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
         "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip


def read(arch: str, said: dict[str, Any], factors: dict[str, list[float]] | None = None, **also: Any) -> dict[str, Any]:
    """also: whole names, without the architecture's."""
    keys = {f"{arch}.{name}": value for name, value in {**SIZES, **said}.items() if value is not None}
    return read_config({"general.architecture": arch, **keys, **also}, TENSORS, (factors or {}).get, "m.gguf")


@pytest.mark.parametrize(
    ("said", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ({"rope.scaling.yarn_ext_factor": -1.0}, None),
    ],
)  # fmt: skip
def test_scaling_of_the_rotation(said: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert read("llama", said).get("rope_scaling") == scaling


def test_a_factor_of_cos_and_sin_is_applied_or_refused() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}
    assert read("llama", yarn)["rope_scaling"]["attention_factor"] == pytest.approx(1.5 * 1.13863, abs=1e-4)
    stored = read("llama", {"rope.scaling.attn_factor": 1.5}, {"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]})
    assert stored["rope_scaling"]["attention_factor"] == 1.5
    for arch, more in (("llama", {}), ("qwen2moe", {"expert_count": 4, "expert_used_count": 2})):
        with pytest.raises(ModelError, match=r"attn_factor is not supported"):
            read(arch, {"rope.scaling.attn_factor": 1.5, "attention.head_count_kv": 4, **more})


def test_stored_divisors_are_stretched_by_a_linear_factor() -> None:
    factors = {"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]}
    found = read("llama", {"rope.scaling.factor": 2.0}, factors)["rope_scaling"]
    assert found["long_factor"] == found["short_factor"] == [2.0, 4.0, 8.0, 16.0]
    with pytest.raises(ModelError, match=r"'yarn' is not supported beside rope_freqs"):
        read("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, factors)
    both = {"rope_factors_long.weight": [1.0, 2.0, 4.0, 8.0], "rope_factors_short.weight": [1.0, 1.0, 1.0, 2.0]}
    latent = {"rope.dimension_count": 8, "attention.key_length": 12, "attention.kv_lora_rank": 4,
              "attention.q_lora_rank": 4}  # fmt: skip
    for arch, more in (("phi3", {}), ("minicpm3", latent)):
        for kind, times in ((None, 2.0), ("longrope", 2.0), ("none", 1.0)):
            said = {**more, "rope.scaling.factor": 2.0, "rope.scaling.type": kind}
            found = read(arch, said, both)["rope_scaling"]
            assert found["long_factor"] == [times * one for one in both["rope_factors_long.weight"]]
            assert found["short_factor"] == [times * one for one in both["rope_factors_short.weight"]]
        with pytest.raises(ModelError, match=r"'yarn' is not supported beside rope_factors_long"):
            read(arch, {**more, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, both)


@pytest.mark.parametrize("key", ["yarn_ext_factor", "yarn_attn_factor", "alpha", "yarn_log_multiplier"])
def test_keys_of_the_scaling_that_are_not_read_are_refused(key: str) -> None:
    with pytest.raises(ModelError, match=rf"llama\.rope\.scaling\.{key} is not supported"):
        read("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, f"rope.scaling.{key}": 0.5})


def test_all_of_yarns_ramp_counts_and_none_without_yarn() -> None:
    for kind, usual, other in (("yarn", 1.0, 0.0), ("linear", 0.0, 1.0)):
        said = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0}
        read("llama", {**said, "rope.scaling.yarn_ext_factor": usual})
        with pytest.raises(ModelError, match=r"yarn_ext_factor is not supported"):
            read("llama", {**said, "rope.scaling.yarn_ext_factor": other})


def test_a_file_without_scaling_has_none_whatever_the_familys_config_means_without_it() -> None:
    """GptOssConfig and ApertusConfig stretch where config.json is silent."""
    xielu: dict[str, Any] = {f"xielu.{name}": 0.5 for name in ("alpha_p", "alpha_n", "beta", "eps")}
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("gpt-oss", {"attention.sliding_window": 16, **MORE["gpt-oss"]}, {}), ("apertus", {}, xielu))  # fmt: skip
    for arch, more, also in cases:
        found = read(arch, {**more, "rope.freq_base": 500.0}, **also)
        assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
        assert "rope_scaling" not in found


def test_mistral3_keeps_its_gain_without_temperatures() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.5}
    found = read("mistral3", yarn)
    assert found["architectures"] == ["MistralForCausalLM"]
    assert (found["rope_scaling"]["mscale"], found["rope_scaling"]["mscale_all_dim"]) == (1.0, 0.5)


@pytest.mark.parametrize(("arch", "name"), [("dots1", "routed_scaling_factor"), ("lfm2moe", "routed_scaling_factor"),
                                            ("afmoe", "route_scale")])  # fmt: skip
def test_gates_scaled_by_zero_are_not_scaled(arch: str, name: str) -> None:
    more = {**QWEN, "attention.head_count_kv": 4, "shortconv.l_cache": 3}
    more |= {"attention.sliding_window": 16} if arch == "afmoe" else {}
    for said, factor in ((None, 1.0), (0.0, 1.0), (2.5, 2.5)):
        assert read(arch, {**more, "expert_weights_scale": said})[name] == factor


@pytest.mark.parametrize("arch", ["bitnet", "gemma3n", "gemma4", "llama4", "qwen3next"])
def test_a_scaling_that_is_not_built_is_refused(arch: str) -> None:
    more = {"attention.head_count_kv": 4, "activation_sparsity_scale": [0.0] * LAYERS, **QWEN, **STATES}
    with pytest.raises(ModelError, match=f"rope scaling is not supported in {arch}"):
        read(arch, {**more, "rope.scaling.factor": 4.0})


def test_every_token_has_a_row() -> None:
    """Rows without a token are padding, as in model folders."""
    words: dict[str, Any] = {"tokenizer.ggml.tokens": [str(i) for i in range(60)]}
    assert read("llama", {}, **words)["vocab_size"] == 64
    words["tokenizer.ggml.tokens"] += [str(i) for i in range(60, 65)]
    with pytest.raises(ModelError, match=r"65 tokens and token_embd\.weight only 64 rows"):
        read("llama", {}, **words)


def test_the_size_of_a_vocabulary_counts_where_there_are_no_tokens() -> None:
    words: dict[str, Any] = {"tokenizer.ggml.tokens": [str(i) for i in range(64)]}
    assert read("llama", {"vocab_size": 99}, **words)["vocab_size"] == 64
    assert read("llama", {"vocab_size": 64})["vocab_size"] == 64
    with pytest.raises(ModelError, match=r"vocab_size is 99, and token_embd\.weight has 64 rows"):
        read("llama", {"vocab_size": 99})


def test_granite_rotates_unless_the_file_says_otherwise_and_factors_of_zero_are_none() -> None:
    found = read("granite", {"embedding_scale": 0.0, "residual_scale": 0.5})
    assert (found["embedding_multiplier"], found["residual_multiplier"], found["logits_scaling"]) == (1.0, 0.5, 1.0)
    assert found["attention_multiplier"] == 8**-0.5
    with pytest.raises(ModelError, match="granite without rotation"):
        read("granite", {"rope.scaling.finetuned": False})


WINDOWED = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4, "olmo2": 4, "gpt-oss": 2}
MORE: dict[str, dict[str, Any]] = {"cohere2": {"logit_scale": 0.5, "attention.layer_norm_epsilon": 1e-5},
        "gpt-oss": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}}  # fmt: skip


@pytest.mark.parametrize("arch", sorted(WINDOWED))
def test_windows_are_a_period_or_a_list(arch: str) -> None:
    """The period says how many layers there are up to and with one without a window; 0: all have one."""
    base = {"attention.sliding_window": 16, **MORE.get(arch, {})}
    listed = [True, False, False, True, True, False]
    for said, windows in (
        (None, [(i + 1) % WINDOWED[arch] != 0 for i in range(LAYERS)]),
        (3, [True, True, False] * 2),
        (0, [True] * LAYERS),
        (listed, listed),
    ):
        found = read(arch, {**base, "attention.sliding_window_pattern": said})
        assert found["layer_types"] == ["sliding_attention" if one else "full_attention" for one in windows], said
    with pytest.raises(ModelError, match="must have an entry for each of 6 layers"):
        read(arch, {**base, "attention.sliding_window_pattern": [True]})


def test_gemma_3_caps_its_logits_if_the_file_says_so() -> None:
    assert read("gemma3", {})["final_logit_softcapping"] is None
    assert read("gemma3", {"final_logit_softcapping": 20.0})["final_logit_softcapping"] == 20.0


@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3"])
def test_no_more_than_a_head_rotates(arch: str) -> None:
    with pytest.raises(ModelError, match=rf"{arch}\.rope\.dimension_count must be a whole number from 1 to 8, not 10"):
        read(arch, {"rope.dimension_count": 10})


STATES = {"ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.time_step_rank": 2, "ssm.state_size": 8,
          "ssm.inner_size": 16, "attention.head_count_kv": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("glm4", {}),
        ("nemotron", {"attention.layer_norm_epsilon": 1e-5}),
        ("qwen35", STATES),
        ("qwen3next", {**STATES, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48,
                       "expert_shared_feed_forward_length": 48}),
        ("glm4moe", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48,
                     "attention.head_count_kv": 4}),
        ("gptneox", {"attention.layer_norm_epsilon": 1e-5}),
    ],
)  # fmt: skip
def test_the_whole_head_rotates_unless_the_file_says_how_much(arch: str, more: dict[str, Any]) -> None:
    """Config files of these families mean a part where they are silent."""
    for said, share in ((None, 1.0), (8, 1.0), (4, 0.5)):
        found = read(arch, {**more, "rope.dimension_count": said})
        key = "rotary_pct" if arch == "gptneox" else "partial_rotary_factor"
        assert found[key] == (share if share == 1.0 else pytest.approx(share, abs=1e-6))


QWEN = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}


@pytest.mark.parametrize(
    ("arch", "key", "changes", "means_nothing"),
    [
        ("qwen3", "attention.causal", False, True),
        ("llama", "final_logit_softcapping", 30.0, 0.0),
        ("llama", "attn_logit_softcapping", [0.0, 50.0], [0.0, 0.0]),
        ("qwen2", "logit_scale", 0.5, 1.0),
        ("qwen2", "attention.sliding_window", 32, 64),
        ("qwen3moe", "expert_gating_func", 2, 1),
        ("qwen3moe", "expert_weights_norm", False, True),
        ("qwen3moe", "expert_weights_scale", 2.5, 1.0),
        ("qwen3moe", "expert_group_count", 2, 1),
        ("gpt-oss", "expert_gating_func", 1, 3),
        ("gpt-oss", "rope.freq_base_swa", 10000.0, 150000.0),
        ("granitemoe", "rope.dimension_count", 4, 8),
        ("granitemoe", "embedding_length_out", None, 99),
        ("qwen2vl", "rope.dimension_sections", [1, 1, 1, 1], [2, 1, 1, 0]),
    ],
)
def test_what_an_architecture_does_not_read_is_refused_unless_it_asks_for_nothing(
    arch: str, key: str, changes: Any, means_nothing: Any
) -> None:
    more: dict[str, Any] = {"attention.head_count_kv": 4}
    more |= QWEN if arch in ("qwen3moe", "gpt-oss", "granitemoe") else {}
    more |= {"attention.sliding_window": 16, "rope.freq_base": 150000.0} if arch == "gpt-oss" else {}
    assert read(arch, {**more, key: means_nothing}) == read(arch, more)
    if changes is not None:
        with pytest.raises(ModelError, match=rf"{arch}\.{key} = .* changes what a model computes"):
            read(arch, {**more, key: changes})
