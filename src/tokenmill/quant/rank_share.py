"""A rank's part of a quantised matrix. Owns: which rows and columns of a form's tensors hold a part of the matrix, so
that a rank reads only these.

A form's tensors lie like the matrix, or transposed (GPTQ, AWQ), and hold a number, a word of numbers or a scale per
place. If a cut would go through one of these, the whole matrix is read, and then split or refused. Must not know: what
the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError

_CUT = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "qweight", "qzeros",
        "scales", "biases", "qbiases", "bias")  # fmt: skip
_WORDS, _RUN = ("weight_packed", "qweight"), 32
"""Tensors of codes in words, and how many codes fill whole words whatever their bits."""
_ORDERS = ("g_idx", "weight_g_idx")
"""The tensors that list the group of each column."""
_SHAPE = "weight_shape"


class Part(WholeTensors):
    """A checkpoint in which the matrix `name` is one part of the whole: see `part_of`."""

    def __init__(self, inner: Checkpoint, name: str, shape: tuple[int, int], share: tuple[int, int, int]) -> None:
        """shape: of the part; share: (dimension, part, parts)."""
        self.inner, self.name, self.own, self.share = inner, name, shape, share
        self.axes: dict[str, int] = {}
        """The axis along which each tensor is cut, by full name."""
        self.has, self.names, self.close = inner.has, inner.names, inner.close

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the part."""
        found, axis = self.inner.shape(name), self.axes.get(name)
        if found is None or axis is None:
            return found
        return (*found[:axis], found[axis] // self.share[2], *found[axis + 1 :])

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor's part."""
        axis, (dim, part, parts) = self.axes.get(name), self.share
        if name == f"{self.name}.{_SHAPE}":
            found = self.inner.tensor(name).clone()
            found[dim] //= parts
            return found
        if axis is None:
            found = self.inner.tensor(name, None, dtype)
        else:
            whole = self.inner.shape(name)
            assert whole is not None
            each = whole[axis] // parts
            found = self.inner.part(name, axis, part * each, (part + 1) * each, None, dtype)
        if shape is not None and tuple(found.shape) != tuple(shape):
            raise ModelError(
                f"A rank's part of '{name}' has shape {list(found.shape)}, but the config asks for {list(shape)}."
            )
        return found


class BlockPart(Part):
    """The same for a matrix in blocks, where every part has whole blocks."""

    @classmethod
    def of(
        cls, ckpt: Checkpoint, name: str, shape: tuple[int, int], share: tuple[int, int, int], elements: int
    ) -> BlockPart | None:
        """elements: columns of a block. None: a cut would go through a block."""
        dim, _, parts = share
        if shape[dim] % parts or (dim == 1 and (shape[1] // parts) % elements):
            return None
        size = shape[dim] // parts
        made = cls(ckpt, name, (size, shape[1]) if dim == 0 else (shape[0], size), share)
        if dim == 0 and ckpt.has(f"{name}.bias"):
            made.axes[f"{name}.bias"] = 0
        return made

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Blocks | None:
        """The blocks of the part. They are a view, so only blocks that are used are read."""
        dim, part, _ = self.share
        found: Blocks | None = self.inner.blocks(name)  # type: ignore[attr-defined]
        if found is None or name != f"{self.name}.weight":
            return found
        start = part * self.own[dim]
        if dim == 1:
            return found.columns(start, start + self.own[1])
        return Blocks(found.type, found.raw[start : start + self.own[0]], found.forget)


def part_of(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], share: tuple[int, int, int], *, turned: bool
) -> Part | None:
    """The part of the matrix `name` [out, in] that belongs to a rank. None: the whole matrix must be read. turned: its
    tensors lie [in, out]."""
    dim, _, parts = share
    if shape[dim] % parts or (dim == 1 and any(ckpt.has(f"{name}.{order}") for order in _ORDERS)):
        return None
    if shape[dim] < _RUN and any(ckpt.has(f"{name}.{words}") for words in _WORDS):
        return None  # so few codes need not fill their words
    size = shape[dim] // parts
    own = (size, shape[1]) if dim == 0 else (shape[0], size)
    made = Part(ckpt, name, own, share)
    for full in _stored(ckpt, name):
        found = ckpt.shape(full)
        if found is None:
            return None
        bias = full.endswith(".bias")
        axis = 0 if bias else 1 - dim if turned else dim
        if axis >= len(found) or found[axis] == 1 or (bias and dim == 1):
            continue  # one for all rows and columns
        each = shape[dim] // found[axis]
        if found[axis] % parts or shape[dim] % found[axis] or size % each or each & (each - 1):
            return None  # blocks that do not fill the matrix, or numbers across words
        made.axes[full] = axis
    return made


def _stored(ckpt: Checkpoint, name: str) -> Iterable[str]:
    return [full for full in (f"{name}.{each}" for each in _CUT) if ckpt.has(full)]
