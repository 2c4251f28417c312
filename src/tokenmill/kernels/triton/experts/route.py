"""Which experts a token goes to. Owns: scores, groups, the best k and their gates, in one launch.

A program takes one token; all experts lie in one register tensor. Behind the chosen experts may stand one that every
token visits (number E), with a gate of its own: the sigmoid of the router's last row, or 1. For few tokens norm and
router's product are part of the launch: the program that finishes a token last chooses. Memory is idle meanwhile:
further programs bring weights near that are needed soon. Must not know: what experts compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import NormSpec, RouteSpec
from tokenmill.kernels.triton.common import INTERPRETED, Scratch, begin, pow2, prefetch, sigmoid, wait

NEAR_EXPERTS = 24 << 20
NEAR_NEXT = 20 << 20
"""Bytes to bring near: of experts that several tokens probably touch, of what comes after one token's experts."""
_PARTS = 132
SHARED_PLAIN, SHARED_GATED = 1, 2
"""An expert that every token visits stands behind those that are chosen: with gate 1, with the router's last row."""
_ORDERS = {"softmax_topk": 0, "topk_softmax": 1, "sigmoid_topk": 2, "topk_sigmoid": 3, "sparsemixer": 5}
"""Odd ones choose by logits."""


@triton.jit
def bring(near_ptr, part, parts, lines):
    """Ask for this part's share of so many lines of 128 bytes."""
    each = tl.cdiv(lines, parts)
    for at in range(0, each, 256):
        line = tl.minimum(part * each + at + tl.arange(0, 256), lines - 1)
        prefetch(near_ptr + line.to(tl.int64) * 128)


@triton.jit
def _lowest_best(values, free, index):
    """The lowest index of the largest value among those that are free; NaN counts as the largest."""
    key = tl.where(values != values, float("inf"), values)
    key = tl.where(free, key, float("-inf"))
    best = tl.max(key, axis=0)
    return tl.min(tl.where(free & (key == best), index, 2147483647), axis=0)


@triton.jit
def _within_groups(
    choice, e, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr
):
    """Put every expert outside the best groups out of reach."""
    PER: tl.constexpr = E // GROUPS
    g = tl.arange(0, BG)
    group = e // PER
    ranks = tl.full((BG,), float("-inf"), dtype=tl.float32)
    for i in tl.static_range(GROUPS):
        inside = tl.where((group == i) & (e < E), choice, float("-inf"))
        first = tl.max(inside, axis=0)
        if SUM2:
            at = tl.min(tl.where(inside == first, e, 2147483647), axis=0)
            first += tl.max(tl.where(e == at, float("-inf"), inside), axis=0)
        ranks = tl.where(g == i, first, ranks)
    free = g < GROUPS
    kept = e < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = _lowest_best(ranks, free, g)
        free = free & (g != best)
        kept = kept | (group == best)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _scored(logits, bias_ptr, e, E: tl.constexpr, ORDER: tl.constexpr, BIAS: tl.constexpr):
    """What gates are made of, and what experts are chosen by."""
    if ORDER == 0:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    elif ORDER == 2:
        scores = sigmoid(logits)
    else:
        scores = logits
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    return scores, choice


@triton.jit
def _weighed(
    scores, chosen, scale, ORDER: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr
):
    """The chosen experts' scores -> their gates. Those of others mean nothing."""
    gates = scores
    if ORDER == 1:
        gates = tl.exp(scores - tl.max(tl.where(chosen, scores, float("-inf")), axis=0))
        gates = gates / tl.sum(tl.where(chosen, gates, 0.0), axis=0)
    elif ORDER == 3:
        gates = sigmoid(scores)
    if NORMALISE and ORDER != 1 and ORDER != 5:
        whole = tl.sum(tl.where(chosen, gates, 0.0), axis=0)
        gates = gates / (tl.where(whole < FLOOR, FLOOR, whole) + EPS)
    return gates * scale


@triton.jit
def _share_of_near(logits, free, at, e, JITTER: tl.constexpr):
    """The softmax of an expert among those that are free and near it."""
    logits = tl.where(free, logits, 0.0)
    best = tl.sum(tl.where(e == at, logits, 0.0), axis=0)
    near = best - logits <= 2.0 * JITTER * tl.where(tl.abs(logits) > best, tl.abs(logits), best)
    return 1.0 / tl.sum(tl.where(free & near, tl.exp(tl.where(near, logits - best, 0.0)), 0.0), axis=0)


@triton.jit
def _pick_experts(
    logits, bias_ptr, scale, E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr,
    ORDER: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """logits [BE] in float32, -inf beyond E -> ids [BT] and gates [BT] of the best TOP, best first."""
    e = tl.arange(0, BE)
    t = tl.arange(0, BT)
    scores, choice = _scored(logits, bias_ptr, e, E, ORDER, BIAS)
    if GROUPS > 1:
        choice = _within_groups(choice, e, E, GROUPS, TOP_GROUPS, SUM2, BG)
    free = e < E
    ids = tl.zeros((BT,), dtype=tl.int32)
    chosen = tl.zeros((BT,), dtype=tl.float32)
    for j in tl.static_range(TOP):
        best = _lowest_best(choice, free, e)
        if ORDER == 5:
            score = _share_of_near(scores, free, best, e, EPS)
        else:
            score = tl.sum(tl.where(e == best, scores, 0.0), axis=0)
        free = free & (e != best)
        ids = tl.where(t == j, best, ids)
        chosen = tl.where(t == j, score, chosen)
    return ids, _weighed(chosen, t < TOP, scale, ORDER, NORMALISE, EPS, FLOOR)


@triton.jit
def _rank(
    logits, scale, E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, ORDER: tl.constexpr, NORMALISE: tl.constexpr,
    EPS: tl.constexpr, FLOOR: tl.constexpr, bias_ptr, BIAS: tl.constexpr,
):  # fmt: skip
    """The same for one group, all at once: logits [BE] -> every expert's place in the order of choice, and its gate.

    Gates of those at place TOP and beyond mean nothing."""
    e = tl.arange(0, BE)
    scores, choice = _scored(logits, bias_ptr, e, E, ORDER, BIAS)
    key = tl.where(choice != choice, float("inf"), choice)
    ahead = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (e[None, :] < e[:, None]))
    place = tl.sum((ahead & (e < E)[None, :]).to(tl.int32), axis=1)
    chosen = (place < TOP) & (e < E)
    return tl.where(chosen, place, TOP), _weighed(scores, chosen, scale, ORDER, NORMALISE, EPS, FLOOR)


@triton.jit
def _choose(
    logits, bias_ptr, ids, gates, scale, E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr,
    ORDER: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Store a token's best experts and their gates, by whichever of the two takes less time."""
    if GROUPS == 1 and BE <= 128 and ORDER != 5:
        place, gate = _rank(logits, scale, E, BE, TOP, ORDER, NORMALISE, EPS, FLOOR, bias_ptr, BIAS)
        tl.store(ids + place, tl.arange(0, BE), mask=place < TOP)
        tl.store(gates + place, gate, mask=place < TOP)
    else:
        t = tl.arange(0, BT)
        best, gate = _pick_experts(
            logits, bias_ptr, scale, E, BE, TOP, BT, ORDER, NORMALISE, EPS, FLOOR, BIAS, GROUPS, TOP_GROUPS, SUM2, BG
        )  # fmt: skip
        tl.store(ids + t, best, mask=t < TOP)
        tl.store(gates + t, gate, mask=t < TOP)


@triton.jit
def write_shared(id_ptr, gate_ptr, row, logit, E: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr):
    """The expert that every token visits, behind the TOP others."""
    if SHARED > 0:
        gate = sigmoid(logit) if SHARED == 2 else 1.0
        tl.store(id_ptr + row * (TOP + 1) + TOP, E)
        tl.store(gate_ptr + row * (TOP + 1) + TOP, gate)


@triton.jit(do_not_specialize=["tokens", "parts", "lines"])
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, near_ptr, id_ptr, gate_ptr, tokens, parts, lines, stride, scale,
    E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, ORDER: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr, SHARED: tl.constexpr, NEAR: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SCALES: each expert has a number of its own that multiplies its gate."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    t = tl.arange(0, BT)
    if NEAR:
        if token >= tokens:
            bring(near_ptr, tl.program_id(0) - tokens, parts, lines)
            wait(PDL)
            return
    wait(PDL)
    logits = tl.load(logits_ptr + token * stride + e, mask=e < E, other=float("-inf")).to(tl.float32)
    ids, gates = _pick_experts(
        logits, bias_ptr, scale, E, BE, TOP, BT, ORDER, NORMALISE, EPS, FLOOR, BIAS, GROUPS, TOP_GROUPS, SUM2, BG
    )
    if SCALES:
        gates = gates * tl.load(scale_ptr + ids, mask=t < TOP, other=0.0)
    WIDTH: tl.constexpr = TOP + (1 if SHARED > 0 else 0)
    tl.store(id_ptr + token * WIDTH + t, ids.to(id_ptr.dtype.element_ty), mask=t < TOP)
    tl.store(gate_ptr + token * WIDTH + t, gates, mask=t < TOP)
    if SHARED == 2:
        write_shared(id_ptr, gate_ptr, token, tl.load(logits_ptr + token * stride + E).to(tl.float32), E, TOP, SHARED)
    else:
        write_shared(id_ptr, gate_ptr, token, 0.0, E, TOP, SHARED)


def constants(spec: RouteSpec, shared: int = 0) -> dict[str, object]:
    """What kernels that choose must know when they are compiled; shared: see SHARED_PLAIN and SHARED_GATED."""
    return {
        "E": spec.experts, "BE": pow2(spec.experts), "TOP": spec.top_k, "BT": pow2(spec.top_k),
        "ORDER": _ORDERS[spec.order], "NORMALISE": spec.normalise, "FLOOR": spec.floor,
        "EPS": spec.jitter if spec.order == "sparsemixer" else spec.eps,
        "BIAS": spec.bias is not None,
        "GROUPS": spec.groups, "TOP_GROUPS": spec.top_groups, "SUM2": spec.group_sum2, "BG": pow2(spec.groups),
        "SHARED": shared,
    }  # fmt: skip


def near_lines(weight: Tensor | None, other: Tensor, most: int) -> tuple[Tensor, int, int]:
    """The first `most` bytes of a weight (or nothing of another tensor): where, and how many lines and programs."""
    if weight is None or not weight.is_contiguous():
        return other.view(torch.uint8), 0, 0
    lines = min(weight.nbytes, most) // 128
    return weight.view(torch.uint8), lines, min(_PARTS, lines)


def route(
    logits: Tensor, spec: RouteSpec, *, pdl: bool, dtype: torch.dtype = torch.int64, near: Tensor | None = None,
    shared: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E] -> ids [T, k] of this type and gates [T, k] (float32), best first; of equals the lowest id.

    near: weights whose beginning is needed soon. shared: one more column behind these."""
    tokens = logits.shape[0]
    ids, gates = _room(tokens, spec, shared, dtype, logits.device)
    soon, lines, parts = near_lines(near if pdl else None, gates, NEAR_EXPERTS)
    one = not isinstance(spec.scale, Tensor)
    _route_kernel[(tokens + parts,)](
        logits, spec.bias, None if one else spec.scale, soon, ids, gates, tokens, parts, lines, logits.stride(0),
        spec.scale if one else 1.0, **constants(spec, shared), NEAR=pdl, SCALES=not one, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return ids, gates


def _room(tokens: int, spec: RouteSpec, shared: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """For ids and gates."""
    width = spec.top_k + (shared > 0)
    ids = torch.empty((tokens, width), dtype=dtype, device=device)
    return ids, torch.empty((tokens, width), dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["parts", "lines"])
def _pick_kernel(
    x_ptr, w_ptr, add_ptr, norm_ptr, bias_ptr, near_ptr, h_ptr, id_ptr, gate_ptr, part_ptr, count_ptr,
    parts, lines, eps, scale,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    KEEP: tl.constexpr, SOONER: tl.constexpr, NEAR: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, BT: tl.constexpr, ORDER: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, FLOOR: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SUM2: tl.constexpr, BG: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    tile = tl.program_id(0)
    token = tl.program_id(1)
    ROWS: tl.constexpr = E + (1 if SHARED == 2 else 0)
    COUNT: tl.constexpr = (ROWS + BN - 1) // BN
    STRIDE: tl.constexpr = BE + (1 if SHARED == 2 else 0)
    WIDTH: tl.constexpr = TOP + (1 if SHARED > 0 else 0)
    if NEAR:
        if tile >= COUNT:
            # One token: the weights of the launch before come first.
            if not SOONER:
                wait(PDL)
            bring(near_ptr, (tile - COUNT) * tl.num_programs(1) + token, parts, lines)
            if SOONER:
                wait(PDL)
            return
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    real = n < ROWS
    rows = w_ptr + tl.where(real, n, 0)[:, None].to(tl.int64) * K + k
    x_row = x_ptr + token.to(tl.int64) * K
    w = tl.load(rows, mask=k < K, other=0.0)
    wait(PDL)
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    squares = tl.zeros((1, BK), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        if start > 0:
            w = tl.load(rows + start, mask=start + k < K, other=0.0)
        x = tl.load(x_row + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * (tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32) + OFFSET)
        acc += x * w.to(tl.float32)
    y = tl.sum(acc, axis=1)
    if NORM:
        shrink = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
        y = y * shrink
        if KEEP:
            if tile == token % COUNT:
                for start in tl.static_range(0, K, BK):
                    x = tl.load(x_row + start + k, mask=start + k < K, other=0.0).to(tl.float32) * shrink
                    g = tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32) + OFFSET
                    place = h_ptr + token.to(tl.int64) * K + start + k
                    tl.store(place, (x * g).to(h_ptr.dtype.element_ty), mask=start + k < K)
    if ADD:
        y += tl.load(add_ptr + n, mask=n < E, other=0.0).to(tl.float32)
    tl.store(part_ptr + token * STRIDE + n, y, mask=real, cache_modifier=".cg")
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + token, 1, sem="acq_rel") == COUNT - 1:
        tl.store(count_ptr + token, 0)
        e = tl.arange(0, BE)
        logits = tl.load(part_ptr + token * STRIDE + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
        _choose(logits, bias_ptr, id_ptr + token * WIDTH, gate_ptr + token * WIDTH, scale, E, BE, TOP, BT, ORDER,
                NORMALISE, EPS, FLOOR, BIAS, GROUPS, TOP_GROUPS, SUM2, BG)  # fmt: skip
        logit = 0.0
        if SHARED == 2:
            logit = tl.load(part_ptr + token * STRIDE + E, cache_modifier=".cg")
        write_shared(id_ptr, gate_ptr, token, logit, E, TOP, SHARED)


def pick(
    x: Tensor, weight: Tensor, add: Tensor | None, norm: NormSpec | None, spec: RouteSpec, *,
    scratch: Scratch, pdl: bool, keep: bool = False, near: Tensor | None = None, shared: int = 0,
    config: tuple[int, int] = (4, 4),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, K], router [E, K] and its bias -> ids [T, k] (int32), gates [T, k] of norm(x), and norm(x) (keep) or x.

    near: a weight that is needed soon: theirs (keep), or after the experts. shared: there is one more row if it is
    SHARED_GATED. config (BN, warps)."""
    tokens, inner = x.shape
    ids, gates = _room(tokens, spec, shared, torch.int32, x.device)
    h = torch.empty_like(x) if keep and norm is not None else x
    block_n, warps = (8, 1) if INTERPRETED else config
    soon, lines, parts = near_lines(near if pdl else None, gates, NEAR_EXPERTS if keep else NEAR_NEXT)
    spread = triton.cdiv(parts, tokens)
    _pick_kernel[(triton.cdiv(spec.experts + (shared == SHARED_GATED), block_n) + spread, tokens)](
        x, weight, add, None if norm is None else norm.weight, spec.bias, soon, h, ids, gates,
        scratch.partial(x.device), scratch.counters(x.device), spread * tokens, lines,
        0.0 if norm is None else norm.eps, spec.scale,
        K=inner, BN=block_n, BK=min(pow2(inner), 2048), ADD=add is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, KEEP=keep, SOONER=keep, NEAR=pdl,
        **constants(spec, shared), PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return ids, gates, h
