"""One token through its experts, and the sum over experts for any number of tokens.

Owns: two launches that stream the touched experts' weights once: gate and up with the norm before and the activation
after; down for all chosen experts, weighted, summed, with the residual. And the sum of results that other kernels left.
Must not know: how experts were chosen, layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, pow2, wait
from tokenmill.kernels.triton.experts.grouped import Stack
from tokenmill.kernels.triton.experts.route import bring

NEAR = 6 << 20
"""Bytes of the second launch's weights that the first one brings near when it ends."""


@triton.jit
def _of_blocks(blocks, start, K: tl.constexpr, BK: tl.constexpr):
    """The scales of blocks for columns start .. start + BK [1, BK]: sixteen of one thread's are asked for once."""
    unit = start + tl.arange(0, BK // 16)[None, :] * 16
    found = tl.load(blocks + tl.minimum(unit, K - 1) // 128)
    return tl.reshape(tl.broadcast_to(found[:, :, None], (1, BK // 16, 16)), (1, BK))


@triton.jit
def _up_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, id_ptr, near_ptr, out_ptr, E, size, eps,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALING: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    real = n < N
    safe = tl.where(real, n, 0)
    wait(PDL)
    # Only now: whoever starts next may read the ids without waiting for this launch.
    begin(PDL)
    expert = tl.load(id_ptr + j).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    ROWS: tl.constexpr = 2 * N if GATED else N
    EVEN: tl.constexpr = K % BK == 0
    rows = w_ptr + (expert * ROWS + safe[:, None]) * K + k
    if EVEN:
        w = tl.load(rows, eviction_policy="evict_first")
    else:
        w = tl.load(rows, mask=k < K, other=0.0, eviction_policy="evict_first")
    if GATED:
        if EVEN:
            u = tl.load(rows + N * K, eviction_policy="evict_first")
        else:
            u = tl.load(rows + N * K, mask=k < K, other=0.0, eviction_policy="evict_first")
    if LINES > 0:
        if j == tl.num_programs(1) - 1:
            # The last ones to start bring the beginnings of the next launch's matrices near, so that memory is not
            # idle between the two.
            near = tl.load(id_ptr + tl.program_id(0) % tl.num_programs(1)).to(tl.int64)
            near = tl.where((near < 0) | (near >= E), 0, near)
            part = tl.program_id(0) // tl.num_programs(1)
            parts = tl.cdiv(tl.num_programs(0), tl.num_programs(1))
            bring(near_ptr + near * size, part, parts, LINES)
    if SCALING == 2:
        LONG: tl.constexpr = (K + 127) // 128
        TALL: tl.constexpr = (ROWS + 127) // 128
        blocks = scale_ptr + (expert * TALL + tl.program_id(0) * BN // 128) * LONG
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    if GATED:
        acc_u = tl.zeros((BN, BK), dtype=tl.float32)
    if NORM:
        squares = tl.zeros((1, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start + BK < K:
            w_next = tl.load(rows + (start + BK), mask=start + BK + k < K, other=0.0, eviction_policy="evict_first")
            if GATED:
                u_next = tl.load(
                    rows + (N * K + start + BK), mask=start + BK + k < K, other=0.0, eviction_policy="evict_first"
                )
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * (tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32) + OFFSET)
        if SCALING == 2:
            acc += x * _of_blocks(blocks, start, K, BK) * w.to(tl.float32)
            if GATED:
                acc_u += x * _of_blocks(blocks + N // 128 * LONG, start, K, BK) * u.to(tl.float32)
        else:
            acc += x * w.to(tl.float32)
            if GATED:
                acc_u += x * u.to(tl.float32)
        if start + BK < K:
            w = w_next
            if GATED:
                u = u_next
    y = tl.sum(acc, axis=1)
    if GATED:
        y_u = tl.sum(acc_u, axis=1)
    if SCALING == 1:
        y *= tl.load(scale_ptr + expert * ROWS + safe)
        if GATED:
            y_u *= tl.load(scale_ptr + expert * ROWS + N + safe)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
        y = y * scale
        if GATED:
            y_u = y_u * scale
    if BIAS:
        y += tl.load(bias_ptr + expert * ROWS + n, mask=real, other=0.0).to(tl.float32)
        if GATED:
            y_u += tl.load(bias_ptr + expert * ROWS + N + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        y = gated_act(y, y_u, ACT)
    else:
        y = plain_act(y, ACT)
    tl.store(out_ptr + j * N + n, y.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _down_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, id_ptr, gate_ptr, residual_ptr, out_ptr, E,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr,
    SCALING: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # Row r of a tile: expert r // BN in the order of choice, output column r % BN.
    r = tl.arange(0, BT * BN)
    j = r // BN
    n = tl.program_id(0) * BN + r % BN
    k = tl.arange(0, BK)[None, :]
    if not EARLY:
        wait(PDL)
    expert = tl.load(id_ptr + j, mask=j < TOP, other=-1).to(tl.int64)
    gate = tl.load(gate_ptr + j, mask=j < TOP, other=0.0)
    real = (n < N) & (expert >= 0) & (expert < E)
    rows = w_ptr + (tl.where(real, expert, 0) * N + tl.where(real, n, 0))[:, None] * K + k
    w = tl.load(rows, mask=real[:, None] & (k < K), other=0.0, eviction_policy="evict_first")
    if SCALING == 2:
        LONG: tl.constexpr = (K + 127) // 128
        blocks = scale_ptr + (tl.where(real, expert, 0) * ((N + 127) // 128) + tl.where(real, n, 0) // 128) * LONG
    if EARLY:
        wait(PDL)
    acc = tl.zeros((BT * BN, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start + BK < K:
            w_next = tl.load(
                rows + (start + BK), mask=real[:, None] & (start + BK + k < K), other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
        x = tl.load(x_ptr + j[:, None] * K + start + k, mask=real[:, None] & (start + k < K), other=0.0)
        if SCALING == 2:
            acc += x.to(tl.float32) * w.to(tl.float32) * tl.load(blocks + start // 128)[:, None]
        else:
            acc += x.to(tl.float32) * w.to(tl.float32)
        if start + BK < K:
            w = w_next
    y = tl.sum(acc, axis=1)
    if SCALING == 1:
        y *= tl.load(scale_ptr + expert * N + n, mask=real, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + expert * N + n, mask=real, other=0.0).to(tl.float32)
    y = tl.where(real, y * gate, 0.0)
    y = tl.sum(tl.reshape(y, (BT, BN)), axis=0)
    out = tl.program_id(0) * BN + tl.arange(0, BN)
    if RESIDUAL:
        y += tl.load(residual_ptr + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, y.to(out_ptr.dtype.element_ty), mask=out < N)


def one_up(
    x: Tensor, weight: Stack, ids: Tensor, norm: NormSpec | None, act: str, *, pdl: bool,
    near: Tensor | None = None,
    config: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x [1, K], weight [E, N, K], ids [1, k] -> act(norm(x) @ weight[id].T + bias[id]) per chosen expert [k, N'].

    near: what the next launch multiplies by, [E, ...]. config (BN, BK, warps). Rows of ids that belong to no expert are
    left undefined."""
    kind, gated = act_parts(act)
    count, rows, inner = weight.table.shape
    width = rows // 2 if gated else rows
    block_n, block_k, warps = config or up_config(inner, weight.scaling)
    out = torch.empty((ids.shape[1], width), dtype=x.dtype, device=x.device)
    size = 0 if near is None or not pdl else near[0].nbytes
    _up_kernel[(triton.cdiv(width, block_n), ids.shape[1])](
        x, weight.table, weight.scales, weight.bias, None if norm is None else norm.weight, ids,
        None if near is None else near.view(torch.uint8), out, count, size, 0.0 if norm is None else norm.eps,
        N=width, K=inner, BN=block_n, BK=block_k, SCALING=weight.scaling, ACT=kind, GATED=gated,
        BIAS=weight.bias is not None,
        NORM=norm is not None, OFFSET=0.0 if norm is None else norm.offset,
        LINES=min(size, NEAR // ids.shape[1]) // 128, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def up_config(inner: int, scaling: int) -> tuple[int, int, int]:
    """(BN, BK, warps): measured on an H200. Rows are asked for at once, or in even pieces if they are long."""
    if INTERPRETED:
        return 8, 64, 1
    if scaling:
        return 1, pow2(inner) if inner <= 2048 else 1024, 1
    if inner <= 2048:
        return 2, pow2(inner), 4
    if inner == 4096:
        return 2, 4096, 8
    block_k = min(1024, inner & -inner)
    return (2, 1024, 4) if block_k < 256 else (max(2, 1024 // block_k), block_k, 4)


def one_down(
    x: Tensor, weight: Stack, picked: tuple[Tensor, Tensor], residual: Tensor | None, *, pdl: bool,
    early: bool, config: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x [k, K], weight [E, N, K], picked (ids [1, k], gates [1, k]) -> residual + sum over j of gate * product [1, N].

    early: the launch before this one waits before it lets this one start (`one_up`), so ids may be read at once.
    config (BN, BK, warps)."""
    ids, gates = picked
    count, width, inner = weight.table.shape
    block_n, block_k, warps = config or down_config(inner, ids.shape[1], weight.scaling)
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    _down_kernel[(triton.cdiv(width, block_n),)](
        x, weight.table, weight.scales, weight.bias, ids, gates, residual, out, count,
        N=width, K=inner, BN=block_n, BK=block_k, TOP=ids.shape[1], BT=pow2(ids.shape[1]), SCALING=weight.scaling,
        BIAS=weight.bias is not None, RESIDUAL=residual is not None, EARLY=early, PDL=pdl, num_warps=warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def down_config(inner: int, chosen: int, scaling: int) -> tuple[int, int, int]:
    """(BN, BK, warps) for so many experts: measured on an H200. A piece lies within one block of scales."""
    if INTERPRETED:
        return 8, 64, 1
    if scaling:
        return 2, 128 if chosen > 16 or scaling == 2 else 256, 2
    many = chosen > 16 or (chosen > 8 and inner > 512)
    return 2, 128 if many or inner % 256 else 256, 2


@triton.jit
def _combine_kernel(
    part_ptr, id_ptr, gate_ptr, residual_ptr, out_ptr, N, E,
    TOP: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    if RESIDUAL:
        beside = tl.load(residual_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        expert = tl.load(id_ptr + token * TOP + j)
        part = tl.load(part_ptr + (token * TOP + j) * N + n, mask=n < N, other=0.0)  # anything, if it is not here
        here = (expert >= 0) & (expert < E)
        y += tl.where(here, part.to(tl.float32), 0.0) * tl.load(gate_ptr + token * TOP + j)
    if RESIDUAL:
        y += beside
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def combine(
    parts: Tensor, ids: Tensor, gates: Tensor, residual: Tensor | None, experts: int, dtype: torch.dtype, *, pdl: bool
) -> Tensor:
    """parts [T * k, N] -> residual + sum over j = 0..k-1, in this order, of gates[t, j] * parts[t * k + j], [T, N]."""
    tokens, top = ids.shape
    width = parts.shape[1]
    out = torch.empty((tokens, width), dtype=dtype, device=parts.device)
    block = min(1024, pow2(width))
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        parts, ids, gates, residual, out, width, experts, TOP=top, BLOCK=block, RESIDUAL=residual is not None,
        PDL=pdl, num_warps=max(1, block // 256), maxnreg=96, launch_pdl=pdl,
    )  # fmt: skip
    return out
