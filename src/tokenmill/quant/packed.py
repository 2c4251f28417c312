"""Weights that a backend may pack when they settle. Owns: what all these formats share: settling, and products, rows
and bytes of the packed form once there is one, before that of the stored form. Must not know: formats, layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from tokenmill.compute.forward import Around, ForwardContext, Kernels, StoredMatrix, Weight
from tokenmill.quant.base import WeightBase


class PackedWeight(WeightBase):
    """The base of formats that backends pack. A format implements `stored`, `stored_rows` and `forget`, which frees the
    stored numbers. A format that chooses between kinds overrides `settle`."""

    dtype: torch.dtype
    packed: Any = None

    def stored(self) -> StoredMatrix:
        """The matrix that a backend packs, or multiplies as it is. (compute/matrix.py lists the kinds.)"""
        raise NotImplementedError

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in] from the stored numbers."""
        raise NotImplementedError

    def stored_bytes(self) -> int:
        """Bytes of the stored numbers, without the bias."""
        return self.stored().nbytes

    def forget(self) -> None:
        """Free the stored numbers."""
        raise NotImplementedError

    def settle(self, kernels: Kernels) -> Weight:
        """Replace the stored numbers by the packed form, if the backend has one."""
        if self.packed is None:
            self.packed = kernels.pack(self.stored())
            if self.packed is not None:
                self.forget()
        return self

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias), in one operation where the backend can."""
        weight = self.stored() if self.packed is None else self.packed
        return ctx.kernels.product(x, weight, **around)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        found: Tensor = self.stored_rows(ids) if self.packed is None else self.packed.rows(ids, self.dtype)
        return found

    def dense(self) -> Tensor:
        """The whole matrix."""
        return self.rows(torch.arange(self.shape[0]))

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """The packed form's tensors, if the backend shows them."""
        found: tuple[Any, dict[str, Tensor | None]] | None = None if self.packed is None else self.packed.pieces()
        return found

    def bytes(self) -> int:
        """The bytes that a product reads."""
        if self.packed is not None:
            return int(self.packed.bytes())
        return self.stored_bytes() + (0 if self.bias is None else self.bias.nbytes)


class Biased(Protocol):
    """The part of a matrix that `joined_bias` reads."""

    shape: tuple[int, int]
    dtype: torch.dtype
    bias: Tensor | None


def joined_bias(parts: Sequence[Biased], device: torch.device) -> Tensor | None:
    """The biases of all parts, joined. If any part has a bias, missing ones count as zeros."""
    if all(part.bias is None for part in parts):
        return None
    zeros = (torch.zeros(part.shape[0], dtype=part.dtype, device=device) for part in parts)
    return torch.cat([none if part.bias is None else part.bias for part, none in zip(parts, zeros, strict=True)])
