"""What every weight format shares. Owns: norm -> linear -> act -> residual, and concatenation across formats.

A format implements `linear`, `take`, `split`, `rows`, `dense` and `bytes`; one that fuses more overrides `matmul`.
Knows nothing of layers or models.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import Act, ForwardContext, NormSpec
from tokenmill.core.protocols import Weight


class WeightBase:
    """A matrix [out, in] (with an optional bias) in some format."""

    shape: tuple[int, int]

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out], bias included."""
        raise NotImplementedError

    def take(self, index: Tensor) -> Self:
        """The rows (of out) named by index [n], in that order."""
        raise NotImplementedError

    def split(self, dim: int, part: int, parts: int) -> Self:
        """Part `part` of `parts` equal ones along out (0) or in (1); along in, only part 0 keeps the bias."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The whole matrix [out, in] in the compute dtype."""
        raise NotImplementedError

    def bytes(self) -> int:
        """Bytes held."""
        raise NotImplementedError

    def join(self, others: list[Self]) -> Self | None:
        """[self; others] as one weight of this format, or None if that cannot be."""
        return None

    def matmul(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ W.T + bias)."""
        kernels = ctx.kernels
        if norm is not None:
            x = kernels.norm(x, norm)
        y = self.linear(x, ctx)
        if act is not None:
            y = kernels.activate(y, act)
        return y if residual is None else kernels.add(residual, y)

    def concat(self, others: list[Weight]) -> Weight:
        """[self; others] along out; weights of one format become one, others multiply in parts."""
        if not others:
            return self
        same = [other for other in others if type(other) is type(self)]
        joined = self.join(same) if len(same) == len(others) else None
        if joined is not None:
            return joined
        from tokenmill.quant.mixed import MixedWeight

        return MixedWeight([self, *others])

    def part_range(self, dim: int, part: int, parts: int) -> tuple[int, int]:
        """First and last + 1 index of an equal part, refused when the size is not divisible."""
        size = self.shape[dim]
        if size % parts:
            raise ModelError(f"A weight of {size} {('rows', 'columns')[dim]} cannot be split over {parts} ranks.")
        return size // parts * part, size // parts * (part + 1)

    def part_index(self, part: int, parts: int, device: torch.device) -> Tensor:
        """Row numbers of an equal part along out."""
        start, stop = self.part_range(0, part, parts)
        return torch.arange(start, stop, device=device)
