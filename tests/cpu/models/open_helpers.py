"""A backend that leaves sums in parts, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.adapters import Delta
from tokenmill.kernels.reference import ReferenceKernels


class Opened(ReferenceKernels):
    """Every product that may be left in parts is: three of K, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.added = self.read = 0

    def open_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, delta: Delta | None) -> Tensor | None:
        self.opened += 1
        cuts = zip(x.float().tensor_split(3, 1), weight.float().tensor_split(3, 1), strict=True)
        parts = torch.stack([a @ b.t() for a, b in cuts])
        if bias is not None:
            parts[0] += bias
        if delta is not None:
            if delta.site.gains is not None:
                return None
            self.added += 1
            low = self.adapt(x, delta.site, delta.slots)
            added = self.add_delta(torch.zeros_like(parts[0]), replace(delta, low=low))
            parts = torch.cat((parts, added[None]))
        return parts

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0, **given: Any) -> Tensor:
        self.read += y.ndim == 3
        return super().add(x, y, scale, **given)
