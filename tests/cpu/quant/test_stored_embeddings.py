"""Embeddings that a file holds in a quantised form, tied to the head or not, against the same numbers unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.cpu.models import parity
from tests.cpu.quant.stored_forms_helpers import FORMS, IN, OUT
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels

TOKENS = [(7 * i + 3) % OUT for i in range(12)]
NAMES = ["gptq 4 ordered", "awq gemm", "packed 3", "packed 4 zero", "int8 zero", "mxfp4", "nvfp4", "nf4 nested",
         "hqq 4", "quanto 4", "quanto 8", "torchao 4", "torchao pairs", "squeezellm 4", "2:4"]  # fmt: skip


def _made(folder: Path, *, tied: bool) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    config = hf.LlamaConfig(
        vocab_size=OUT, hidden_size=IN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=None,
    )  # fmt: skip
    return parity.make(config, folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_and_logits_are_those_of_the_numbers(name: str, tied: bool, tmp_path: Path) -> None:
    stored, dense, how = FORMS[name][0]()
    _, said, tensors = _made(tmp_path, tied=tied)
    wide = {**tensors, "model.embed_tokens.weight": dense}
    narrow = {each: tensor for each, tensor in tensors.items() if each != "model.embed_tokens.weight"}
    narrow |= {f"model.embed_tokens.{part}": tensor for part, tensor in stored.items()}
    steps = [[("a", 5)], [("a", 7)]]
    want = parity.ours(parity.load(said, wide), {"a": TOKENS}, steps)["a"]
    for kernels in (parity.ReferenceKernels(), make_kernels("cpu")):
        model = parity.load({**said, "quantization_config": how}, narrow, kernels=kernels)
        found = parity.ours(model, {"a": TOKENS}, steps, kernels)["a"]
        assert float((found - want).abs().max()) < (0.03 if tied else 0.01) * float(want.abs().max())


@pytest.mark.parametrize("name", ["fp8 blocks", "bitsandbytes 8", "packed 4"])
def test_codes_are_not_the_matrix_that_a_head_is_tied_to(name: str, tmp_path: Path) -> None:
    stored, _, how = FORMS[name][0]()
    _, said, tensors = _made(tmp_path, tied=True)
    beside = {f"lm_head.{part}": tensor for part, tensor in stored.items()}
    with pytest.raises(ModelError, match="lm_head"):
        parity.load({**said, "quantization_config": how}, {**tensors, **beside})


def test_zeros_that_are_written_for_every_matrix_add_nothing(tmp_path: Path) -> None:
    """AutoGPTQ wrote a bias for every matrix, also where the model has none; others are not read in silence."""
    stored, _, how = FORMS["gptq 4"][0]()
    _, said, tensors = _made(tmp_path, tied=False)
    narrow = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    narrow |= {f"lm_head.{part}": tensor for part, tensor in stored.items()}
    said["quantization_config"] = how
    steps = [[("a", len(TOKENS))]]
    want = parity.ours(parity.load(said, narrow), {"a": TOKENS}, steps)["a"]
    zeros = {"lm_head.bias": torch.zeros(OUT, dtype=torch.float16)}
    assert torch.equal(parity.ours(parity.load(said, {**narrow, **zeros}), {"a": TOKENS}, steps)["a"], want)
    zeros["lm_head.bias"][3] = 0.5
    with pytest.raises(ModelError, match=r"does not use: lm_head\.bias"):
        parity.load(said, {**narrow, **zeros})
    with pytest.raises(ModelError, match=r"does not use: model\.norm\.bias"):
        parity.load(said, {**narrow, "model.norm.bias": torch.zeros(IN)})


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_positions_are_no_matrices(name: str, tmp_path: Path) -> None:
    stored, dense, how = FORMS[name][0]()
    config = hf.GPT2Config(vocab_size=67, n_embd=IN, n_layer=1, n_head=4, n_positions=OUT)
    _, said, tensors = parity.make(config, tmp_path)
    assert tensors.pop("transformer.wpe.weight").shape == dense.shape
    tensors |= {f"transformer.wpe.{part}": tensor for part, tensor in stored.items()}
    with pytest.raises(ModelError, match=r"wpe\.weight' is stored quantised"):
        parity.load({**said, "quantization_config": how}, tensors)
