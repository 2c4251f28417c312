"""Every family of the table against Transformers in float32, each with the twists that real checkpoints have, and the
same bytes however its sequences are computed."""

from __future__ import annotations

import os

import pytest
import torch
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.family_cases import ALL, FAMILIES
from tests.cpu.models.parity import load, ours, theirs

from tokenmill.core.errors import ModelError, UndividedError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.family_of import settled
from tokenmill.parallel.stages import Place

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
STEPS = [[("a", 7)], [("b", 1), ("a", 40)], [("a", 1), ("b", 2)]] + [[("a", 1)]] * 5 + [[("a", 27)]]


def equal(name: str, folder, backend) -> None:
    """Logits within 1e-4 of Transformers', and the same bytes in chunks and in company."""
    case = ALL[name]
    reference, config, tensors = case.make(folder)
    model = load(config, tensors, max_positions=case.longest, kernels=backend)
    prompts = {"a": prompt(80), "b": prompt(3, 2)}
    whole = {k: ours(model, {k: v}, [[(k, len(v))]], backend)[k] for k, v in prompts.items()}
    for key, tokens in prompts.items():
        expected = theirs(reference, tokens)
        assert expected.std() > 0.03
        assert (whole[key] - expected).abs().max() <= 1e-4, key
    for key, logits in ours(model, prompts, STEPS, backend).items():
        assert torch.equal(logits, whole[key]), key


@pytest.mark.parametrize("name", ALL)
def test_same_logits_and_same_bytes(name, backend, tmp_path):
    if type(backend) is ReferenceKernels and not FULL and not name.endswith("-0"):
        pytest.skip("only with TOKENMILL_FAMILIES=1")
    equal(name, tmp_path, backend)


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid"])
def test_a_keyed_delta_rule_under_the_names_of_transformers_modules(family, tmp_path):
    reference, config, tensors = ALL[f"{family}-0"].make(tmp_path)
    named = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert {name for name in tensors if "A_log" in name}.isdisjoint(named)
    one, other = (ours(load(config, found), {"a": prompt(20)}, [[("a", 20)]])["a"] for found in (tensors, named))
    assert torch.equal(one, other)


def test_a_x_k1_as_its_files_are(tmp_path):
    """Experts are chosen without a bias, and dense layers have a norm that nothing reads."""
    reference, config, tensors = ALL["axk1-0"].make(tmp_path)
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith("correction_bias")]:
            reference.get_buffer(name).zero_()
            del tensors[name]
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(32)
    found = ours(load(config, tensors), {"a": prompt(40)}, [[("a", 40)]])["a"]
    assert (found - theirs(reference, prompt(40))).abs().max() <= 1e-4


def test_mimo_v2_flash_as_its_files_say_it(tmp_path):
    _, config, tensors = ALL["mimo_v2_flash-0"].make(tmp_path)
    pattern = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    named = {"hybrid_layer_pattern": pattern, "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-5,
             "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "sliding_window": 19,
             "sliding_window_size": 19, "swa_num_key_value_heads": 4, "swa_v_head_dim": 10,
             "routed_scaling_factor": None}  # fmt: skip
    left = ("layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters")
    published = {**{name: value for name, value in config.items() if name not in left}, **named}
    one, other = (ours(load(each, tensors), {"a": prompt(40)}, [[("a", 40)]])["a"] for each in (config, published))
    assert torch.equal(one, other)


def test_minimax_under_the_keys_of_published_files(tmp_path):
    _, config, tensors = ALL["minimax-0"].make(tmp_path)
    said = {key: value for key, value in config.items() if not key.endswith("_factor") and key != "layer_types"}
    said |= {
        f"layernorm_{part}_{name}": config[f"{own}_{name}_factor"]
        for name in ("alpha", "beta")
        for part, own in (("linear_attention", "linear_attn"), ("full_attention", "full_attn"), ("mlp", "mlp"))
    }
    said |= {"attn_type_list": [1, 0, 1, 0], "postnorm": True, "rotary_dim": 8, "shared_intermediate_size": 0,
             "architectures": ["MiniMaxM1ForCausalLM"], "model_type": "minimax_m1"}  # fmt: skip
    plain = {name: tensor for name, tensor in tensors.items() if "decay" not in name and "slope" not in name}
    given = ((config, tensors), (settled(said), plain), (settled({**said, "rotary_dim": 4}), plain))
    one, other, half = (ours(load(c, t), {"a": prompt(40)}, [[("a", 40)]])["a"] for c, t in given)
    assert len(plain) < len(tensors) and torch.equal(one, other) and not torch.equal(one, half)


def test_every_family_has_three_twists():
    assert all(len(cases) >= 3 for cases in FAMILIES.values())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3n-0", "intermediate_size", [48, 40]),
        ("gemma3n-0", "intermediate_size", [48, 40, 48, -1]),
        ("gemma3n-0", "activation_sparsity_pattern", [0.5]),
        ("gemma3n-0", "activation_sparsity_pattern", [1.0] * 4),
        ("gemma3n-0", "altup_active_idx", 4),
        ("gemma3n-0", "altup_num_inputs", 0),
        ("gemma3n-0", "num_kv_shared_layers", 4),
        ("gemma3n-0", "hidden_activation", "silu"),
        ("cohere2_moe-0", "expert_selection_fn", "noaux"),
        ("cohere2_moe-0", "shared_expert_combination_strategy", "max"),
        ("cohere2_moe-0", "mlp_layer_types", ["dense"]),
        ("cohere2_moe-0", "sliding_window", None),
        ("zamba2-0", "layers_block_type", ["mamba", "attention"]),
        ("zamba2-0", "hybrid_layer_ids", [1]),
        ("zamba2-0", "attention_head_dim", 8),
        ("granite-0", "embedding_multiplier", -(10**400)),
        ("falcon_h1-0", "ssm_multipliers", [1.0, 1.0, float("nan"), 1.0, 1.0]),
        ("falcon_h1-0", "mlp_multipliers", [1.0, 10**400]),
        ("falcon_h1-0", "time_step_limit", [0.0, 10**400]),
        ("glm_moe_dsa-0", "indexer_types", ["shared", "full"]),
        ("glm_moe_dsa-0", "indexer_types", ["full"]),
        ("deepseek_v32-0", "index_head_dim", 4),
        ("laguna-0", "gating", False),
        ("laguna-0", "num_attention_heads_per_layer", [4, 2]),
        ("laguna-0", "num_attention_heads_per_layer", [4, 2, -6, 2]),
        ("mimo_v2_flash-0", "swa_rope_theta", 99.0),
        ("mimo_v2_flash-0", "hybrid_layer_pattern", [0, 1, 2, 1]),
        ("mimo_v2_flash-0", "layer_types", ["chunked_attention"] * 4),
        ("gpt_neo-0", "attention_types", [[["global", []], 2]]),
        ("gpt_neo-0", "attention_types", [[["global"], -(10**400)]]),
    ],
)
def test_hostile_values_are_refused_by_name(name, key, value, tmp_path):
    _, config, tensors = ALL[name].make(tmp_path)
    with pytest.raises(ModelError, match=key):
        load({**config, key: value}, tensors)


@pytest.mark.parametrize("index", [1, 2])
def test_a_layer_that_shares_a_choice_cannot_stand_alone(index, tmp_path):
    _, config, tensors = ALL["glm_moe_dsa-1"].make(tmp_path)
    if index == 1:
        with pytest.raises(UndividedError, match="share the choice of keys"):
            load(config, tensors, place=Place(only=(1, 2)))
    else:
        load(config, tensors, place=Place(only=(2, 4)))
