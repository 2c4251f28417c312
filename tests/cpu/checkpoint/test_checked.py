"""Damaged tensors are found while they are read, whole or in parts, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from tokenmill.checkpoint.checked_tensors import CheckedCheckpoint
from tokenmill.checkpoint.folder import open_checkpoint

TENSORS = {
    "good": torch.randn(8, 8),
    "nan": torch.randn(8, 8).index_put((torch.tensor(7), torch.tensor(3)), torch.tensor(torch.nan)),
    "inf": torch.randn(4, 4, dtype=torch.float32).to(torch.bfloat16).index_put(
        (torch.tensor(0), torch.tensor(0)), torch.tensor(torch.inf, dtype=torch.bfloat16)
    ),
    "large": torch.full((64, 64), 6e4, dtype=torch.float16),
    "whole numbers": torch.arange(6),
}  # fmt: skip


@pytest.fixture
def checked(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    made = CheckedCheckpoint(open_checkpoint(tmp_path))
    yield made
    made.close()


def test_damaged_tensors_are_named(checked):
    assert checked.damaged() == []
    for name, tensor in TENSORS.items():
        assert torch.equal(checked.tensor(name).nan_to_num(), tensor.nan_to_num())
    assert checked.damaged() == ["nan", "inf"]


def test_parts_add_up(checked):
    checked.part("nan", 0, 0, 4)
    assert checked.damaged() == []
    checked.part("nan", 0, 4, 8)
    assert checked.damaged() == ["nan"]


def test_the_rest_is_the_inner_ones(checked):
    assert sorted(checked.names()) == sorted(TENSORS) and checked.has("good") and not checked.has("x")
    assert checked.shape("good") == (8, 8)
    assert not hasattr(checked, "blocks")
