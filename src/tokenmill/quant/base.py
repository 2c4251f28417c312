"""What all weight formats share. Owns: norm -> linear -> act -> residual, and mixtures of different formats.

A format that implements `take`, `split`, `rows`, `dense` and `bytes` is multiplied by its dense numbers. A format that
backends pack is a PackedWeight (packed.py). Formats that work differently override `matmul`, or only `linear`.
Must not know: layers, models.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from tokenmill.compute.adapters import Delta
from tokenmill.compute.forward import Around, ForwardContext, Kernels, NormSpec, Weight
from tokenmill.core.errors import ModelError, UnevenError


def known(t: Tensor) -> bool:
    """Does the tensor hold numbers? Plans count weights without numbers."""
    return t.device.type != "meta"


def check_range(largest: float, scales: Tensor, what: str) -> None:
    """Refuse scales that are NaN, or with which some code would mean more than float32's largest number. largest: of
    all codes."""
    if known(scales) and scales.numel() and not float(scales.abs().max()) * largest <= torch.finfo(torch.float32).max:
        raise ModelError(f"'{what}' has scales that exceed float32's range: the file is damaged.")


class WeightBase:
    """A matrix [out, in] (with an optional bias) in some format."""

    shape: tuple[int, int]
    bias: Tensor | None = None
    changed: tuple[str, ...] = ()
    """Stored formats whose numbers this weight holds only approximately, because no kernel takes them."""

    def linear(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None) -> Tensor:
        """norm(x) @ W.T + bias. The dense numbers are made anew for every call."""
        return ctx.kernels.product(x if norm is None else ctx.kernels.norm(x, norm), self.dense(), self.bias)

    def take(self, index: Tensor) -> Self:
        """The rows with these indices [n], in that order."""
        raise NotImplementedError

    def split(self, dim: int, part: int, parts: int) -> Self:
        """Part `part` of `parts` equal ones, along out (0) or in (1). Along in, only part 0 keeps the bias."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The whole matrix [out, in] in the compute dtype."""
        raise NotImplementedError

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """The format and its tensors by name, for backends that stack weights. None: the weight cannot be stacked."""
        return None

    def bytes(self) -> int:
        """Bytes held."""
        raise NotImplementedError

    def settle(self, kernels: Kernels) -> Weight:
        """The weight in the form that the backend multiplies fastest. It is not joined or split afterwards."""
        return self

    def join(self, others: list[Self]) -> Self | None:
        """[self; others] as one weight of this format, or None if that is impossible."""
        return None

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias)."""
        kernels, y = ctx.kernels, self.linear(x, ctx, around.get("norm"))
        if (delta := around.get("delta")) is not None:
            y = kernels.add_delta(y, delta)
        if (act := around.get("act")) is not None:
            y = kernels.activate(y, act)
        return y if (residual := around.get("residual")) is None else kernels.add(residual, y)

    def open(self, x: Tensor, ctx: ForwardContext, delta: Delta | None = None) -> Tensor | None:
        """x @ W.T + bias (and delta) as parts of a sum (`Kernels.open_product`); None: it is not made so."""
        return None

    def concat(self, others: list[Weight]) -> Weight:
        """[self; others] along out. Weights of one format become one weight; others are multiplied part by part."""
        if not others:
            return self
        same = [other for other in others if type(other) is type(self)]
        joined = self.join(same) if len(same) == len(others) else None
        if joined is not None:
            return joined
        return MixedWeight([self, *others])

    def part_range(self, dim: int, part: int, parts: int) -> tuple[int, int]:
        """The range of an equal part: (first, last + 1). A size that the parts do not divide is refused."""
        size = self.shape[dim]
        if size % parts:
            raise UnevenError(f"a matrix of {size} {('rows', 'columns')[dim]}", parts)
        return size // parts * part, size // parts * (part + 1)

    def part_index(self, part: int, parts: int, device: torch.device) -> Tensor:
        """The row numbers of an equal part along out."""
        start, stop = self.part_range(0, part, parts)
        return torch.arange(start, stop, device=device)


class MixedWeight(WeightBase):
    """[part; part; ...] along out, each part in its own format (Q4_K_M mixes two inside q/k/v)."""

    parts: list[Any]

    def __init__(self, parts: list[Weight]) -> None:
        flat: list[Any] = []
        for part in parts:
            flat.extend(part.parts if isinstance(part, MixedWeight) else [part])
        self.parts = flat
        self.starts = [0, *accumulate(part.shape[0] for part in flat)]
        self.shape = (self.starts[-1], flat[0].shape[1])

    def linear(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None) -> Tensor:
        """The outputs of all parts, side by side. Each part norms its input as one matrix of them all would, without
        rounding in between: a rank's parts may not join where the whole ones do."""
        return torch.cat([part.matmul(x, ctx, norm=norm) for part in self.parts], dim=-1)

    def settle(self, kernels: Kernels) -> Weight:
        """Settle each part."""
        self.parts = [part.settle(kernels) for part in self.parts]
        return self

    def concat(self, others: list[Weight]) -> Weight:
        """A longer mixture."""
        return MixedWeight([self, *others]) if others else self

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index. The index must not go back to an earlier part."""
        pieces = []
        for part, start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            here = index[(index >= start) & (index < stop)] - start
            if len(here):
                pieces.append(part.take(here))
        owner = torch.bucketize(index, torch.tensor(self.starts[1:], device=index.device), right=True)
        assert bool((owner[1:] >= owner[:-1]).all()), "rows of a mixed weight cannot be interleaved across its parts"
        return type(self)(pieces)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0, across the parts of different formats) or along in (1)."""
        if dim == 0:
            return self.take(self.part_index(part, parts, torch.device("cpu")))
        return type(self)([piece.split(1, part, parts) for piece in self.parts])

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in], gathered part by part."""
        return self.dense()[ids]

    def dense(self) -> Tensor:
        """The dense numbers of all parts."""
        return torch.cat([part.dense() for part in self.parts])

    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes() for part in self.parts)
