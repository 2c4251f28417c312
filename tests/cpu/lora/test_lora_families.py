"""Adapters against PEFT in float32, on tiny models of many families: logits within 1e-4.

By default families whose matrices lie in different ways; TOKENMILL_FAMILIES=1 runs every family of the table."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import ALL, FIRST
from parity import load, theirs
from torch import nn

from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.lora.sites import Sites
from tokenmill.lora.store import Store

pytest.importorskip("peft")
FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
WITHIN = 1e-4
ABSORBED = ("kv_b_proj",)
"""Matrices that are taken into others when a model is loaded."""
SOME = (
    "Phi3",
    "Bloom",
    "Gemma3",
    "Qwen3Moe",
    "GPTBigCode",
    "DeepseekV3",
    "Olmo2",
    "Glm4",
    "Mpt",
    "CodeGen",
    "Ernie4_5_Moe",
)
"""Fused in several ways, of one head, with norms within, tied, with shared experts, with absorbed matrices."""


def grown(reference: Any, folder: Path, **said: Any) -> Any:
    """The Transformers model with a random adapter of PEFT's, which is saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():  # of patterns that PEFT itself adds for mixtures
        warnings.simplefilter("ignore")
        made = get_peft_model(reference, LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **said}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    return made.eval()


def ours_with(config: dict, tensors: dict, folder: Path, tokens: list[int], kernels: Any, longest: int | None) -> Any:
    """Our logits [T, vocab] with the adapter in slot 2, and without one."""
    from paged_batch import PagedBatch

    sites = Sites(2, 16, torch.float32, torch.device("cpu"))
    model = load(config, tensors, kernels=kernels, max_positions=longest, adapters=sites)
    sites.allocate()
    store = Store(sites, kernels)
    store.command({"op": "read", "id": 7, "path": str(folder)})
    state = store.command({"op": "state", "ids": [7], "wait": True})
    if state["failed"]:
        raise ModelError(state["failed"][7])
    store.load([(2, 7)])
    found = []
    for slot in (2, 0):
        batch = PagedBatch(model.spec.kv_specs, kernels, states=model.spec.states)
        context = batch.step([("a", len(tokens))])
        assert context.rows is not None
        slots = torch.full((4,), slot, dtype=torch.int32)
        context = dataclasses.replace(context, rows=dataclasses.replace(context.rows, adapters=slots))
        found.append(model.logits(model.forward(torch.tensor(tokens), context), context).float())
    return found


def linear_names(model: nn.Module) -> list[str]:
    """All matrices but the head and those that are absorbed."""
    from transformers.pytorch_utils import Conv1D

    names = (name for name, part in model.named_modules() if type(part) in (nn.Linear, Conv1D))
    left_out = {"lm_head", "embed_out", "output_layer", *ABSORBED}
    return sorted(name for name in names if name.rpartition(".")[2] not in left_out)


@pytest.mark.parametrize("name", [name for name in FIRST if FULL or name.removesuffix("ForCausalLM") in SOME])
def test_every_matrix_of_a_family(name: str, tmp_path: Path) -> None:
    case = ALL[name] if name in ALL else FIRST[name]
    reference, config, tensors = case.make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    wrapped = grown(reference, tmp_path / "adapter", target_modules=linear_names(reference))
    expected = theirs(wrapped, tokens)
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
    assert (expected - plain).abs().max() > 0.01
    assert (found - expected).abs().max() <= WITHIN
    assert (without - plain).abs().max() <= WITHIN


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
def test_experts_that_are_one_parameter(name: str, native: bool, tmp_path: Path) -> None:
    """PEFT's target_parameters: a stack of experts, before the activation and before the gates."""
    reference, config, tensors = FIRST[name].make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    said = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["q_proj"]}
    wrapped = grown(reference, tmp_path / "adapter", **said, rank_pattern={r".*down_proj": 3})
    expected = theirs(wrapped, tokens)
    kernels: Any = ReferenceKernels()
    if native:
        pytest.importorskip("tokenmill._native", reason="the native kernels were not built")
        from tokenmill.kernels.cpu import CpuKernels

        kernels = CpuKernels()
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, kernels, FIRST[name].longest)
    assert (expected - plain).abs().max() > 0.01
    assert (found - expected).abs().max() <= WITHIN
    assert (without - plain).abs().max() <= WITHIN
