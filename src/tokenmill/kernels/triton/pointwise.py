"""Norms and activations by themselves, for as many rows as cuBLAS multiplies. Owns: one pass over each tensor.

Must not know: matrices, layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec, Xielu
from tokenmill.kernels.triton.common import (
    act_parts,
    begin,
    gated_act,
    least_of,
    plain_act,
    pow2,
    sigmoid,
    softplus,
    wait,
)

WIDEST = 1 << 15
"""Entries of the longest row that a program norms."""


@triton.jit
def norm_row(x, g, bias_ptr, d, real, D, eps, LAYER: tl.constexpr, BIAS: tl.constexpr):
    """A row in float32, normed and times g; its D entries are those where it is `real`, the others are 0."""
    if LAYER:
        x = tl.where(real, x - tl.sum(x) / D, 0.0)
    y = x / tl.sqrt(tl.sum(x * x) / D + eps) * g
    if BIAS:
        y += tl.load(bias_ptr + d, mask=real, other=0.0).to(tl.float32)
    return y


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
    y = norm_row(x, g, bias_ptr, d, real, D, eps, LAYER, BIAS)
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
def norm_stored(x, weight_ptr, bias_ptr, d, real, D, eps, KIND: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr):
    """norm_row by stored weights; KIND: see NormSpec."""
    g = tl.load(weight_ptr + d, mask=real, other=0.0).to(tl.float32) + OFFSET
    return norm_row(x, g, bias_ptr, d, real, D, eps, KIND == "layer", BIAS)


@triton.jit
def add_row(
    x, y, scale, weight_ptr, bias_ptr, d, real, D, eps,
    KIND: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """x + scale * norm(y) of a row in float32, rounded to TYPE behind each step; KIND "none": there is no norm."""
    if KIND != "none":
        y = norm_stored(y, weight_ptr, bias_ptr, d, real, D, eps, KIND, BIAS, OFFSET).to(TYPE).to(tl.float32)
    return (x + (scale * y).to(TYPE).to(tl.float32)).to(TYPE)


@triton.jit
def add_sum(
    residual, total, scale, weight_ptr, bias_ptr, d, real, D, eps,
    KIND: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, PLAIN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """residual + scale * norm(total), of parts in float32. PLAIN: neither norm nor scale, so it is rounded once;
    else the sum is rounded before."""
    if PLAIN:
        y = (total + residual).to(TYPE)
    else:
        total = total.to(TYPE).to(tl.float32)
        y = add_row(residual, total, scale, weight_ptr, bias_ptr, d, real, D, eps, KIND, BIAS, OFFSET, TYPE)
    return y


@triton.jit
def _add_kernel(
    x_ptr, y_ptr, out_ptr, normed_ptr, D, x_stride, y_stride, scale,
    within_ptr, within_bias_ptr, within_eps, norm_ptr, norm_bias_ptr, norm_eps, times_ptr,
    WITHIN: tl.constexpr, WITHIN_BIAS: tl.constexpr, WITHIN_OFFSET: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, NORM_OFFSET: tl.constexpr, PARTS: tl.constexpr, PLAIN: tl.constexpr,
    TIMES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TIMES: the sum is multiplied by a number; PARTS: y is a sum that lies in so many parts; 0: it is whole."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < D
    if NORM != "none":
        g = tl.load(norm_ptr + d, mask=real, other=0.0).to(tl.float32) + NORM_OFFSET
    if TIMES:
        times = tl.load(times_ptr).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + row * x_stride + d, mask=real, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + d, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = y_ptr + (part * tl.num_programs(0) + row) * y_stride
        y += tl.load(at + d, mask=real, other=0.0)
    if PARTS > 0:
        total = add_sum(x, y, scale, within_ptr, within_bias_ptr, d, real, D, within_eps,
                        WITHIN, WITHIN_BIAS, WITHIN_OFFSET, PLAIN, out_ptr.dtype.element_ty)  # fmt: skip
    else:
        total = add_row(x, y, scale, within_ptr, within_bias_ptr, d, real, D, within_eps,
                        WITHIN, WITHIN_BIAS, WITHIN_OFFSET, out_ptr.dtype.element_ty)  # fmt: skip
    if TIMES:
        total = (total.to(tl.float32) * times).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d, total, mask=real)
    if NORM != "none":
        y = norm_row(total.to(tl.float32), g, norm_bias_ptr, d, real, D, norm_eps, NORM == "layer", NORM_BIAS)
        tl.store(normed_ptr + row * D + d, y.to(normed_ptr.dtype.element_ty), mask=real)


def stored_norm(spec: NormSpec | None, name: str) -> dict[str, Any]:
    """The arguments of a norm that a kernel calls `name`; None: it is not there."""
    if spec is None:
        pointers, constants = (None, None, 0.0), ("none", False, 0.0)
    else:
        pointers, constants = (spec.weight, spec.bias, spec.eps), (spec.kind, spec.bias is not None, spec.offset)
    low = dict(zip((f"{name}_ptr", f"{name}_bias_ptr", f"{name}_eps"), pointers, strict=True))
    high = dict(zip((name.upper(), f"{name.upper()}_BIAS", f"{name.upper()}_OFFSET"), constants, strict=True))
    return {**low, **high}


def can_add(x: Tensor, y: Tensor) -> bool:
    """Are these rows that programs add? y may be a sum in parts."""
    same = x.ndim == 2 and x.shape == y.shape[-2:] and y.dtype == (x.dtype if y.ndim == 2 else torch.float32)
    return same and x.numel() > 0 and x.shape[1] <= WIDEST


def add(
    x: Tensor, y: Tensor, scale: float, within: NormSpec | None, norm: NormSpec | None, times: Tensor | None, *,
    pdl: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(x + scale * within(y)) * times [T, D], and its norm, if there is one; y [T, D], or a sum in parts
    [parts, T, D]."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    y = y if y.ndim == 2 and y.stride(1) == 1 else y.contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    normed = None if norm is None else torch.empty_like(out)
    block, parts = pow2(width), 0 if y.ndim == 2 else y.shape[0]
    _add_kernel[(rows,)](
        x, y, out, normed, width, x.stride(0), y.stride(-2), float(scale),
        **stored_norm(within, "within"), **stored_norm(norm, "norm"), times_ptr=times, TIMES=times is not None,
        PARTS=parts, PLAIN=within is None and scale == 1.0, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // (512 if parts <= 4 else 256))), maxnreg=96, launch_pdl=pdl,
    )  # fmt: skip
    return out, normed


@triton.jit
def _xielu(x, weight_ptr):
    """See the descriptor. Near zero exp(x) - 1 is a sum of powers, because a difference would lose its digits."""
    above, below = tl.load(weight_ptr), tl.load(weight_ptr + 1)
    beta, eps = tl.load(weight_ptr + 2), tl.load(weight_ptr + 3)
    low = least_of(x, eps)
    near = low * (1.0 + low * (0.5 + low * (1.0 / 6 + low * (1.0 / 24 + low / 120))))
    less = tl.where(low > -0.1, near, tl.exp(low) - 1.0)
    return tl.where(x > 0, above * x * x, (less - x) * below) + beta * x


@triton.jit
def _act_kernel(
    x_ptr, weight_ptr, out_ptr, D, x_stride,
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
    elif ACT == "xielu":
        y = _xielu(x, weight_ptr)
    else:
        y = plain_act(x, ACT)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=real)


def activate(x: Tensor, act: str | Xielu, *, pdl: bool) -> Tensor:
    """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
    numbers = act.numbers if isinstance(act, Xielu) else None
    kind, gated = ("xielu", False) if isinstance(act, Xielu) else act_parts(act)
    width = x.shape[1] // 2 if gated else x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    block = min(2048, pow2(width))
    _act_kernel[(x.shape[0], triton.cdiv(width, block))](
        x, numbers, out, width, x.stride(0), BLOCK=block, ACT=kind, GATED=gated, PDL=pdl,
        num_warps=max(1, block // 512), launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(
    x_ptr, gate_ptr, out_ptr, D, x_stride, gate_stride,
    BLOCK: tl.constexpr, TIMES: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < D
    wait(PDL)
    gate = tl.load(gate_ptr + row * gate_stride + d // TIMES, mask=real, other=0.0).to(tl.float32)
    if ACT == "sigmoid":
        gate = sigmoid(gate)
    elif ACT == "softplus":
        gate = softplus(gate)
    else:
        gate = plain_act(gate, ACT)
    x = tl.load(x_ptr + row * x_stride + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, (x * gate).to(out_ptr.dtype.element_ty), mask=real)


def can_gate(x: Tensor, gate: Tensor) -> bool:
    """Are these rows, and does each number of the gate stand for as many columns?"""
    rows = x.ndim == 2 and gate.ndim == 2 and x.numel() > 0 and x.shape[0] == gate.shape[0]
    return rows and x.stride(1) == 1 and gate.stride(1) == 1 and x.shape[1] % gate.shape[1] == 0


def gated(x: Tensor, gate: Tensor, act: str, *, pdl: bool) -> Tensor:
    """act(gate) x [T, D], gate [T, D / n]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(2048, pow2(width))
    _gate_kernel[(rows, triton.cdiv(width, block))](
        x, gate, out, width, x.stride(0), gate.stride(0), BLOCK=block, TIMES=width // gate.shape[1], ACT=act, PDL=pdl,
        num_warps=max(1, block // 512), launch_pdl=pdl,
    )  # fmt: skip
    return out
