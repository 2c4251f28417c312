"""Medusa heads as they lie on hubs: the same heads guess the same in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cpu.engine.engine_draft_models_helpers import PROMPTS
from tests.cpu.engine.engines import all_of_them, greedy, hear_guesses, open_usual, run
from torch import Tensor

from tokenmill.core.errors import UserError
from tokenmill.testing.tiny import make_tiny

HIDDEN, VOCAB, HEADS, BLOCKS = 64, 320, 3, 2
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("medusa") / "target")


def heads(block: str, over: str, words: int) -> Tensors:
    """The same numbers under these names; words: how many matrices over the vocabulary."""
    torch.manual_seed(0)
    made: Tensors = {}
    for n in range(HEADS):
        for m in range(BLOCKS):
            name = block.format(n=n, m=m)
            made[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.1
            made[f"{name}.bias"] = torch.randn(HIDDEN) * 0.1
    return made | {f"{over.format(n=n, m=BLOCKS)}.weight": torch.randn(VOCAB, HIDDEN) for n in range(words)}


OURS = "blocks.{n}.layers.{m}", "lm_heads.{n}"
FIRST = "{n}.{m}.linear", "{n}.{m}"
CALLED = {"num_heads": HEADS, "num_hidden_layers": BLOCKS, "vocab_size": VOCAB, "hidden_size": HIDDEN}
OLD = {"medusa_num_heads": 2, "medusa_num_layers": 1}
ONE = {"original_lm_head": True}
FORMS: dict[str, list[tuple[dict[str, Any], Tensors]]] = {
    "each": [
        (CALLED, heads(*OURS, HEADS)),
        (CALLED | {"truncated_vocab_size": VOCAB}, heads(*OURS, HEADS) | {"token_map": torch.arange(VOCAB)}),
        (CALLED, heads("medusa_heads.blocks.{n}.layers.{m}", "medusa_heads.lm_heads.{n}", HEADS)),
        (OLD, heads(*FIRST, HEADS)),  # the config of the first heads names fewer than there are
        (OLD, heads("medusa_head.{n}.{m}.linear", "medusa_head.{n}.{m}", HEADS)),
        ({}, heads(*FIRST, HEADS)),
    ],
    "one": [
        (CALLED | ONE, heads(OURS[0], "lm_head", 1)),
        (CALLED | ONE, heads(*OURS, 1)),
        (CALLED, heads(OURS[0], "lm_head", 1)),
    ],
    "the model's": [(CALLED | ONE, heads(*OURS, 0)), (CALLED, heads(*OURS, 0)), (OLD, heads(*FIRST, 0))],
}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, *, old: bool = False) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if old:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return {"method": "medusa", "model": str(folder), "num_speculative_tokens": HEADS}


@pytest.mark.parametrize("over", FORMS)
def test_the_same_heads_in_every_form(over: str, target: Path, tmp_path: Path) -> None:
    said = []
    for n, (config, tensors) in enumerate(FORMS[over]):
        found: dict[tuple[int, ...], list[int]] = {}
        speculation = write(tmp_path / str(n), config, tensors, old=n % 2 == 1)
        with all_of_them(open_usual(target, speculative_config=speculation)) as llm:
            hear_guesses(llm, found)
            run(llm, PROMPTS[:2], greedy(8))
        said.append(found)
    assert said[0] and all(len(guesses) == HEADS for guesses in said[0].values())
    assert all(found == said[0] for found in said)


@pytest.mark.parametrize(
    ("config", "without", "why"),
    [
        (CALLED | {"num_heads": 4}, "", "the file has 3; there must be 4 to 16"),
        (CALLED | {"num_hidden_layers": 3}, "", "the file has 2; there must be 3 to 8"),
        (CALLED, "lm_heads.1.weight", "lm_heads.1.weight"),
        (CALLED, "blocks.0.layers.0.weight", "the file has 0"),
        (CALLED | {"num_heads": 0}, "", "'num_heads' = 0 is out of bounds"),
        (CALLED | {"num_heads": [3] * 9999}, "", "'num_heads' must be a whole number"),
        (CALLED | {"hidden_size": [HIDDEN] * 9999}, "", "'hidden_size' must be a whole number"),
        (CALLED | {"vocab_size": "320"}, "", "'vocab_size' must be a whole number"),
        (CALLED | {"truncated_vocab_size": 100}, "", "another vocabulary"),
        (CALLED | {"original_lm_head": "no"}, "", "'original_lm_head' must be true or false"),
        (CALLED | {"medusa_fc_bias": [1]}, "", "'medusa_fc_bias' must be true or false"),
        (CALLED | {"quantization_config": {"quant_method": "x"}}, "", "quantised with 'x'"),
    ],
)
def test_heads_that_are_refused(config: dict[str, Any], without: str, why: str, target: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in heads(*OURS, HEADS).items() if name != without}
    with pytest.raises(UserError, match=why) as told:
        open_usual(target, speculative_config=write(tmp_path / "heads", config, tensors))
    assert len(str(told.value).replace(str(tmp_path), "")) < 400
