"""Embeddings that a file holds in a quantised form, tied to the head or not, against the same numbers unpacked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers as hf

sys.path.append(str(Path(__file__).resolve().parent.parent / "models"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "kernels"))
import parity
from stored_forms_helpers import FORMS, IN, OUT

from tokenmill.kernels import make_kernels

TOKENS = [(7 * i + 3) % OUT for i in range(12)]
NAMES = ["gptq 4 ordered", "awq gemm", "packed 3", "packed 4 zero", "int8 zero", "mxfp4", "nvfp4", "nf4 nested",
         "hqq 4", "quanto 4", "quanto 8", "torchao 4", "torchao pairs", "squeezellm 4", "2:4"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_and_logits_are_those_of_the_numbers(name: str, tied: bool, tmp_path: Path) -> None:
    stored, dense, how = FORMS[name][0]()
    config = hf.LlamaConfig(
        vocab_size=OUT, hidden_size=IN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, pad_token_id=None,
    )  # fmt: skip
    _, said, tensors = parity.make(config, tmp_path)
    wide = {**tensors, "model.embed_tokens.weight": dense}
    narrow = {each: tensor for each, tensor in tensors.items() if each != "model.embed_tokens.weight"}
    narrow |= {f"model.embed_tokens.{part}": tensor for part, tensor in stored.items()}
    steps = [[("a", 5)], [("a", 7)]]
    want = parity.ours(parity.load(said, wide), {"a": TOKENS}, steps)["a"]
    for kernels in (parity.ReferenceKernels(), make_kernels("cpu")):
        model = parity.load({**said, "quantization_config": how}, narrow, kernels=kernels)
        found = parity.ours(model, {"a": TOKENS}, steps, kernels)["a"]
        assert float((found - want).abs().max()) < (0.03 if tied else 0.01) * float(want.abs().max())
