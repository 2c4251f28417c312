"""Where a tensor of a model lies in a GGUF file. Owns: plain records of it, and of the converter's changes to undo.

Must not know: names of families, tensor data.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.checkpoint.gguf_file import TensorInfo
from tokenmill.core.errors import ModelError

MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A stored tensor, one expert of it, or some of its rows, and the changes of the converter to undo."""

    info: TensorInfo
    expert: int | None = None
    heads: int = 0
    """Not 0: the rows of each of these heads are interleaved."""
    less: float = 0.0
    """What the converter added to every number."""
    lifted: tuple[int, ...] = ()
    """The shape that models expect, if the converter flattened the tensor."""
    negated_exp: bool = False
    """The converter stored -exp(x)."""
    rows: tuple[int, ...] = ()
    """Only these rows, in this order; empty: all."""
    turned: bool = False
    """The converter transposed the matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as models expect it."""
        if self.lifted:
            return self.lifted
        whole = self.info.shape if self.expert is None else self.info.shape[1:]
        if self.turned:
            return (*whole[:-2], whole[-1], whole[-2])
        return (len(self.rows), *whole[1:]) if self.rows else whole


@dataclass(frozen=True, slots=True)
class Joined:
    """The second product of latent attention, for keys and values. It is stored in two tensors: keys head by head
    [heads, latent, keys], values [heads, values, latent]."""

    info: TensorInfo
    values: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """[heads * (keys + values), latent]."""
        heads, latent, keys = self.info.shape
        return heads * (keys + self.values.shape[1]), latent

    @staticmethod
    def of(keys: TensorInfo, values: TensorInfo) -> Joined:
        """Join two tensors whose shapes fit."""
        fits = len(keys.shape) == len(values.shape) == 3
        if not fits or keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
            raise ModelError(f"Tensors {keys.name!r} {keys.shape} and {values.name!r} {values.shape} do not fit.")
        return Joined(keys, values)


@dataclass(frozen=True, slots=True)
class Given:
    """Numbers that the format keeps in its metadata."""

    values: tuple[float, ...]
    shape: tuple[int, ...]


Places = list[tuple[str, TensorSource | Joined]]
"""Our names of the tensors that one stored tensor holds."""


def stacked(at: str, names: str, info: TensorInfo, kind: str = "weight") -> Places:
    """Experts in one tensor. names: the name of an expert's matrix, or of two that lie one above the other ("a|b")."""
    if len(info.shape) != (3 if kind == "weight" else 2) or info.shape[0] > MAX_EXPERTS:
        raise ModelError(f"Tensor {info.name!r} should hold one matrix per expert, but has the shape {info.shape}.")
    parts = names.split("|")
    size = info.shape[1] // len(parts)
    found: Places = []
    for number, name in enumerate(parts):
        rows = tuple(range(number * size, number * size + size)) if len(parts) > 1 else ()
        found += [(f"{at}.{e}.{name}.{kind}", TensorSource(info, expert=e, rows=rows)) for e in range(info.shape[0])]
    return found


def numbered(at: str, info: TensorInfo) -> Places:
    """Numbered matrices in one tensor."""
    if len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
        raise ModelError(f"Tensor {info.name!r} should hold several matrices, but has the shape {info.shape}.")
    return [(f"{at}.{number}.weight", TensorSource(info, expert=number)) for number in range(info.shape[0])]
