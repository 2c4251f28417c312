"""Weights without data. Owns: a checkpoint that has only shapes, and the shapes of a matrix's quantised forms.

Must not know: models, costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.quant import hqq_quanto

META = torch.device("meta")
AS_STORED = frozenset(
    "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()  # noqa: SIM905
)
"""GGUF types that a CPU's kernels multiply in their own bits (kernels/cpu/packed.py)."""
_FACTS = frozenset({"weight_format", *hqq_quanto.FACTS})
"""Tensors with facts of a matrix: a few bytes."""


class ShapeCheckpoint(WholeTensors):
    """Tensors without data. They have the shapes in `inner` if there are weight files, else whatever shape is asked
    for."""

    def __init__(self, inner: Checkpoint | None = None, stored: torch.dtype = torch.float32) -> None:
        """stored: the type of numbers whose files are not there."""
        self.inner, self.stored = inner, stored

    def names(self) -> Iterable[str]:
        """The names in the files."""
        return () if self.inner is None else self.inner.names()

    def has(self, name: str) -> bool:
        """Without files, every name exists."""
        return self.inner is None or self.inner.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None without files: a tensor has whatever shape is asked for."""
        return None if self.inner is None else self.inner.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor of this shape on the meta device. What says how others are read is read itself."""
        if self.inner is not None and _is_fact(name):
            return self.inner.tensor(name, shape, dtype)
        if self.inner is not None and (shape is None or dtype is None):
            found = self.inner.tensor(name, shape, dtype)
            shape, dtype = tuple(found.shape), found.dtype
        if shape is None:
            raise ModelError(f"The shape of '{name}' is not known without weight files.")
        return torch.empty(shape, dtype=dtype or self.stored, device=META)

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Blocks | None:
        """The quantised blocks of a matrix, as a shape."""
        ask = getattr(self.inner, "blocks", None)
        found = None if ask is None else ask(name, shape)
        return None if found is None else ShapeBlocks(found.type, torch.empty_like(found.raw, device=META))

    def close(self) -> None:
        """Close the files."""
        if self.inner is not None:
            self.inner.close()


def _is_fact(name: str) -> bool:
    """Does a tensor of this name say how the others of its matrix are to be read?"""
    return ".quant_state." in name or name.rpartition(".")[2] in _FACTS


class ShapeBlocks(Blocks):
    """Quantised blocks without data. They decode to a matrix without data."""

    __slots__ = ()

    def take(self, index: Tensor) -> Blocks:
        """As many rows as the index has."""
        return ShapeBlocks(self.type, self.raw.new_empty(len(index), self.raw.shape[1]))

    def columns(self, start: int, stop: int) -> Blocks:
        """Whole blocks."""
        part = super().columns(start, stop)
        return ShapeBlocks(part.type, part.raw)

    def grid(self) -> None:
        """None: there are no integers."""
        return None

    def dense(self) -> Tensor:
        """[rows, columns] float32."""
        return torch.empty(self.shape, device=META)


@dataclass(frozen=True, slots=True)
class Packed:
    """A backend's packed form of integers. It has only a size."""

    shape: tuple[int, int]
    nbytes: int
    dtype: torch.dtype = torch.bfloat16

    def bytes(self) -> int:
        """Bytes held."""
        return self.nbytes

    def pieces(self) -> None:
        """None: it is not stacked."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dense rows [n, in]."""
        return torch.empty(len(ids), self.shape[1], dtype=dtype, device=META)
