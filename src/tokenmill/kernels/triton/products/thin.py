"""Few rows (2 to 64) times a matrix on tensor cores. Owns: the kernel that streams a weight once for all of them.

The weight is the left operand (its rows fill the tensor core's tall side), the activations are the narrow right one.
K is cut into SPLIT parts so that the whole chip reads; the program that finishes a tile last adds the parts in order.
Adapters of the rows go down and up within the same launch (adapted.py).
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import (
    INTERPRETED,
    Scratch,
    act_parts,
    begin,
    gated_act,
    multiprocessors,
    plain_act,
    pow2,
    prefetch,
    wait,
)
from tokenmill.kernels.triton.products.adapted import (
    BK_DOWN,
    ask_for_up,
    come_up,
    constants,
    count_beside,
    cuts_of,
    first_rows,
    go_down,
    may_mix,
    role,
    shrinkers_of,
    slots_of,
    until_down,
    up_tile,
)
from tokenmill.kernels.triton.products.adapters import borders_of

Config = tuple[int, int, int, int, int, int]
"""BN, BK, split, stages, warps, chunks to prefetch."""
_ROOM = 220 << 10
"""Shared memory of a multiprocessor of a data centre GPU."""


@triton.jit(do_not_specialize=["M", "mixed"])
def _thin_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, part_ptr, count_ptr,
    down_ptr, up_ptr, ranks_ptr, rows_ptr, slots_ptr, sums_ptr, downs_ptr,
    M, N, x_stride, eps, most_rank, shrinkers, mixed, border1, border2, border3,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    RESIDUAL: tl.constexpr, WIDE: tl.constexpr, PREFETCH: tl.constexpr, STAGES: tl.constexpr,
    ADAPT: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    EACH: tl.constexpr, CUTS: tl.constexpr, CHUNK: tl.constexpr, DOWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    if ADAPT:
        tiles = tl.cdiv(N, BN)
        shrinks, program = role(shrinkers, tiles * SPLIT, mixed)
        tile = program % tiles
        part = program // tiles
        if shrinks:
            slots = slots_of(rows_ptr, slots_ptr, M, BM)
            firsts = first_rows(slots, BM)
            wait(PDL)
            go_down(x_ptr, x_stride, down_ptr, sums_ptr, downs_ptr, slots, firsts, tl.cumsum(firsts, 0) - 1,
                    program, shrinkers, K, LANES, BM, DOWN, BL, EACH, CUTS, WIDE)  # fmt: skip
            return
    else:
        tile = tl.program_id(0)
        part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    real_n = n < N
    n_safe = tl.where(real_n, n, 0)
    first = part * CHUNKS * BK
    w_rows = w_ptr + n_safe[:, None].to(tl.int64) * K + first + k[None, :]
    u_rows = w_ptr + (n_safe + N)[:, None].to(tl.int64) * K + first + k[None, :]
    if PREFETCH > 0:
        ahead = tl.minimum(first + tl.arange(0, PREFETCH * BK // 64) * 64, K - 1)
        prefetch(w_ptr + n_safe[:, None].to(tl.int64) * K + ahead[None, :])
        if GATED:
            prefetch(w_ptr + (n_safe + N)[:, None].to(tl.int64) * K + ahead[None, :])
    if ADAPT:
        columns = 2 * N if GATED else N
        slots = slots_of(rows_ptr, slots_ptr, M, BM)
        firsts = first_rows(slots, BM)
        order = tl.cumsum(firsts, 0) - 1
        ranks = tl.load(ranks_ptr + slots)
        if PREFETCH > 0 and part == 0:
            ask_for_up(up_ptr, slots, firsts, order, tile * BN, most_rank, columns, BM, BN)
            if GATED:
                ask_for_up(up_ptr, slots, firsts, order, tile * BN + N, most_rank, columns, BM, BN)
    wait(PDL)
    x_rows = x_ptr + m[None, :] * x_stride + first + k[:, None]
    real_m = m < M
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    acc_u = tl.zeros((BN, BM), dtype=tl.float32)
    squares = tl.zeros((BM,), dtype=tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        if K % (BK * SPLIT * CHUNKS) == 0 and K == BK * SPLIT * CHUNKS:
            w = tl.load(w_rows + chunk * BK, eviction_policy="evict_first")
            x = tl.load(x_rows + chunk * BK, mask=real_m[None, :], other=0.0)
            if GATED:
                u = tl.load(u_rows + chunk * BK, eviction_policy="evict_first")
            if NORM:
                g = tl.load(norm_ptr + first + chunk * BK + k).to(tl.float32) + OFFSET
        else:
            inside = first + chunk * BK + k < K
            w = tl.load(w_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_rows + chunk * BK, mask=inside[:, None] & real_m[None, :], other=0.0)
            if GATED:
                u = tl.load(u_rows + chunk * BK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if NORM:
                g = tl.load(norm_ptr + first + chunk * BK + k, mask=inside, other=0.0).to(tl.float32) + OFFSET
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            x = (wide * g[:, None]).to(x.dtype)
        if WIDE:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
            if GATED:
                acc_u = tl.dot(u.to(tl.float32), x.to(tl.float32), acc_u, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc)
            if GATED:
                acc_u = tl.dot(u, x, acc_u)
    if ADAPT:
        w_up, slot = up_tile(up_ptr, slots, ranks, firsts, order, n, real_n, most_rank, columns, part, 0, BR, CHUNK)
        if GATED:
            u_up, _ = up_tile(up_ptr, slots, ranks, firsts, order, n + N, real_n, most_rank, columns, part, 0,
                              BR, CHUNK)  # fmt: skip
        until_down(downs_ptr, firsts, shrinkers, tl.num_programs(0) - shrinkers, CUTS)
        at_part = 0
        if PARTS > 1 and not GATED:
            at_part = (tile * BN >= border1).to(tl.int32) + (tile * BN >= border2).to(tl.int32)
            at_part += (tile * BN >= border3).to(tl.int32)
        acc = come_up(acc, w_up, slot, sums_ptr, up_ptr, slots, ranks, firsts, order, n, real_n, at_part, most_rank,
                      columns, part, SPLIT, LANES, BM, BN, BR, CHUNK, CUTS, WIDE)  # fmt: skip
        if GATED:
            acc_u = come_up(acc_u, u_up, slot, sums_ptr, up_ptr, slots, ranks, firsts, order, n + N, real_n, PARTS - 1,
                            most_rank, columns, part, SPLIT, LANES, BM, BN, BR, CHUNK, CUTS, WIDE)  # fmt: skip
    last = True
    if SPLIT > 1:
        # Parts of one tile lie together: [tile, part, (gate, up, squares), BN, BM].
        SIZE: tl.constexpr = BN * BM * (2 if GATED else 1) + BM
        at = tl.arange(0, BN)[:, None] * BM + m[None, :]
        mine = part_ptr + (tile * SPLIT + part).to(tl.int64) * SIZE
        tl.store(mine + at, acc, cache_modifier=".cg")
        if GATED:
            tl.store(mine + BN * BM + at, acc_u, cache_modifier=".cg")
        if NORM:
            tl.store(mine + (SIZE - BM) + m, squares, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(count_ptr + tile, 0)
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            acc_u = tl.zeros((BN, BM), dtype=tl.float32)
            squares = tl.zeros((BM,), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = part_ptr + (tile * SPLIT + other).to(tl.int64) * SIZE
                acc += tl.load(theirs + at, cache_modifier=".cg")
                if GATED:
                    acc_u += tl.load(theirs + BN * BM + at, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(theirs + (SIZE - BM) + m, cache_modifier=".cg")
    if last:
        if NORM:
            scale = 1.0 / tl.sqrt(squares / K + eps)
            acc = acc * scale[None, :]
            acc_u = acc_u * scale[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                acc_u += tl.load(bias_ptr + N + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            y = gated_act(acc, acc_u, ACT)
        else:
            y = plain_act(acc, ACT)
        place = m[None, :] * N + n[:, None]
        keep = real_n[:, None] & real_m[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=keep)


def can_adapt(site: AdapterSite, act: str | None, block: int) -> bool:
    """May adapters go up within tiles of so many columns?"""
    gated = act_parts(act)[1]
    whole = all(border % block == 0 for border in site.borders[1:-1])
    return site.gains is None and (whole or gated)


def with_room(config: Config, width: int, column: int, *, gated: bool) -> Config:
    """A way that leaves room beside a product's programs for those that go down: smaller tiles, and one of them less
    ahead where as many programs as there are multiprocessors then fit. column: bytes of one entry of all rows."""
    block_n, block_k, split, stages, warps, prefetch = config
    if block_k > 128:
        block_k, stages, prefetch = 128, stages + 1, 2 * prefetch
    if block_n > 64:
        block_n, stages, warps = block_n // 2, stages + 1, max(4, warps // 2)
    processors = 1 if INTERPRETED else multiprocessors()
    programs = triton.cdiv(width, block_n) * split + processors
    tile = block_k * (column + block_n * (4 if gated else 2))
    if stages > 3 and _ROOM // (stages * tile) * processors < programs <= _ROOM // ((stages - 1) * tile) * processors:
        stages -= 1
    return block_n, block_k, split, stages, warps, prefetch


def thin(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormSpec | None, act: str | None, residual: Tensor | None,
    *, scratch: Scratch, pdl: bool, config: Config, delta: Delta | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 64, K], weight [N, K] -> residual + act(norm(x) @ weight.T + bias + what adapters add).

    delta: its rows' adapters, which read x; no norm then."""
    assert delta is None or norm is None
    rows, inner = x.shape
    kind, gated = act_parts(act)
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = max(16, pow2(rows))
    if delta is not None:
        config = with_room(config, width, block_m * x.element_size(), gated=gated)
    block_n, block_k, split, stages, warps, prefetch = config
    chunks = triton.cdiv(triton.cdiv(inner, block_k), split)
    tiles = triton.cdiv(width, block_n)
    size = block_n * block_m * (2 if gated else 1) + block_m
    share = 1 if delta is None else 2
    if tiles * split * size > scratch.floats // share or tiles > scratch.num_counters // share:
        split, chunks = 1, triton.cdiv(inner, block_k)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    partial, counters = scratch.partial(x.device), scratch.counters(x.device)
    beside = _ROOM // (stages * block_k * (block_n * (2 if gated else 1) + block_m) * x.element_size())
    kernel = config, split, inner, act, block_m, x.dtype, bias is None, residual is None
    adapters, sizes, how = _with_adapters(delta, rows, tiles * split, kernel, beside, scratch)
    compiled = _thin_kernel[(tiles, split) if delta is None else (sizes[1] + tiles * split,)](
        x, weight, bias, None if norm is None else norm.weight, residual, out, partial, counters, *adapters,
        rows, width, x.stride(0), 0.0 if norm is None else norm.eps, *sizes,
        K=inner, BM=block_m, BN=block_n, BK=block_k, SPLIT=split, CHUNKS=chunks,
        ACT=kind, GATED=gated, BIAS=bias is not None, NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset, RESIDUAL=residual is not None,
        WIDE=INTERPRETED or x.dtype == torch.float32, PREFETCH=0 if INTERPRETED or not pdl else prefetch,
        STAGES=stages, **how, DOWN=BK_DOWN, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    known = kernel, *how.values()
    if delta is not None and known not in scratch.beside and hasattr(compiled, "n_regs"):  # not in the interpreter
        scratch.beside[known] = count_beside(compiled, warps)
    return out


def _with_adapters(
    delta: Delta | None, rows: int, programs: int, kernel: Hashable, beside: int, scratch: Scratch
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], dict[str, int | bool]]:
    """What the kernel is told of adapters: tensors, sizes and constants. The second half of the scratch memory is
    theirs. beside: programs that fit on one multiprocessor, as far as one can tell without a compiled kernel."""
    if delta is None:
        nothing = {"ADAPT": False, "PARTS": 1, "LANES": 16, "BL": 16, "BR": 16, "EACH": 64, "CUTS": 1, "CHUNK": 64}
        return (None,) * 7, (0,) * 6, nothing
    site, device = delta.site, delta.inputs.device
    assert site.up is not None
    sums = scratch.partial(device)[scratch.floats // 2 :]
    downs = scratch.counters(device)[scratch.num_counters // 2 :]
    how = {"ADAPT": True, **constants(site, cuts_of(site, rows))}
    known = scratch.beside.get((kernel, *how.values()))
    shrinkers = shrinkers_of(programs, max(1, beside if known is None else known))
    sizes = (site.up.shape[1], shrinkers, int(may_mix(shrinkers + programs, known)), *borders_of(site))
    return (site.down, site.up, site.ranks, delta.rows, delta.slots, sums, downs), sizes, how
