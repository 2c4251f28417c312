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
from safetensors.torch import load_file
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.family_cases import ALL, FIRST
from tests.cpu.models.open_helpers import Opened
from tests.cpu.models.parity import load, theirs
from tests.cpu.models.text_part_cases import make as make_seeing
from torch import nn

from tokenmill.core.config import make_config
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.lora.merge import merge
from tokenmill.lora.sites import Sites
from tokenmill.lora.store import LoraStore
from tokenmill.measure.adapter_fit import Found, find_fit
from tokenmill.models.registry import read

pytest.importorskip("peft")
FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
WITHIN = 1e-4
SMALL = ("correction_coefs", "prediction_coefs", "modality_router")
"""Matrices of Gemma 3n that adapters cannot change here."""
PASSED_BY = {"out_proj", "dt_proj"}
"""Of recurrent layers: PEFT refuses the first, and Transformers reads the second's weight without its adapter."""
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
    "Exaone",
    "SarvamMoE",
)
"""Fused in several ways, or in the file alone, of one head, with norms within, tied, with shared experts, with absorbed
matrices."""


def grown(reference: Any, folder: Path, **said: Any) -> Any:
    """The Transformers model with a random adapter of PEFT's, which is saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():  # PEFT's own, of patterns for mixtures and of embeddings
        warnings.simplefilter("ignore")
        made = get_peft_model(reference, LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **said}))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "magnitude" in name:
                    parameter.copy_(torch.rand_like(parameter) * 0.5 + 0.5)
                elif parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(folder)
    return made.eval()


def ours_with(config: dict, tensors: dict, folder: Path, tokens: list[int], kernels: Any, longest: int | None) -> Any:
    """Our logits [T, vocab] with the adapter in slot 2, and without one."""
    from tests.cpu.kernels.paged_batch import PagedBatch

    sites = Sites(2, 16, torch.float32, torch.device("cpu"), config)
    model = load(config, tensors, kernels=kernels, max_positions=longest, adapters=sites)
    sites.allocate()
    store = LoraStore(sites, kernels)
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
        slots = torch.full((len(tokens),), slot, dtype=torch.int32)
        context = dataclasses.replace(context, rows=dataclasses.replace(context.rows, adapters=slots))
        found.append(model.logits(model.forward(torch.tensor(tokens), context), context).float())
    return found


def check(found: Any, without: Any, expected: Any, plain: Any) -> None:
    """With the adapter our logits are PEFT's, and without it those of the base."""
    assert (expected - plain).abs().max() > 0.01
    assert (found - expected).abs().max() <= WITHIN
    assert (without - plain).abs().max() <= WITHIN


def compare(case: Any, tmp_path: Path, **said: Any) -> None:
    """Our logits are PEFT's."""
    reference, config, tensors = case.make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    expected = theirs(grown(reference, tmp_path / "adapter", **said), tokens)
    assert find_fit(make_config(model=str(tmp_path / "base"), enable_lora=True), tmp_path / "adapter") == Found()
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
    check(found, without, expected, plain)


def linear_names(model: nn.Module) -> list[str]:
    """All matrices but the head."""
    from transformers.pytorch_utils import Conv1D

    names = (name for name, part in model.named_modules() if type(part) in (nn.Linear, Conv1D))
    left_out = {"lm_head", "embed_out", "output_layer", *SMALL}
    if any(name.endswith("A_log") for name, _ in model.named_parameters()):
        left_out |= PASSED_BY
    names = (name for name in names if "shared_transformer" not in name)  # one visit's would be for all
    return sorted(name for name in names if name.rpartition(".")[2] not in left_out)


@pytest.mark.parametrize("name", [name for name in FIRST if FULL or name.removesuffix("ForCausalLM") in SOME])
def test_every_matrix_of_a_family(name: str, tmp_path: Path) -> None:
    case = ALL[name] if name in ALL else FIRST[name]
    reference, config, tensors = case.make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    wrapped = grown(reference, tmp_path / "adapter", target_modules=linear_names(reference))
    expected = theirs(wrapped, tokens)
    assert find_fit(make_config(model=str(tmp_path / "base"), enable_lora=True), tmp_path / "adapter") == Found()
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
    check(found, without, expected, plain)


@pytest.mark.parametrize("name", ["Phi3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_adapters_add_is_one_more_part_of_a_sum(name: str, tmp_path: Path) -> None:
    """Where a backend leaves sums in parts."""
    case, kernels = ALL[name] if name in ALL else FIRST[name], Opened()
    reference, config, tensors = case.make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    expected = theirs(grown(reference, tmp_path / "adapter", target_modules=linear_names(reference)), tokens)
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, kernels, case.longest)
    check(found, without, expected, plain)
    assert kernels.opened > 0 and kernels.added > 0


CHOSEN = "trainable_token_indices"
SAID: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": ("qwen2", {
        "target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 20, "up_proj": 3},
    }),
    "DoRA": ("qwen2", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": "lora_only"}),
    "biases of lora_B": ("qwen2", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True,
                                   "init_lora_weights": True}),
    "biases behind multipliers": ("FalconH1ForCausalLM", {"target_modules": ["q_proj", "v_proj", "o_proj", "in_proj"],
                                                          "lora_bias": True, "init_lora_weights": True}),
    "some layers": ("qwen2", {"target_modules": "all-linear", "exclude_modules": ["o_proj"], "bias": "all"}),
    "a pattern": ("qwen2", {"target_modules": r".*\.1\..*\.(q|v)_proj", "init_lora_weights": "gaussian"}),
    "saved embeddings": ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "a tied pair": ("gemma2", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "DoRA of embeddings": ("gemma2", {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True}),
    "tokens": ("qwen2", {"target_modules": ["q_proj"], CHOSEN: [10, 3, 24]}),
    "tokens of a tied pair": ("gemma2", {"target_modules": ["q_proj"], CHOSEN: {"embed_tokens": [10, 3]}}),
    "tokens of a head": ("qwen2", {"target_modules": ["q_proj"], CHOSEN: {"lm_head": [10], "embed_tokens": [3, 7]}}),
    "tokens of both of a pair": ("gemma2", {"target_modules": ["q_proj"],
                                            CHOSEN: {"lm_head": [10], "embed_tokens": [3]}}),
    "flipped": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "a head by its newer name": ("gpt-neox", {"target_modules": ["query_key_value", "lm_head"]}),
    "DoRA of an absorbed matrix": ("deepseek-v2-lite", {"target_modules": ["kv_b_proj", "o_proj"], "use_dora": True}),
    "a saved absorbed matrix": ("deepseek-v2", {"target_modules": ["o_proj"], "modules_to_save": ["kv_b_proj"]}),
    "a saved square that is flipped": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["attn.c_proj"]}),
    "a saved matrix that is flipped": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["c_fc"]}),
}  # fmt: skip
"""The fields of adapter_config.json that change what is computed."""


@pytest.mark.parametrize("name", SAID)
def test_what_a_config_says(name: str, tmp_path: Path) -> None:
    family, said = SAID[name]
    compare(CASES.get(family) or FIRST[family], tmp_path, **said)


@pytest.mark.parametrize(
    "said",
    [{"target_modules": ["lm_head"], "use_dora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
     {"target_modules": ["q_proj"], "bias": "all"}],
    ids=["changed", "replaced", "its bias alone"],
)  # fmt: skip
def test_a_tied_head_with_a_bias_of_its_own(said: dict[str, Any], tmp_path: Path) -> None:
    """Its bias is added behind the product, which has none; the adapter's file holds it all the same."""
    compare(FIRST["Ernie4_5_MoeForCausalLM"], tmp_path, **said)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_table_that_was_changed_below_its_adapter(family: str, tmp_path: Path) -> None:
    """PEFT saves the table beside the adapter, and adds to what it saved. Here it is the base's, or merged."""
    from peft import LoraConfig, get_peft_model

    case, tokens = CASES[family], [3 + 7 * i % 60 for i in range(19)]
    reference, config, tensors = case.make(tmp_path / "base")
    said = LoraConfig(target_modules=["q_proj", "embed_tokens"], r=4, init_lora_weights=False)
    for changed in (False, True):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = type(reference).from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
            made = get_peft_model(model, said)
            table = model.get_input_embeddings().weight
            if changed:
                table += torch.randn_like(table) * 0.1
            made.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
        if not changed:
            ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
            continue
        with pytest.raises(ModelError, match="has other numbers in the file than in this model"):
            ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
    expected = theirs(made.eval(), tokens)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    again = type(reference).from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert (theirs(again.eval(), tokens) - expected).abs().max() <= WITHIN


MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "both kinds of biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True,
                                       "init_lora_weights": True}),
    "flipped": ("gpt2-by-depth", {"target_modules": ["c_attn", "c_proj", "lm_head"], "use_rslora": True}),
    "flipped DoRA": ("gpt2", {"target_modules": ["c_fc"], "use_dora": True, "modules_to_save": ["attn.c_proj"]}),
    "stacked experts": ("qwen3-moe", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                                      "target_modules": ["o_proj"], "rank_pattern": {r".*down_proj": 3}}),
    "one tensor of experts": ("GraniteMoeForCausalLM", {
        "target_parameters": ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"],
        "target_modules": ["k_proj"], "rank_pattern": {r".*down_proj": 3}}),
    "one that is flipped": ("Llama4ForCausalLM", {"target_modules": ["shared_expert.up_proj"],
        "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]}),
    "gates and rows in turn": ("gpt-oss", {"target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "q and k joined in the file": ("SarvamMoEForCausalLM", {
        "target_modules": ["q_proj", "v_proj", "o_proj", "embed_tokens"], "use_rslora": True,
        "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "joined DoRA": ("SarvamMoEForCausalLM", {"target_modules": ["q_proj", "k_proj", "v_proj"], "use_dora": True}),
}  # fmt: skip


MERGED |= {name: SAID[name] for name in SAID if "token" in name or "embeddings" in name}


@pytest.mark.parametrize("name", MERGED)
def test_what_is_merged_is_what_peft_computes(name: str, tmp_path: Path) -> None:
    family, said = MERGED[name]
    case = CASES.get(family) or FIRST[family]
    reference, config, tensors = case.make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    expected = theirs(grown(reference, tmp_path / "adapter", **said), tokens)
    if "lora_bias" not in said:
        found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), case.longest)
        check(found, without, expected, plain)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    again = type(reference).from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert (expected - plain).abs().max() > 0.01
    assert (theirs(again.eval(), tokens) - expected).abs().max() <= WITHIN


@pytest.mark.parametrize("name", ["MambaForCausalLM", "GPTNeoXForCausalLM"])
def test_biases_of_norms_and_convolutions_are_merged_alone(name: str, tmp_path: Path) -> None:
    """`bias: all` saves them, too."""
    reference, config, tensors = FIRST[name].make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    targets = linear_names(reference)
    expected = theirs(grown(reference, tmp_path / "adapter", target_modules=targets, bias="all"), tokens)
    with pytest.raises(ModelError, match=r"can only be merged \(tokenmill merge\)"):
        ours_with(config, tensors, tmp_path / "adapter", tokens, ReferenceKernels(), None)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    again = type(reference).from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert (theirs(again.eval(), tokens) - expected).abs().max() <= WITHIN


def test_a_bias_of_some_of_a_joined_matrix_says_what_to_train(tmp_path: Path) -> None:
    case = next(case for name, case in ALL.items() if "sarvam" in name and case.config.attention_bias)
    reference, config, tensors = case.make(tmp_path / "base")
    grown(reference, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], bias="lora_only")
    with pytest.raises(ModelError, match=r"train it of all three \(target_modules"):
        ours_with(config, tensors, tmp_path / "adapter", [1, 2], ReferenceKernels(), None)


def test_what_an_adapter_changes_of_eyes_is_not_used_in_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference, config, tensors = make_seeing("llava", tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    expected = theirs(grown(reference, tmp_path / "adapter", target_modules=["q_proj", "v_proj"]), tokens)
    found, without = ours_with(read(config), tensors, tmp_path / "adapter", tokens, ReferenceKernels(), None)
    check(found, without, expected, plain)
    assert "2 modules of what sees and hears are not used" in caplog.text
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name, tensor in tensors.items() if not torch.equal(merged[name], tensor)}
    assert {"vision_tower" in name for name in changed} == {True, False}
    again, _, _ = make_seeing("llava", tmp_path / "base")
    grown(again, tmp_path / "eyes", target_modules=r".*vision_tower.*q_proj")
    with pytest.raises(ModelError, match="changes only what sees or hears"):
        ours_with(read(config), tensors, tmp_path / "eyes", tokens, ReferenceKernels(), None)


STACKED = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "GraniteMoeForCausalLM",
           "GraniteMoeHybridForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM")  # fmt: skip


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
def test_experts_that_are_one_parameter(name: str, native: bool, tmp_path: Path) -> None:
    """PEFT's target_parameters: a stack of experts, before the activation and before the gates."""
    reference, config, tensors = FIRST[name].make(tmp_path / "base")
    tokens = [3 + 7 * i % 60 for i in range(19)]
    plain = theirs(reference, tokens)
    stacks = [".".join(key.split(".")[3:]) for key, each in reference.named_parameters() if each.ndim == 3]
    wanted = sorted({key for key in stacks if ".experts." in key}, reverse=True)
    assert len(wanted) == 2
    said = {"target_parameters": wanted, "target_modules": ["o_proj"]}
    wrapped = grown(reference, tmp_path / "adapter", **said, rank_pattern={r".*down_proj": 3, r".*\.up_proj": 2})
    expected = theirs(wrapped, tokens)
    kernels: Any = ReferenceKernels()
    if native:
        pytest.importorskip("tokenmill._native", reason="the native kernels were not built")
        from tokenmill.kernels.cpu import CpuKernels

        kernels = CpuKernels()
    found, without = ours_with(config, tensors, tmp_path / "adapter", tokens, kernels, FIRST[name].longest)
    check(found, without, expected, plain)
