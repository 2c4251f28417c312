"""GGUF files of further mixtures, of Gemma 3n and of a few plain families, against Transformers. Names are those of the
format's own library; values are changed as its converter changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cpu.gguf.gguf_layers_helpers import FULL, C
from tests.cpu.gguf.gguf_mixtures_helpers import CASES, USUAL, written
from tests.cpu.gguf.gguf_models_helpers import check_refused, check_same, logits, prompt
from tests.cpu.models.parity import theirs


@pytest.mark.parametrize("name", CASES if FULL else USUAL)
def test_like_transformers(name: str, tmp_path: Path) -> None:
    reference, path = written(name, tmp_path)
    check_same(logits(path, 30, 50), theirs(reference, prompt()))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gemma3n", {"gemma3n.attention.sliding_window_pattern": [True]}, "must have an entry for each of 4 layers"),
        ("gemma3n", {"gemma3n.activation_sparsity_scale": [1.0]}, "a number below 8 for each of 4 layers"),
        ("llama4", {"llama4.rope.scaling.type": "yarn"}, "rope scaling is not supported in llama4"),
        ("llama4", {"llama4.attention.sliding_window": 0}, "sliding_window = 0 is not supported .only 8192"),
        ("afmoe", {"afmoe.expert_gating_func": 1}, "expert_gating_func is not supported"),
        ("afmoe", {"afmoe.expert_weights_norm": False}, "expert_weights_norm must be true"),
        ("mimo2", {"mimo2.attention.head_count_kv": 2}, "head_count_kv must be one number, and twice that"),
        ("mimo2", {"mimo2.rope.scaling.type": "yarn"}, "rope scaling is not supported in mimo2"),
        ("apertus", {"xielu.beta": [0.5]}, "xielu.beta must be a number, or one for each of 4 layers"),
        ("bitnet", {"bitnet.rope.scaling.factor": 2.0}, "rope scaling is not supported in bitnet"),
        ("bitnet", {"bitnet.hidden_activation": "gelu"}, "must be silu or relu2, not 'gelu'"),
        ("mistral3", {"mistral3.rope.scaling.yarn_log_multiplier": None}, "a rope.scaling.yarn_log_multiplier"),
        ("mistral3", {"mistral3.attention.temperature_length": 99}, "temperature_length must be rope.scaling.orig"),
        ("exaone4", {"exaone4.attention.sliding_window_pattern": [True]}, "must have an entry for each of 4 layers"),
        ("exaone-moe", {"exaone-moe.expert_gating_func": 1}, "exaone-moe with a softmax"),
        ("exaone-moe", {"exaone-moe.attention.sliding_window_pattern": [True]}, "must have an entry for each of 4"),
        ("phimoe", {"phimoe.context_length": 8192}, "4096 positions stretched to 131072 alone"),
        ("olmo3", {"olmo2.attention.sliding_window_pattern": [True]}, "must have an entry for each of 4 layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, change: C, says: str, tmp_path: Path) -> None:
    check_refused(written(name, tmp_path)[1], change, says)
