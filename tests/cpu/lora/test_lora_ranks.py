"""Adapters over several ranks and stages: the bytes of one process, with what else an engine can do; and adapters that
no rank knows.

TOKENMILL_RELIABILITY=1 adds four ranks, more ways, whole experts and formats."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engines import greedy, open_llm
from tests.cpu.lora.lora_company_helpers import ON, PROMPTS, asked, said
from tests.cpu.lora.making import ALL, write_adapter

from tokenmill import LoRARequest
from tokenmill.core.errors import ParameterError

pytest.importorskip("tokenmill.parallel.shared_memory", reason="the native kernels were not built")
FULL = os.environ.get("TOKENMILL_RELIABILITY") == "1"
TENSORS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
ROUGH = {"max_num_batched_tokens": 16, "num_blocks": 14, "max_model_len": 64, "max_loras": 2,
         "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}  # fmt: skip
LONG = pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")
COUNT = 12


def compare(base: Path, adapters: dict[str, Path], several: dict[str, Any], **options: Any) -> None:
    """One process; then several ranks, twice, with chunks, too few blocks, drafts, prefix hits and few slots."""
    options = {**ON, "kernels": "auto", **options}
    params = greedy(8, logprobs=1)
    with open_llm(base, **options) as llm:
        wanted = said(llm, PROMPTS[:COUNT], params, asked(adapters, COUNT))
    with open_llm(base, **{**options, **several, **ROUGH}) as llm:
        for _ in range(2):
            assert said(llm, PROMPTS[:COUNT], params, asked(adapters, COUNT)) == wanted


@pytest.mark.parametrize("several", [TENSORS, STAGES], ids=["ranks", "stages"])
def test_several_give_the_bytes_of_one(base: Path, adapters: dict[str, Path], several: dict[str, Any]) -> None:
    compare(base, adapters, several, dtype="bfloat16")


@LONG
@pytest.mark.parametrize("form", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("several", [TENSORS, {"tensor_parallel_size": 4}, STAGES, {**TENSORS, **STAGES}])
def test_more_ways(base: Path, adapters: dict[str, Path], several: dict[str, Any], form: str | None) -> None:
    compare(base, adapters, several, quantization=form, dtype="float32" if form else "bfloat16")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cpu.models.family_cases import ALL as CASES

    folder = tmp_path_factory.mktemp("mixture")
    CASES["qwen3_moe-0"].make(folder)
    return folder


@LONG
@pytest.mark.parametrize(
    "several", [TENSORS, STAGES, {**TENSORS, "enable_expert_parallel": True}], ids=["ranks", "stages", "experts"]
)
def test_experts_embeddings_and_heads(mixture: Path, several: dict[str, Any], tmp_path: Path) -> None:
    modules = (*ALL, "gate", "lm_head")
    made = {f"a{i}": write_adapter(tmp_path / f"a{i}", mixture, rank=2 + i, modules=modules[i:], seed=i)
            for i in range(8)}  # fmt: skip
    prompts = [[token % 67 for token in prompt] for prompt in PROMPTS[:COUNT]]
    options = {**ON, "kernels": "auto", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 64}
    params = greedy(8, logprobs=1)
    with open_llm(mixture, **options) as llm:
        wanted = said(llm, prompts, params, asked(made, COUNT))
        assert wanted[0] != said(llm, prompts[:1], params, None)[0]
    with open_llm(mixture, **{**options, **several, "max_loras": 2}) as llm:
        assert said(llm, prompts, params, asked(made, COUNT)) == wanted


def test_experts_of_another_number_are_refused_where_a_rank_has_some_of_them(mixture: Path, tmp_path: Path) -> None:
    config = json.loads((mixture / "config.json").read_text())
    count, rank, inner = config["num_local_experts"] + 2, 2, 2 * config["moe_intermediate_size"]
    made = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [],
        "target_parameters": ["gate_up_proj"],
    }
    name, shapes = "base_model.model.model.layers.1.mlp.experts", {"A": (rank * count, config["hidden_size"])}
    shapes["B"] = (inner, rank * count)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "adapter_config.json").write_text(json.dumps(made))
    tensors = {f"{name}.lora_{each}.weight": torch.ones(shape) for each, shape in shapes.items()}
    save_file(tensors, wrong / "adapter_model.safetensors")
    for several in ({}, {**TENSORS, "enable_expert_parallel": True}):
        with open_llm(mixture, **ON, **several, kernels="auto", skip_tokenizer_init=True, max_model_len=64) as llm:
            with pytest.raises(ParameterError, match=f"has {rank * count} rows, not {rank} for {count - 2} experts"):
                said(llm, [[1, 2]], greedy(2), [LoRARequest("wrong", 1, str(wrong))])


@LONG
def test_what_no_stage_knows_is_refused(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", base, rank=2, modules=("q_proj",))
    tensors = load_file(wrong / "adapter_model.safetensors")
    save_file({name.replace("layers.1", "layers.9"): t for name, t in tensors.items()},
              wrong / "adapter_model.safetensors")  # fmt: skip
    with open_llm(base, **ON, **STAGES, kernels="auto") as llm:
        with pytest.raises(ParameterError, match=r"layers.9.*is not a matrix of this model"):
            said(llm, PROMPTS[:1], greedy(2), [LoRARequest("wrong", 1, str(wrong))])
        assert said(llm, PROMPTS[:1], greedy(2), asked(adapters, 1)), "others go on"
