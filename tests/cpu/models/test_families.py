"""Every family against Transformers in float32, and the same bytes however its sequences are computed."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.models.families_helpers import CASES, LONG, YARN, prompt
from tests.cpu.models.parity import load, make, ours, theirs


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
