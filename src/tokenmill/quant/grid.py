"""Integer weights with one float16 scale per group of a row: int8 and int4. Owns: rounding to them, and the format.

    weight[n, k] ~ q[n, k] * scale[n, k // group]         int8: -127..127     int4: -8..7
Must not know: checkpoints, layers, instruction sets. After settling, only the backend's packed form is held.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import Act, ForwardContext, NormSpec
from tokenmill.core.protocols import Kernels
from tokenmill.kernels.rows import group_width
from tokenmill.quant.base import WeightBase

LOWEST = {8: -127, 4: -8}
HIGHEST = {8: 127, 4: 7}


class GridWeight(WeightBase):
    """q [out, in] int8 and scales [out, ceil(in / group)] float16; `bits` is 8 or 4."""

    def __init__(
        self, q: Tensor, scales: Tensor, *, bits: int, group: int, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        self.q: Tensor | None = q.contiguous()
        self.scales: Tensor | None = scales.contiguous()
        self.bits, self.group, self.dtype = bits, group, dtype
        self.bias = bias
        self.packed: Any = None
        self.shape = (q.shape[0], q.shape[1])

    def settle(self, kernels: Kernels) -> None:
        """Keep the packed form instead, where the backend has one."""
        if self.q is not None and self.scales is not None:
            self.packed = kernels.pack_grid(self.q, self.scales, self.bits, self.bias)
            if self.packed is not None:
                self.q = self.scales = None

    def matmul(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ W.T + bias), in one operation where the backend can."""
        if self.q is None:
            return ctx.kernels.fused_linear(x, self.packed, norm=norm, act=act, residual=residual)
        return super().matmul(x, ctx, norm=norm, act=act, residual=residual)

    def linear(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out]."""
        if self.q is None or self.scales is None:
            return self.matmul(x, ctx)
        return ctx.kernels.grid_linear(x, self.q, self.scales, self.bias)

    def join(self, others: list[Self]) -> Self | None:
        """One matrix of the same grid; absent biases count as zeros where any part has one."""
        every = [self, *others]
        if len({(part.bits, part.group, part.dtype) for part in every}) > 1:
            return None
        bias = None
        if any(part.bias is not None for part in every):
            bias = torch.cat([torch.zeros(p.shape[0], dtype=p.dtype) if p.bias is None else p.bias for p in every])
        parts = [part._parts() for part in every]
        return self._like(torch.cat([q for q, _ in parts]), torch.cat([s for _, s in parts]), bias)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        q, scales = self._parts()
        return self._like(q[index], scales[index], None if self.bias is None else self.bias[index])

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or, on group borders, along in (1)."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        q, scales = self._parts()
        if dim == 0:
            return self._like(q[start:stop], scales[start:stop], None if self.bias is None else self.bias[start:stop])
        if start % self.group or stop % self.group:
            raise ModelError(f"Groups of {self.group} cannot be split over {parts} ranks at column {start or stop}.")
        first, last = start // self.group, stop // self.group
        return self._like(q[:, start:stop], scales[:, first:last], self.bias if part == 0 else None)

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        if self.q is None or self.scales is None:
            found: Tensor = self.packed.rows(ids, self.dtype)
            return found
        return widen(self.q[ids], self.scales[ids]).to(self.dtype)

    def dense(self) -> Tensor:
        """The whole matrix."""
        return self.rows(torch.arange(self.shape[0]))

    def bytes(self) -> int:
        """Bytes that a matmul reads."""
        if self.q is None or self.scales is None:
            return int(self.packed.bytes())
        extra = 0 if self.bias is None else self.bias.nbytes
        return self.q.numel() * self.bits // 8 + self.scales.nbytes + extra

    def _parts(self) -> tuple[Tensor, Tensor]:
        assert self.q is not None and self.scales is not None, "a settled weight is not taken apart"
        return self.q, self.scales

    def _like(self, q: Tensor, scales: Tensor, bias: Tensor | None) -> Self:
        return type(self)(q, scales, bits=self.bits, group=self.group, dtype=self.dtype, bias=bias)


def quantise(weight: Tensor, bits: int, group: int = 32) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> q int8 and scales float16, rounded to nearest.

    int8 scales by the largest magnitude; int4 lets the entry of largest magnitude become exactly -8, so that the
    longer side of the range is used.
    """
    rows, columns = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -columns % group)).view(rows, -1, group)
    top = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    scales = (top.abs() / 127.0 if bits == 8 else top / -8.0).half()
    steps = scales.float()
    q = torch.where(steps != 0, wide / steps, 0.0).round_().clamp_(LOWEST[bits], HIGHEST[bits]).to(torch.int8)
    return q.view(rows, -1)[:, :columns].contiguous(), scales[..., 0]


def widen(q: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [n, in] of a grid."""
    wide = scales.float().repeat_interleave(group_width(q.shape[1], scales.shape[1]), dim=1)
    return q.float() * wide[:, : q.shape[1]]


def quantised(weight: Tensor, bias: Tensor | None, scheme: str) -> GridWeight:
    """A dense matrix as `--quantization` asks: int8 or int4, groups of 32."""
    bits = {"int8": 8, "int4": 4}[scheme]
    q, scales = quantise(weight, bits)
    return GridWeight(q, scales, bits=bits, group=32, dtype=weight.dtype, bias=bias)
