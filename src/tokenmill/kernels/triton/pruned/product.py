"""A product with a 2:4 matrix. Owns: which kernel serves how many rows, and what is done with sums of cuSPARSELt.

Few rows read the packed form. Many go through sparse tensor cores, or, where a call would take the host longer than the
device, meet the matrix with its zeros. Activations of float8 are rounded row by row, as they are for dense ones.
Must not know: models, plans.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import Act, NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, wait
from tokenmill.kernels.triton.launch import Launch
from tokenmill.kernels.triton.pruned import library
from tokenmill.kernels.triton.pruned.activations import lay_out
from tokenmill.kernels.triton.pruned.few_rows import FEW, few_rows
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix, pack_pruned
from tokenmill.kernels.triton.quantised.narrow_round import round_rows

_UNRECORDED = 2048
"""Rows from which cuSPARSELt is worth its half millisecond of the host outside of recorded steps."""
_BLOCK = 1024


def pack_here(matrix: StoredMatrix) -> PrunedMatrix | None:
    """A 2:4 matrix in packed form; None: it is another, or this GPU was seen to read the form wrongly."""
    made = pack_pruned(matrix)
    return made if made is None or INTERPRETED or _is_right(torch.cuda.current_device(), made.dtype) else None


@functools.cache
def _is_right(device: int, dtype: torch.dtype) -> bool:
    """Which thread holds what in a multiplication was seen on one kind of GPU: a small product tells about this one."""
    random = torch.Generator(device=f"cuda:{device}").manual_seed(1)
    numbers = torch.randn(64, 96, 4, device=random.device, generator=random)
    order = torch.rand(numbers.shape, device=random.device, generator=random)
    numbers = numbers.scatter(2, order.topk(2, 2).indices, 0.0).flatten(1).to(dtype)
    small = dtype.itemsize == 1
    scales = (("scales", torch.ones(64, 1, device=random.device)),) if small else ()
    parts = (("codes" if small else "numbers", numbers), *scales)
    packed = pack_pruned(StoredMatrix("fp8" if small else "dense", (64, 384), parts, numbers.float))
    assert packed is not None, "its zeros were made so"
    x = torch.randn(11, 384, device=random.device, generator=random).to(torch.bfloat16 if small else dtype)
    laid, steps = lay_out(x, dtype, None, pdl=False)
    found = few_rows(laid, 11, steps, packed, None, None, torch.float32, pdl=False)
    return torch.allclose(found, x.float() @ numbers.float().t(), rtol=0.02, atol=0.2)


def pruned_way(x: Tensor, weight: PrunedMatrix) -> str:
    """How x is multiplied: "few" by few_rows.py, "library" through cuSPARSELt, or "expand": the matrix is to be given
    its zeros first."""
    rows = len(x)
    if weight.scales is None and x.dtype != weight.dtype:
        return "expand"
    if weight.in_library:
        library.ready(weight.dtype)
        many = rows > (16 if weight.scales is None else 8)
        if many and (rows >= _UNRECORDED or torch.cuda.is_current_stream_capturing()):
            return "library"
    return "few" if rows <= FEW else "expand"


def norms_inside(way: str, weight: PrunedMatrix, norm: NormSpec) -> bool:
    """Is the norm done while rows are laid out or rounded?"""
    return (way == "few" or weight.scales is not None) and norm.kind == "rms" and norm.bias is None


def pruned_product(
    launch: Launch,
    x: Tensor,
    weight: PrunedMatrix,
    norm: NormSpec | None,
    act: Act | None,
    residual: Tensor | None,
    way: str,
) -> Tensor:
    """residual + act(norm(x) @ weight.T + bias); norm: only where `norms_inside`."""
    dtype, steps, pdl = x.dtype, None, launch.pdl
    if way == "few":
        laid, steps = lay_out(x, weight.dtype, norm, pdl=pdl)
        return few_rows(laid, len(x), steps, weight, act, residual, dtype, pdl=pdl)
    if weight.scales is not None:
        x, steps = round_rows(x, weight.dtype, norm, pdl=pdl)
    y = library.multiply(x.contiguous(), weight.stored, weight.shape[0])
    if steps is None and weight.bias is None and act is None:
        return y if residual is None else y.add_(residual)
    return finished(y, steps, weight, act, residual, dtype, pdl=pdl)


@triton.jit
def _finish_kernel(
    y_ptr, step_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, N, y_stride, ACT: tl.constexpr, GATED: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = n < N
    wait(PDL)
    y = tl.load(y_ptr + row * y_stride + n, mask=real, other=0.0).to(tl.float32)
    up = y
    if GATED:
        up = tl.load(y_ptr + row * y_stride + N + n, mask=real, other=0.0).to(tl.float32)
    if SCALE:
        step = tl.load(step_ptr + row)
        y *= step * tl.load(scale_ptr + n, mask=real, other=0.0)
        if GATED:
            up *= step * tl.load(scale_ptr + N + n, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        y = gated_act(y, up, ACT)
    else:
        y = plain_act(y, ACT)
    if RESIDUAL:
        y += tl.load(residual_ptr + row * N + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=real)


def finished(
    y: Tensor, steps: Tensor | None, weight: PrunedMatrix, act: Act | None, residual: Tensor | None,
    dtype: torch.dtype, *, pdl: bool,
) -> Tensor:  # fmt: skip
    """residual + act(y * scales + bias) of sums y [M, N]."""
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((len(y), width), dtype=dtype, device=y.device)
    _finish_kernel[(len(y), triton.cdiv(width, _BLOCK))](
        y, steps, weight.scales, weight.bias, residual, out, width, y.stride(0), ACT=kind, GATED=gated,
        SCALE=steps is not None, BIAS=weight.bias is not None, RESIDUAL=residual is not None, BLOCK=_BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
