"""Files that bitsandbytes, MLX and torchao wrote: what they mean here is what these tools compute with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.quant.detect import WeightRequest, load_weight

FOLDER = Path(__file__).parent / "made_by_others"
FILES = {path.stem: path for path in FOLDER.glob("*.safetensors")}
ROUNDED = {"bitsandbytes-int8": 0.01, "torchao-8da4w": 0.01}
"""Where the tool rounds inputs to 8 bits."""
TABLES = ("nf4", "fp4")
"""Entries of tables go to the nearest of 255 here."""


class File:
    """A Checkpoint of one file."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, shape: Any = None, dtype: Any = None) -> Tensor:
        found = self.tensors[name]
        self.read.add(name)
        assert shape is None or tuple(found.shape) == tuple(shape)
        return found if dtype is None else found.to(dtype)

    names = part = close = None


def test_all_files_are_there() -> None:
    assert sorted(FILES) == [
        "bitsandbytes-fp4", "bitsandbytes-fp4-double", "bitsandbytes-int8", "bitsandbytes-nf4",
        "bitsandbytes-nf4-double",
        *(f"mlx-{form}" for form in (2, 3, 4, 5, 6, 8, "mxfp4", "mxfp8", "nvfp4")),
        "torchao-8da4w", "torchao-fp8",
        "torchao-int4", "torchao-int8"]  # fmt: skip


@pytest.mark.parametrize("name", sorted(FILES))
def test_outputs_are_the_tools(name: str) -> None:
    file = File(load_file(FILES[name]))
    x, outputs = file.tensors["x"], file.tensors["outputs"].float()
    request = WeightRequest("w", (outputs.shape[1], x.shape[1]))
    found = load_weight(file, request, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    lost = float((x @ found.dense().T - outputs).norm() / outputs.norm())
    table = any(kind in name for kind in TABLES)
    assert lost < ROUNDED.get(name, 3e-3 if table else 1e-3), lost
    assert {each for each in file.tensors if each.startswith("w.")} == file.read
