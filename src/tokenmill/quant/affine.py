"""Integers with a scale and an offset per 16 or 32 columns. Owns: the settled form of what no packed form holds.

    weight[n, k] = q[n, k] * scale[n, k // group] + offset[n, k // group]
Must not know: files, names, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import StoredMatrix
from tokenmill.kernels.grid import widen_affine
from tokenmill.quant.packed import PackedWeight


class AffineWeight(PackedWeight):
    """The file's own integers q [out, in] int8, with scale and offset [out, in / group] float32. It is made when a
    weight settles, so it is never joined or split."""

    def __init__(
        self, q: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self.tensors = {"codes": q, "scales": scale} | ({} if offset is None else {"offsets": offset})
        self.dtype, self.bias = dtype, bias
        self.shape = (q.shape[0], q.shape[1])

    def stored(self) -> StoredMatrix:
        """A matrix of kind "affine"."""
        return StoredMatrix("affine", self.shape, tuple(self.tensors.items()), self.dense, self.bias)

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        rows = {name: tensor[ids] for name, tensor in self.tensors.items()}
        return widen_affine(rows["codes"], rows["scales"], rows.get("offsets")).to(self.dtype)

    def forget(self) -> None:
        """Free the stored numbers: the packed form has them."""
        self.tensors = {}
