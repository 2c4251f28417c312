"""Hy4: what its tensors are called, experts whose numbers reach their limits, and where it is refused."""

from __future__ import annotations

import re

import pytest
import torch
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load, ours, theirs

from tokenmill.core.errors import ModelError, UndividedError
from tokenmill.parallel.stages import Place
from tokenmill.quant.dense import DenseWeight

PUBLISHED = (
    (r"\.hc_pre\.hc_(attn|mlp)_layer\.hc_", r".hc_\1_layer.hc_pre.hc_"),
    (r"\.hc_pre\.hc_head\.", ".hc_head."),
    (r"\.mlp\.(shared_experts\.)?linear_gate", r".mlp.\1gate_proj"),
)
"""What Transformers saves -> what it reads as published files' names."""


def renamed(tensors, rules):
    found = {}
    for name, tensor in tensors.items():
        for pattern, to in rules:
            name = re.sub(pattern, to, name)
        found[name] = tensor
    return found


def answer(config, tensors, backend):
    return ours(load(config, tensors, kernels=backend), {"a": prompt(40)}, [[("a", 40)]], backend)["a"]


def test_names_of_published_files_and_of_transformers_modules(backend, tmp_path):
    reference, config, tensors = ALL["hy_v4-0"].make(tmp_path)
    modules = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    published = {**renamed(tensors, PUBLISHED), "model.mtp_layers.0.eh_proj.weight": torch.ones(32, 64)}
    assert all(".hc_pre." in name for name in published if "hc_attn" in name) and "model.hc_head.hc_fn" in modules
    one, *others = (answer(config, found, backend) for found in (tensors, modules, published))
    assert all(torch.equal(one, other) for other in others)


def test_experts_are_clipped(backend, tmp_path):
    """Gates above and inputs beyond the limit on both sides, in the routed experts alone."""
    reference, config, tensors = ALL["hy_v4-0"].make(tmp_path)
    grown = [name for name in tensors if name.endswith("experts.gate_up_proj")]
    one = answer(config, tensors, backend)
    with torch.no_grad():
        for name in grown:
            tensors[name] = tensors[name] * 40
            reference.get_parameter(name).copy_(tensors[name])
    expected, found = theirs(reference, prompt(40)), answer(config, tensors, backend)
    assert (found - expected).abs().max() <= 1e-4 and (found - one).abs().max() > 0.1
    reference.model.layers[1].mlp.experts.swiglu_limit = 1e9
    assert (theirs(reference, prompt(40)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("key", "value"),
    [("swiglu_limit", 7.0), ("swiglu_limit", 0.0), ("swiglu_limit", -1.0), ("rope_interleave", True),
     ("indexer_rope_interleave", True), ("indexer_types", ["shared", "full"]), ("hc_mult", 0), ("hc_mult", 3),
     ("mlp_layer_types", ["dense"]), ("layer_types", ["full_attention", "linear_attention"]),
     ("scoring_func", "softmax"), ("first_k_dense_replace", 0), ("index_head_dim", 4),
     ("index_topk_freq", 2), ("n_group", 3)],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(key, value, tmp_path):
    _, config, tensors = ALL["hy_v4-0"].make(tmp_path)
    with pytest.raises(ModelError, match="hc_fn" if value == 3 and key == "hc_mult" else key):
        load({**config, key: value}, tensors)


def test_streams_do_not_leave_a_process(tmp_path):
    _, config, tensors = ALL["hy_v4-1"].make(tmp_path)
    for place in (Place(only=(1, 2)), Place(stage=0, stages=2)):
        with pytest.raises(UndividedError, match="Hy4"):
            load(config, tensors, place=place)


def test_factors_are_never_quantised(tmp_path):
    _, config, tensors = ALL["hy_v4-0"].make(tmp_path)
    model = load(config, tensors, quantization="int8")
    for layer in model.layers:
        for hyper, _, _ in layer.around:
            assert isinstance(hyper.factors.weight, DenseWeight) and hyper.factors.weight.dtype == torch.float32
