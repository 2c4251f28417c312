"""A weight's numbers as they are stored. Owns: the one descriptor that every format hands to a backend, and what every
backend's own form of it can do.

A format names the meaning of its tensors by a `kind`. Each backend has one table of the kinds that it packs into a form
of its own (`kernels/cpu/packed.py`, `kernels/triton/quantised/narrow.py`). `kernels/plain.py` multiplies some kinds in
plain torch, as they are stored. A kind in none of these tables is multiplied by its dense numbers. N rows, K columns:

    kind         parts by name
    dense        numbers [N, K]; in float16 for a product in float32: a backend may hold them so
    int2 .. int8 codes [N, K] int8 (-2..1, ..., -8..7, ..., -127..127), scales [N, groups] float16: code * scale; int8
                 maybe with `apart`, one number: a backend that rounds a group's activations to one scale leaves those
                 of this magnitude or more as they are; maybe with `rounds-inputs`: a backend may round activations to
                 8 bits, with a scale per row
    int2-zeros   (and so on) the same, and zeros [N, groups], int8, int16 or fractions: (code - zero) * scale
    table        codes [N, K] uint8, table [n <= 256], scales [N, groups] and factors [N], all float32:
                 table[code] * scale * factor
    affine       codes, scales and maybe offsets [N, groups] float32, groups of 16 or 32: code * scale + offset
    fp8          codes [N, K] float8 (e4m3), scales [N, 1] float32
    fp8-blocks   the same with scales [N / 128, K / 128]
    blocks       raw [rows, bytes] in GGUF blocks, one part below the other; a part's name is its type

A new kind may have any parts: tables of codes, an order of columns, borders of uneven groups, columns kept apart, masks
of what is not zero. Only readers of the kind must know them. Needs no torch. Must not know: files, backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [N, K] as it is stored; `kind` says how. dense: makes its numbers in the compute dtype. taken: called
    from time to time during packing, when what was read so far is not needed again."""

    kind: str
    shape: tuple[int, int]
    parts: tuple[tuple[str, Tensor], ...]
    dense: Callable[[], Tensor]
    bias: Tensor | None = None
    taken: Callable[[], None] | None = None
    dtype: torch.dtype | None = None
    """The type in which dense numbers are multiplied."""

    def find(self, name: str) -> Tensor | None:
        """The part of this name, if there is one."""
        for other, tensor in self.parts:
            if other == name:
                return tensor
        return None

    def part(self, name: str) -> Tensor:
        """The part of this name."""
        found = self.find(name)
        assert found is not None, f"a matrix of kind {self.kind!r} has {name!r}"
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(tensor.nbytes for _, tensor in self.parts)


class Packed(Protocol):
    """A matrix in a backend's own form, its bias included. A form that the backend's `product` does not know has
    `product(x)` -> x @ matrix.T + bias."""

    def rows(self, ids: Tensor, dtype: Any) -> Tensor:
        """Dense rows [n, K] in torch's type `dtype`."""
        ...

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None: ...
    def bytes(self) -> int: ...
