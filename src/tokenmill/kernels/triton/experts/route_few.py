"""Norm, router and choice of a few tokens in one launch. Owns: the kernel that splits the router's columns.

A program multiplies its columns of the router with all tokens on tensor cores; the programs meet; each adds the parts
of its own tokens in order, chooses their experts, and writes their normed rows. Further programs bring weights near
meanwhile. Activations are split in two halves of bf16, so that products are nearly exact. Must not know: experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec, RouteSpec
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, multiprocessors, pow2, wait
from tokenmill.kernels.triton.experts.grid_barrier import arrive, meet
from tokenmill.kernels.triton.experts.route import (
    NEAR_EXPERTS,
    _choose,
    _room,
    bring,
    constants,
    near_lines,
    write_shared,
)

_PARTS, _CHOICE, _BOTH = 0, 1, 2


@triton.jit(do_not_specialize=["tokens", "lines"])
def _pick_few_kernel(
    x_ptr, w_ptr, add_ptr, norm_ptr, bias_ptr, near_ptr, h_ptr, id_ptr, gate_ptr, part_ptr, square_ptr, count_ptr,
    tokens, lines, eps, scale,
    K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, SPLIT: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr, NEAR: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, ORDER: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr, SHARED: tl.constexpr, PHASE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    program = tl.program_id(0)
    WIDTH: tl.constexpr = TOP + (1 if SHARED > 0 else 0)
    if NEAR:
        if program >= SPLIT:
            bring(near_ptr, program - SPLIT, tl.num_programs(0) - SPLIT, lines)
            wait(PDL)
            return
    e = tl.arange(0, BE)
    m = tl.arange(0, BM)
    k = program * BK + tl.arange(0, BK)
    if PHASE != 1:
        w = tl.load(w_ptr + e[:, None] * K + k[None, :], mask=(e < E)[:, None] & (k < K)[None, :], other=0.0)
        g = tl.full((BK,), 1.0, dtype=tl.float32)
        if NORM:
            g = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + OFFSET
    wait(PDL)
    if PHASE != 1:
        x = tl.load(
            x_ptr + m[None, :].to(tl.int64) * K + k[:, None], mask=(m < tokens)[None, :] & (k < K)[:, None], other=0.0
        ).to(tl.float32)
        squares = tl.sum(x * x, axis=0)
        x = x * g[:, None]
        if WIDE:
            y = tl.dot(w.to(tl.float32), x, input_precision="ieee")
        else:
            high = x.to(w.dtype)
            y = tl.dot(w, high)
            y = tl.dot(w, (x - high.to(tl.float32)).to(w.dtype), y)
        # Parts: [token, split, expert].
        place = part_ptr + (m[None, :] * SPLIT + program) * BE + e[:, None]
        tl.store(place, y, mask=(m < tokens)[None, :], cache_modifier=".cg")
        tl.store(square_ptr + m * SPLIT + program, squares, mask=m < tokens, cache_modifier=".cg")
        if SHARED == 2:
            last = tl.load(w_ptr + E * K + k, mask=k < K, other=0.0).to(tl.float32)
            own = tl.sum(x * last[:, None], axis=0)
            tl.store(square_ptr + (BM + m) * SPLIT + program, own, mask=m < tokens, cache_modifier=".cg")
    if PHASE == 2:
        meet(count_ptr, arrive(count_ptr, SPLIT))
    if PHASE != 0:
        s = tl.arange(0, SPLIT)
        for token in range(program, tokens, SPLIT):
            parts = tl.load(part_ptr + (token * SPLIT + s[:, None]) * BE + e[None, :], cache_modifier=".cg")
            logits = tl.sum(parts, axis=0)
            logit = 0.0
            if SHARED == 2:
                logit = tl.sum(tl.load(square_ptr + (BM + token) * SPLIT + s, cache_modifier=".cg"), axis=0)
            if NORM:
                whole = tl.sum(tl.load(square_ptr + token * SPLIT + s, cache_modifier=".cg"), axis=0)
                shrink = 1.0 / tl.sqrt(whole / K + eps)
                logits = logits * shrink
                logit = logit * shrink
                at = tl.arange(0, BH)
                row = token * K + at
                x_row = tl.load(x_ptr + row, mask=at < K, other=0.0).to(tl.float32) * shrink
                g_row = tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32) + OFFSET
                tl.store(h_ptr + row, (x_row * g_row).to(h_ptr.dtype.element_ty), mask=at < K)
            if ADD:
                logits += tl.load(add_ptr + e, mask=e < E, other=0.0).to(tl.float32)
            logits = tl.where(e < E, logits, float("-inf"))
            _choose(logits, bias_ptr, id_ptr + token * WIDTH, gate_ptr + token * WIDTH, scale, E, BE, TOP, BT, ORDER,
                    NORMALISE, EPS, FLOOR, BIAS, GROUPS, TOP_GROUPS, SUM2, BG)  # fmt: skip
            write_shared(id_ptr, gate_ptr, token, logit, E, TOP, SHARED)


def splits(x: Tensor, weight: Tensor, experts: int) -> bool:
    """Are there tokens enough (measured on an H200), does a program's part of the router fit its registers, and do all
    programs fit on the chip at once?"""
    if INTERPRETED:
        return True
    if x.dtype != weight.dtype or weight.element_size() != 2 or x.shape[1] > 8192:
        return False
    if x.shape[0] <= 16 or pow2(experts) * _columns(x.shape[1]) > 1 << 14:
        return False
    return _programs(x.shape[1]) <= multiprocessors()


def _columns(inner: int) -> int:
    """Columns of one program."""
    return max(16, pow2(triton.cdiv(inner, 4 if INTERPRETED else 32 if inner <= 2048 else 128)))


def _programs(inner: int) -> int:
    """How many meet."""
    return pow2(triton.cdiv(inner, _columns(inner)))


def pick_few(
    x: Tensor, weight: Tensor, add: Tensor | None, norm: NormSpec | None, spec: RouteSpec, *,
    scratch: Scratch, count: Tensor, pdl: bool, near: Tensor | None = None, shared: int = 0,
    config: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, K], router [E, K] and its bias -> ids [T, k] (int32), gates [T, k], and norm(x) [T, K].

    count: an int32 zero at first, this kernel's only, for one config. near: weights whose beginning is needed soon.
    config (programs, warps): programs a power of two."""
    tokens, inner = x.shape
    split, warps = config or (_programs(inner), 4)
    ids, gates = _room(tokens, spec, shared, torch.int32, x.device)
    h = x if norm is None else torch.empty_like(x)
    block_m, block_e = max(16, pow2(tokens)), max(16, pow2(spec.experts))
    soon, lines, parts = near_lines(near if pdl else None, gates, NEAR_EXPERTS)
    partial = scratch.partial(x.device)
    squares = partial[block_m * split * block_e :]
    wide = INTERPRETED or weight.dtype == torch.float32 or x.dtype == torch.float32
    for phase in (_PARTS, _CHOICE) if INTERPRETED else (_BOTH,):
        _pick_few_kernel[(split + parts,)](
            x, weight, add, None if norm is None else norm.weight, spec.bias, soon, h, ids, gates, partial, squares,
            count, tokens, lines, 0.0 if norm is None else norm.eps, spec.scale,
            K=inner, BK=max(16, pow2(triton.cdiv(inner, split))), BM=block_m, BH=pow2(inner), SPLIT=split,
            ADD=add is not None, NORM=norm is not None, OFFSET=0.0 if norm is None else norm.offset, WIDE=wide,
            NEAR=parts > 0, **constants(spec, shared) | {"BE": block_e}, PHASE=phase, PDL=pdl,
            num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return ids, gates, h
