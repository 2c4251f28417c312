"""Concatenations of differing formats (Q4_K_M mixes two inside q/k/v). Owns: multiplying in parts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.core.protocols import Weight
from tokenmill.quant.base import WeightBase


class MixedWeight(WeightBase):
    """[part; part; ...] along out, each part in its own format."""

    parts: list[Any]

    def __init__(self, parts: list[Weight]) -> None:
        flat: list[Any] = []
        for part in parts:
            flat.extend(part.parts if isinstance(part, MixedWeight) else [part])
        self.parts = flat
        self.starts = [0, *accumulate(part.shape[0] for part in flat)]
        self.shape = (self.starts[-1], flat[0].shape[1])

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Each part's columns side by side."""
        return torch.cat([part.matmul(x, ctx) for part in self.parts], dim=-1)

    def concat(self, others: list[Weight]) -> Weight:
        """A longer mixture."""
        return MixedWeight([self, *others]) if others else self

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index, which must not go back to an earlier part."""
        pieces = []
        for part, start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            here = index[(index >= start) & (index < stop)] - start
            if len(here):
                pieces.append(part.take(here))
        owner = torch.bucketize(index, torch.tensor(self.starts[1:], device=index.device), right=True)
        assert bool((owner[1:] >= owner[:-1]).all()), "rows of a mixed weight cannot be interleaved across its parts"
        return type(self)(pieces)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0, across the borders of the parts) or in (1)."""
        if dim == 0:
            return self.take(self.part_index(part, parts, torch.device("cpu")))
        return type(self)([piece.split(1, part, parts) for piece in self.parts])

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in], gathered part by part."""
        return self.dense()[ids]

    def dense(self) -> Tensor:
        """All parts, dense."""
        return torch.cat([part.dense() for part in self.parts])

    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes() for part in self.parts)
