"""Matrices stored without their zeros (compressed-tensors' sparse-bitmask and sparse-24-bitmask). Owns: the layout.

    NAME.compressed: the numbers that are not zero, row by row; NAME.bitmask uint8 [out, in / 8]: where they belong, the
    lowest bit first; NAME.shape [2]; sparse-bitmask also NAME.row_offsets [out]: where each row's numbers begin
Must not know: models, devices, what the numbers are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.quant.base import known

FORMATS = ("sparse-bitmask", "sparse-24-bitmask")


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a matrix under `name`?"""
    return ckpt.has(f"{name}.bitmask") and ckpt.shape(f"{name}.bitmask") is not None


class Widened(WholeTensors):
    """A checkpoint in which NAME.weight is dense, around one in which it is stored otherwise."""

    def __init__(self, inner: Checkpoint, name: str, weight: Tensor) -> None:
        self.inner, self.name, self.weight = inner, f"{name}.weight", weight
        self.names, self.close = inner.names, inner.close

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name == self.name or self.inner.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape."""
        return tuple(self.weight.shape) if name == self.name else self.inner.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor."""
        if name != self.name:
            return self.inner.tensor(name, shape, dtype)
        return self.weight if dtype is None else self.weight.to(dtype)


def load(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> Tensor:
    """The matrix [out, in] under `name` with its zeros, in its stored type."""
    rows, columns = shape
    packed = ckpt.tensor(f"{name}.bitmask", (rows, -(-columns // 8)))
    values = ckpt.tensor(f"{name}.compressed")
    if values.ndim > 1 and values.shape[0] != rows:
        raise ModelError(f"'{name}.compressed' has shape {list(values.shape)}, which does not fit {list(shape)}.")
    values = values.flatten()
    if packed.dtype != torch.uint8:
        raise ModelError(f"'{name}.bitmask' must be uint8, not {packed.dtype}.")
    if ckpt.has(f"{name}.shape") and ckpt.tensor(f"{name}.shape", (2,)).tolist() != [rows, columns]:
        raise ModelError(f"'{name}.shape' is not {[rows, columns]}, which the config asks for.")
    if ckpt.has(f"{name}.row_offsets"):
        ckpt.tensor(f"{name}.row_offsets")  # it follows from the mask
    mask = unpack_mask(packed, columns)
    if not known(mask):
        return values.new_empty(rows, columns)
    if int(mask.sum()) != values.numel():
        raise ModelError(f"'{name}.bitmask' has {int(mask.sum())} places for {values.numel()} numbers.")
    if not values.is_floating_point() and values.element_size() > 1:
        raise ModelError(f"'{name}.compressed' must hold floats, or codes of one byte, not {values.dtype}.")
    if values.element_size() > 1 and not bool(torch.isfinite(values).all()):
        raise ModelError(f"'{name}.compressed' holds infinities or NaN, which are not numbers: the file is damaged.")
    bits = values.view(torch.uint8) if values.element_size() == 1 else values  # torch cannot scatter every type
    whole = torch.zeros(rows, columns, dtype=bits.dtype, device=bits.device)
    whole[mask] = bits
    return whole.view(values.dtype)


def unpack_mask(packed: Tensor, columns: int) -> Tensor:
    """Mask bits: packed [out, n] uint8 -> [out, columns] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(1)[:, :columns].bool()


def pack_mask(mask: Tensor) -> Tensor:
    """Mask bits: mask [out, in] bool -> [out, ceil(in / 8)] uint8."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8)).view(mask.shape[0], -1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1).to(torch.uint8)
