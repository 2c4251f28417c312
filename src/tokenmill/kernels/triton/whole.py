"""One token through a whole mixture of experts in one launch. Owns: the kernel in which all programs stay and meet.

Every program takes its share of the router's rows; they meet; each chooses the experts by itself and takes its share
of gate and up; they meet; then its share of down, of which the first part has been on its way since before. So the
memory has work while programs wait for each other. The launch must fit the chip at once: its size follows the number
of multiprocessors, registers are limited. The interpreter runs one program after the other: there each part is a
launch of its own (PHASE). Must not know: layers, other formats than plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.core.forward import NormSpec, RouteSpec
from tokenmill.kernels.triton.common import INTERPRETED, act_parts, begin, gated_act, plain_act, pow2, prefetch, wait
from tokenmill.kernels.triton.meeting import arrive, meet, read_once
from tokenmill.kernels.triton.route import NEAR_NEXT, _choose, _rank, bring, constants

ROUTER, UP, DOWN, ALL = 0, 1, 2, 3
"""Parts of the work; ALL: one after the other, with meetings between."""
_MOST = 16
"""Pieces of a down matrix's rows up to which the kernel may be written out."""


@dataclass(frozen=True, slots=True)
class Cut:
    """programs: a power of two that fits the chip at once. rows: of gate (and of up) at a time. piece: columns of down.
    early: pieces that are loaded before the second meeting. warps: per program."""

    programs: int
    rows: int
    piece: int
    early: int
    warps: int


@triton.jit
def _normed(x_ptr, norm_ptr, k, eps, H: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr):
    """x [1, BK] in float32, times the norm's weight; and by how much the norm shrinks it."""
    x = tl.load(x_ptr + k, mask=k < H, other=0.0).to(tl.float32)
    shrink = 1.0
    if NORM:
        shrink = 1.0 / tl.sqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / H + eps)
        x = x * (tl.load(norm_ptr + k, mask=k < H, other=0.0).to(tl.float32) + OFFSET)
    return x, shrink


@triton.jit
def _chosen(
    logit_ptr, bias_ptr, scale, E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr,
    ORDER: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """ids [BT] and gates [BT], best first; those beyond TOP mean nothing."""
    e = tl.arange(0, BE)
    logits = read_once(logit_ptr + e, e < E, TIMES)
    if GROUPS == 1 and BE <= 128:
        place, every = _rank(logits, scale, E, BE, TOP, ORDER, NORMALISE, bias_ptr, BIAS)
        here = place[None, :] == tl.arange(0, BT)[:, None]
        ids = tl.sum(tl.where(here, e[None, :], 0), axis=1)
        gates = tl.sum(tl.where(here, every[None, :], 0.0), axis=1)
    else:
        ids, gates = _choose(
            logits, bias_ptr, scale, E, BE, TOP, BT, ORDER, NORMALISE, BIAS, GROUPS, TOP_GROUPS, SUM2, BG
        )
    return ids, gates


@triton.jit
def _up_tile(
    up_ptr, ids, tile, k, H: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    TOTAL: tl.constexpr, BT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The tile's rows of gate and of up [BN, BK] (one of both if not gated)."""
    tile = tl.minimum(tile, TOTAL - 1)
    expert = tl.sum(tl.where(tl.arange(0, BT) == tile // TILES, ids, 0), axis=0).to(tl.int64)
    n = tl.minimum(tile % TILES * BN + tl.arange(0, BN), N - 1)
    rows = up_ptr + (expert * (2 * N if GATED else N) + n)[:, None] * H + k
    if H == BK:
        w = tl.load(rows, eviction_policy="evict_first")
    else:
        w = tl.load(rows, mask=k < H, other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        if H == BK:
            u = tl.load(rows + N * H, eviction_policy="evict_first")
        else:
            u = tl.load(rows + N * H, mask=k < H, other=0.0, eviction_policy="evict_first")
    return w, u


@triton.jit
def _up_done(
    x, shrink, w, u, ids, tile, bias_ptr, inner_ptr, N: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    TOTAL: tl.constexpr, BT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile and store it."""
    y = tl.sum(x * w.to(tl.float32), axis=1) * shrink
    n = tile % TILES * BN + tl.arange(0, BN)
    real = (n < N) & (tile < TOTAL)
    j = tile // TILES
    if BIAS:
        expert = tl.sum(tl.where(tl.arange(0, BT) == j, ids, 0), axis=0).to(tl.int64)
        spot = bias_ptr + expert * (2 * N if GATED else N) + n
        y += tl.load(spot, mask=real, other=0.0).to(tl.float32)
    if GATED:
        y_u = tl.sum(x * u.to(tl.float32), axis=1) * shrink
        if BIAS:
            y_u += tl.load(spot + N, mask=real, other=0.0).to(tl.float32)
        y = gated_act(y, y_u, ACT)
    else:
        y = plain_act(y, ACT)
    tl.store(inner_ptr + j * N + n, y.to(inner_ptr.dtype.element_ty), mask=real, cache_modifier=".cg")


@triton.jit
def _down_rows(
    down_ptr, ids, i: tl.constexpr, n, H: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, PIECES: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    """Where piece i of these columns' weights begins [BC, 1]: that of expert i // PIECES."""
    expert = tl.sum(tl.where(tl.arange(0, BT) == i // PIECES, ids, 0), axis=0).to(tl.int64)
    return down_ptr + (expert * H + tl.minimum(n, H - 1))[:, None] * N + i % PIECES * BI


@triton.jit
def _piece(
    down_ptr, ids, i: tl.constexpr, n, H: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, PIECES: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BI)[None, :]
    rows = _down_rows(down_ptr, ids, i, n, H, N, BT, PIECES, BI) + k
    return tl.load(rows, mask=i % PIECES * BI + k < N, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inner(inner_ptr, i: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr, BI: tl.constexpr):
    k = i % PIECES * BI + tl.arange(0, BI)[None, :]
    return tl.load(inner_ptr + i // PIECES * N + k, mask=k < N, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["lines"])
def _whole_kernel(
    x_ptr, norm_ptr, router_ptr, add_ptr, bias_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr, residual_ptr,
    near_ptr, logit_ptr, inner_ptr, out_ptr, count_ptr, lines, eps, scale,
    H: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    BI: tl.constexpr, EARLY: tl.constexpr, PROGRAMS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    UP_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEAR: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, ORDER: tl.constexpr,
    NORMALISE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr,
    BG: tl.constexpr, TIMES: tl.constexpr, PHASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    program = tl.program_id(0)
    k = tl.arange(0, BK)[None, :]
    e = program * BR + tl.arange(0, BR)
    ROUTES: tl.constexpr = PHASE == 0 or PHASE == 3
    if ROUTES:
        r = tl.load(router_ptr + e[:, None] * H + k, mask=(e < E)[:, None] & (k < H), other=0.0)
    wait(PDL)
    x, shrink = _normed(x_ptr, norm_ptr, k, eps, H, NORM, OFFSET)
    if ROUTES:
        y = tl.sum(x * r.to(tl.float32), axis=1) * shrink
        if ADD:
            y += tl.load(add_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        tl.store(logit_ptr + e, y, mask=e < E, cache_modifier=".cg")
    if PHASE == 3:
        goal = arrive(count_ptr, PROGRAMS)
        if NEAR:
            bring(near_ptr, program, PROGRAMS, lines)
        meet(count_ptr, goal)
    if PHASE != 0:
        ids, gates = _chosen(logit_ptr, bias_ptr, scale, E, BE, TOP, BT, ORDER, NORMALISE, BIAS,
                             GROUPS, TOP_GROUPS, SUM2, BG, TIMES)  # fmt: skip
        n = program * BC + tl.arange(0, BC)
        PIECES: tl.constexpr = (N + BI - 1) // BI
        COUNT: tl.constexpr = TOP * PIECES
        if PHASE != 2:
            TILES: tl.constexpr = (N + BN - 1) // BN
            TOTAL: tl.constexpr = TOP * TILES
            ROUNDS: tl.constexpr = (TOTAL + PROGRAMS - 1) // PROGRAMS
            tile = program * ROUNDS
            w, u = _up_tile(up_ptr, ids, tile, k, H, N, BN, BK, TILES, TOTAL, BT, GATED)
            for _ in range(ROUNDS - 1):
                w_next, u_next = _up_tile(up_ptr, ids, tile + 1, k, H, N, BN, BK, TILES, TOTAL, BT, GATED)
                _up_done(x, shrink, w, u, ids, tile, up_bias_ptr, inner_ptr,
                         N, BN, TILES, TOTAL, BT, ACT, GATED, UP_BIAS)  # fmt: skip
                w, u = w_next, u_next
                tile += 1
        if PHASE != 1:
            a = _piece(down_ptr, ids, 0, n, H, N, BT, PIECES, BI)
            b = a
            c = a
            if EARLY > 1:
                b = _piece(down_ptr, ids, 1, n, H, N, BT, PIECES, BI)
            if EARLY > 2:
                c = _piece(down_ptr, ids, 2, n, H, N, BT, PIECES, BI)
        if PHASE == 3 and NEAR:
            for i in tl.static_range(EARLY, COUNT):
                lines_of = tl.minimum(tl.arange(0, BI // 64) * 64, N - 1 - i % PIECES * BI)[None, :]
                prefetch(_down_rows(down_ptr, ids, i, n, H, N, BT, PIECES, BI) + lines_of)
        if PHASE != 2:
            _up_done(x, shrink, w, u, ids, tile, up_bias_ptr, inner_ptr,
                     N, BN, TILES, TOTAL, BT, ACT, GATED, UP_BIAS)  # fmt: skip
        if PHASE == 3:
            meet(count_ptr, arrive(count_ptr, PROGRAMS))
        if PHASE != 1:
            xa = _inner(inner_ptr, 0, N, PIECES, BI)
            xb = xa
            xc = xa
            if EARLY > 1:
                xb = _inner(inner_ptr, 1, N, PIECES, BI)
            if EARLY > 2:
                xc = _inner(inner_ptr, 2, N, PIECES, BI)
            acc = tl.zeros((BC, BI), dtype=tl.float32)
            extra = tl.zeros((BC,), dtype=tl.float32)
            for i in tl.static_range(COUNT):
                if i + EARLY < COUNT:
                    d = _piece(down_ptr, ids, i + EARLY, n, H, N, BT, PIECES, BI)
                    xd = _inner(inner_ptr, i + EARLY, N, PIECES, BI)
                else:
                    d = a
                    xd = xa
                here = tl.arange(0, BT) == i // PIECES
                gate = tl.sum(tl.where(here, gates, 0.0), axis=0)
                acc += (xa.to(tl.float32) * gate) * a.to(tl.float32)
                if DOWN_BIAS and i % PIECES == 0:
                    expert = tl.sum(tl.where(here, ids, 0), axis=0).to(tl.int64)
                    more = tl.load(down_bias_ptr + expert * H + n, mask=n < H, other=0.0)
                    extra += gate * more.to(tl.float32)
                if EARLY > 2:
                    a, xa, b, xb, c, xc = b, xb, c, xc, d, xd
                elif EARLY > 1:
                    a, xa, b, xb = b, xb, d, xd
                else:
                    a, xa = d, xd
            y = tl.sum(acc, axis=1) + extra
            if RESIDUAL:
                y += tl.load(residual_ptr + n, mask=n < H, other=0.0).to(tl.float32)
            tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < H)


def cut_for(up: Tensor, down: Tensor, chosen: int) -> Cut | None:
    """How one token's work is cut, weights [E, N', H] and [E, H, N]; None: it does not fit this kernel."""
    hidden, inner = down.shape[1:]
    if INTERPRETED:
        return Cut(4, 2, 16, 2, 4) if chosen * triton.cdiv(inner, 16) <= _MOST else None
    warps, piece = pow2(hidden) // 256, min(pow2(inner), 1024)
    if up.element_size() != 2 or not 4 <= warps <= 16 or piece < 128 or chosen * triton.cdiv(inner, piece) > _MOST:
        return None
    together = torch.cuda.get_device_properties().multi_processor_count * (16 // warps)
    return Cut(pow2(together + 1) // 2, 4, piece, 2, warps)


def whole(
    x: Tensor, router: tuple[Tensor, Tensor | None], norm: NormSpec | None, spec: RouteSpec,
    weights: tuple[Tensor, Tensor | None, Tensor, Tensor | None], act: str, residual: Tensor | None, *,
    cut: Cut, count: Tensor, pdl: bool, near: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [1, H]; router [E, H] and its bias; weights: up [E, N', H], its biases, down [E, H, N], its -> [1, H].

    residual + the sum over the chosen of gate * expert(norm(x)). count: an int32 zero at first, this kernel's only.
    near: a weight that is needed after the experts."""
    kind, gated = act_parts(act)
    up, up_bias, down, down_bias = weights
    hidden, inner = down.shape[1:]
    pieces = spec.top_k * triton.cdiv(inner, cut.piece)
    logits = torch.empty(spec.experts, dtype=torch.float32, device=x.device)
    middle = torch.empty((spec.top_k, inner), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    soon, lines = (near, min(near.nbytes, NEAR_NEXT) // 128) if near is not None and pdl else (middle, 0)
    for phase in (ROUTER, UP, DOWN) if INTERPRETED else (ALL,):
        _whole_kernel[(cut.programs,)](
            x, None if norm is None else norm.weight, *router, spec.bias, up, up_bias, down, down_bias, residual,
            soon.view(torch.uint8), logits, middle, out, count, lines,
            0.0 if norm is None else norm.eps, spec.scale,
            H=hidden, N=inner, BK=pow2(hidden), BR=pow2(triton.cdiv(spec.experts, cut.programs)), BN=cut.rows,
            BC=pow2(triton.cdiv(hidden, cut.programs)), BI=cut.piece, EARLY=min(cut.early, pieces),
            PROGRAMS=cut.programs, ACT=kind, GATED=gated, ADD=router[1] is not None, NORM=norm is not None,
            OFFSET=0.0 if norm is None else norm.offset, UP_BIAS=up_bias is not None, DOWN_BIAS=down_bias is not None,
            RESIDUAL=residual is not None, NEAR=lines > 0, **constants(spec),
            TIMES=max(1, 32 * cut.warps // pow2(spec.experts)), PHASE=phase, PDL=pdl,
            num_warps=cut.warps, maxnreg=128, launch_pdl=pdl,
        )  # fmt: skip
    return out
