"""Norms and activations by themselves, for as many rows as cuBLAS multiplies. Owns: one pass over each tensor.

Must not know: matrices, layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import NormSpec
from tokenmill.kernels.triton.common import act_parts, begin, gated_act, plain_act, pow2, wait


@triton.jit
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, D, x_stride, eps,
    BLOCK: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < D
    g = tl.load(weight_ptr + d, mask=real, other=0.0).to(tl.float32) + OFFSET
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + d, mask=real, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(real, x - tl.sum(x) / D, 0.0)
    y = x / tl.sqrt(tl.sum(x * x) / D + eps) * g
    if BIAS:
        y += tl.load(bias_ptr + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=real)


def norm(x: Tensor, spec: NormSpec, *, pdl: bool) -> Tensor:
    """x [..., D] -> the same shape and dtype."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = pow2(width)
    _norm_kernel[(flat.shape[0],)](
        flat, spec.weight, spec.bias, out, width, flat.stride(0), spec.eps,
        BLOCK=block, LAYER=spec.kind == "layer", BIAS=spec.bias is not None, OFFSET=spec.offset, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _act_kernel(
    x_ptr, out_ptr, D, x_stride,
    BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < D
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + d, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + D + d, mask=real, other=0.0).to(tl.float32)
        y = gated_act(x, up, ACT)
    else:
        y = plain_act(x, ACT)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=real)


def activate(x: Tensor, act: str, *, pdl: bool) -> Tensor:
    """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
    kind, gated = act_parts(act)
    width = x.shape[1] // 2 if gated else x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    block = min(2048, pow2(width))
    _act_kernel[(x.shape[0], triton.cdiv(width, block))](
        x, out, width, x.stride(0), BLOCK=block, ACT=kind, GATED=gated, PDL=pdl,
        num_warps=max(1, block // 512), launch_pdl=pdl,
    )  # fmt: skip
    return out
