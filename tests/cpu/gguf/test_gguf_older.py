"""GGUF files of families from before root-mean-square norms were usual, against Transformers. Names are those of the
format's own library; values are changed as its converter changes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.cpu.gguf.gguf_layers_helpers import FULL, C
from tests.cpu.gguf.gguf_models_helpers import Unrounded, check_refused, check_same, logits, prompt
from tests.cpu.gguf.gguf_older_helpers import CASES, USUAL, written
from tests.cpu.models.parity import theirs

from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.core.errors import ModelError
from tokenmill.models.registry import build_model


@pytest.mark.parametrize("name", CASES if FULL else USUAL)
def test_like_transformers(name: str, tmp_path: Path) -> None:
    reference, path = written(name, tmp_path)
    check_same(logits(path, 30, 50), theirs(reference, prompt()))


@pytest.mark.parametrize("name", ["gpt2", "falcon-40b", *(["phi2-fused", "gptneox", "olmo", "dbrx"] if FULL else [])])
def test_quantised_files_keep_their_numbers(name: str, tmp_path: Path) -> None:
    """Rows picked, joined and turned out of Q8_0 blocks are what the same numbers in float32 are."""
    exact, found = (logits(written(name, tmp_path, kind)[1], 80) for kind in ("rounded", "Q8_0"))
    check_same(found, exact)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("phi2", {"phi2.attention.key_length": 32}, "an equal share of the hidden size"),
        ("phi2", {"phi2.rope.scaling.factor": 2.0}, "rope scaling is not supported in phi2"),
        ("gptneox", {"gptneox.attention.head_count_kv": 2}, "head_count_kv must be 4, not 2"),
        ("bloom", {"bloom.feed_forward_length": 128}, "must be four times the hidden size"),
        ("falcon-7b", {"falcon.rope.dimension_count": 8}, "must be the width of a head"),
        ("mpt", {"mpt.attention.max_alibi_bias": 0.0}, "other positions than biases are not supported"),
        ("olmo", {"olmo.attention.layer_norm_epsilon": 1e-6}, "must be 1e-05"),
        ("starcoder", {"starcoder.attention.head_count_kv": 4}, "head_count_kv must be 1, not 4"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, change: C, says: str, tmp_path: Path) -> None:
    check_refused(written(name, tmp_path)[1], change, says)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "says"),
    [
        ("gptneox", "blk.0.attn_qkv.weight", (190, 64), "190 rows cannot hold 4 heads"),
        ("falcon-40b", "blk.1.attn_qkv.weight", (127, 64), "127 rows cannot hold 4 heads"),
        ("stablelm", "blk.0.attn_q_norm.weight", (64,), "should hold one norm per head"),
        ("gpt2", "blk.0.attn_qkv.weight", (64,), "c_attn.weight"),
        ("dbrx", "blk.0.ffn_down_exps.weight", (64, 64), "experts.mlp.w2"),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    name: str, tensor: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    source = GgufModel(written(name, tmp_path)[1])
    source.tensors[tensor] = replace(source.tensors[tensor], shape=shape)
    with pytest.raises(ModelError, match=says):
        build_model(source.config, source.open_checkpoint(), dtype=torch.float32, device="cpu", kernels=Unrounded())
