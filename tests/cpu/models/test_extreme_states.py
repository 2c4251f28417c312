"""Layers with states, with gates and paces as far open or shut as they go: equal to Transformers, however a text is
cut."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.cpu.models.config_fields_helpers import SMALL
from tests.cpu.models.parity import load, make, ours, theirs

PROMPT = torch.randint(0, 60, (80,), generator=torch.Generator().manual_seed(5)).tolist()
EXTREMES = {
    "RecurrentGemmaForCausalLM": {"recurrent_gate_bias": (-200.0, -90.0, 60.0), "recurrent_param": (-60.0, 30.0)},
    "MambaForCausalLM": {"dt_proj.bias": (-90.0, 40.0), "A_log": (-30.0, 80.0)},
    "Mamba2ForCausalLM": {"dt_bias": (-90.0, 40.0), "A_log": (-30.0, 80.0)},
    "Qwen3NextForCausalLM": {"dt_bias": (-90.0, 40.0), "A_log": (-30.0, 80.0)},
    "KimiLinearForCausalLM": {"dt_bias": (-90.0, 40.0), "A_log": (-30.0, 80.0)},
    "BailingHybridForCausalLM": {"dt_bias": (-90.0, 40.0), "A_log": (-30.0, 80.0)},
}


def _renamed(name: str, parts: dict[str, str]) -> str:
    for theirs_of, stored in parts.items():
        name = name.replace(theirs_of, stored)
    return name


@pytest.mark.parametrize("architecture", EXTREMES)
def test_gates_and_paces_at_their_ends(architecture, backend, tmp_path: Path):
    case = SMALL[architecture]
    model, config, tensors = make(copy.deepcopy(case.config), tmp_path, attention=case.attention)
    state = model.state_dict()
    for ending, values in EXTREMES[architecture].items():
        names = [name for name in state if name.endswith(ending)]
        kept = {name: state[name].clone() for name in names}
        ours_of = {"forget_gate.": ""} | ({".self_attn.": ".attention."} if "Bailing" in architecture else {})
        stored = {name: _renamed(name, ours_of) for name in names}
        assert names and set(stored.values()) <= tensors.keys()
        for value in values:
            for name in names:
                state[name].fill_(value)
            expected = theirs(model, PROMPT)
            changed = {**tensors, **{stored[name]: state[name].clone() for name in names}}
            built = load({**config, "max_position_embeddings": 128}, changed, kernels=backend)
            for cut in ([80], [1, 1, 63, 15]):
                found = ours(built, {"a": PROMPT}, [[("a", count)] for count in cut], backend)["a"]
                assert (found - expected).abs().max() <= 5e-4 * expected.abs().max(), (ending, value, cut)
        for name, tensor in kept.items():
            state[name].copy_(tensor)
