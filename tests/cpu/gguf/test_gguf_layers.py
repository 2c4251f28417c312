"""GGUF files of mixtures, latent attention and hybrids against Transformers. Names are those of the format's own
library; values are changed as its converter changes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.gguf.gguf_layers_helpers import CASES, FULL, C, models, together, write
from tests.cpu.gguf.gguf_models_helpers import check_refused, check_same, logits, prompt
from tests.cpu.models.parity import theirs
from torch import Tensor

USUAL = ("glm4moe", "deepseek2-v3", "mistral4", "glm-dsa", "deepseek32", "qwen3next", "gemma4",
         "granitehybrid-moe", "lfm2moe", "falcon-h1",
         "nemotron_h_moe", "mamba", "jamba")  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


Made = tuple[Any, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Transformers' model and the file of a case, made once."""
    known: dict[str, Made] = {}

    def make_once(name: str) -> Made:
        if name not in known:
            folder = tmp_path_factory.mktemp("gguf")
            reference, config, tensors = models(name, folder)
            write(folder / "m.gguf", CASES[name][0], config, tensors)
            known[name] = reference, folder / "m.gguf"
        return known[name]

    return make_once


@pytest.mark.parametrize("name", CASES if FULL else USUAL)
def test_like_transformers(name: str, made: Callable[[str], Made]) -> None:
    reference, path = made(name)
    check_same(logits(path, 30, 50), theirs(reference, prompt()))


@pytest.mark.parametrize(
    "name", ["qwen3next", "deepseek2-v3", *(["gemma4-moe", "granitehybrid-moe", "nemotron_h"] if FULL else [])]
)
def test_quantised_files_keep_their_numbers(name: str, tmp_path: Path) -> None:
    """Rows picked, joined and turned out of Q8_0 blocks are what the same numbers in float32 are."""
    _, config, tensors = models(name, tmp_path)
    for kind in ("Q8_0", "rounded"):
        write(tmp_path / f"{kind}.gguf", CASES[name][0], config, tensors, kind)
    check_same(logits(tmp_path / "Q8_0.gguf", 80), logits(tmp_path / "rounded.gguf", 80))


def test_mistrals_mixtures_under_the_name_of_deepseeks(tmp_path: Path) -> None:
    """Mistral Large 3's files, with the products of experts apart; without a scale of queries there is none."""
    reference, config, tensors = models("mistral4", tmp_path)

    def apart(name: str, x: Tensor, c: C) -> dict[str, Tensor]:
        ((target, x),) = together(name, x, c).items() if ".experts." in name else [("", x)]
        if not target.endswith("gate_up_exps.weight"):
            return {target: x} if target else together(name, x, c)
        return {target.replace("gate_up", part): half for part, half in zip(("gate", "up"), x.chunk(2, 1), strict=True)}

    write(tmp_path / "m.gguf", "DEEPSEEK2", config, tensors, change=apart)
    check_same(logits(tmp_path / "m.gguf", 80), theirs(reference, prompt()))
    write(tmp_path / "m.gguf", "DEEPSEEK2", config, tensors, change=apart, more={"attention.temperature_scale": None})
    reference.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    check_same(logits(tmp_path / "m.gguf", 80), theirs(reference, prompt()))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("deepseek2-v3", {"deepseek2.expert_gating_func": 1}, "a normed softmax"),
        ("deepseek2-v3", {"deepseek2.rope.scaling.yarn_log_multiplier": None}, "yarn with a rope.scaling.yarn_log"),
        ("glm-dsa", {"glm-dsa.attention.indexer.top_k": None}, "glm-dsa.attention.indexer.top_k"),
        ("glm-dsa", {"glm-dsa.attention.indexer.types": [True]}, "an entry for each of 4 layers"),
        ("deepseek32", {"deepseek32.expert_gating_func": 1}, "this choice of experts"),
        ("mistral4", {"mistral4.expert_gating_func": 2}, "this choice of experts"),
        ("mistral4", {"mistral4.rope.scaling.type": "none"}, "must have yarn"),
        ("mistral4", {"mistral4.attention.temperature_length": 65}, "temperature_length must be"),
        ("glm4moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is not supported"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": [True]}, "must have an entry for each of 4 layers"),
        ("glm4", {"glm4.rope.dimension_sections": [8, 12, 12, 0]}, "glm4.rope.dimension_sections"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 8}, "rotate a part of each head"),
        ("granitehybrid-moe", {"granitehybrid.attention.scale": None}, "Bamba"),
        ("nemotron_h_moe", {"nemotron_h_moe.moe_latent_size": 8}, "moe_latent_size"),
        ("jamba", {"jamba.attention.head_count_kv": [2, 2, 0, 0]}, "are not evenly spaced"),
        ("lfm2moe", {"lfm2moe.attention.head_count_kv": [2, 1, 0, 0]}, "must be one number, or 0 for layers without"),
        ("lfm2moe", {"lfm2moe.rope.scaling.factor": 2.0}, "rope scaling is not supported in lfm2moe"),
        ("mamba", {"mamba.block_count": 0}, "mamba.block_count must be a whole number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, change: C, says: str, made: Callable[[str], Made]) -> None:
    check_refused(made(name)[1], change, says)
