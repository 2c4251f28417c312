"""Weights in float8 (e4m3) in plain torch. Owns: rounding a matrix to float8, the exact values and the product.

    weight[n, k] ~ data[n, k] * scales[n, 0]                       a scale per row
    weight[n, k] ~ data[n, k] * scales[n // 128, k // 128]         a scale per block, as DeepSeek stores them
Must not know: weights as objects, layers, files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.kernels import row_stable

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
_PIECE = 4096
"""Rows that are rounded at a time, so that a large vocabulary needs no large temporary."""


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> float8 [N, K] and float32 scales [N, 1]: the largest magnitude of a row becomes 448."""
    data = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)
    for start in range(0, weight.shape[0], _PIECE):
        part = weight[start : start + _PIECE].float()
        scale = part.abs().amax(-1, keepdim=True) / LARGEST
        scales[start : start + _PIECE] = scale
        data[start : start + _PIECE] = (part / torch.where(scale > 0, scale, 1.0)).clamp_(-LARGEST, LARGEST).to(FP8)
    return data, scales


def widen(data: Tensor, scales: Tensor) -> Tensor:
    """The float32 values [N, K]."""
    if scales.shape[1] == 1 and scales.shape[0] == data.shape[0]:
        return data.float() * scales
    wide = scales.repeat_interleave(BLOCK, 0)[: data.shape[0]].repeat_interleave(BLOCK, 1)
    return data.float() * wide[:, : data.shape[1]]


def fp8_linear(x: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ (data * scales).T + bias -> [T, N] in x's dtype, in float32."""
    y = row_stable.linear(x.float(), widen(data, scales), None if bias is None else bias.float())
    return y.to(x.dtype)
