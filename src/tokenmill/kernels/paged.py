"""Paged attention in plain torch: the specification. Owns: the order in which keys are summed.

Keys are visited in tiles of TILE absolute positions, ascending, with an online softmax in float32; queries in blocks
of ROW_BLOCK (query, head) pairs that share a key/value head. A tile that a row may not see leaves its state untouched
bit for bit, so prefill, chunks, decode and cached prefixes give the same bytes. Knows nothing of models or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, Paths
from tokenmill.kernels import row_stable, stored_kv
from tokenmill.kernels.row_stable import ROW_BLOCK

TILE = 64
_ITEMS = 64
_FLOOR = -1e30
"""The running maximum before any key: finite, so that a row without keys yet stays free of NaN."""


@dataclass(slots=True)
class _Items:
    """I query blocks: their sequence [I], token and head-in-group of each row [I, R], and which rows are real."""

    seq: Tensor
    token: Tensor
    head: Tensor
    real: Tensor
    tiles: list[tuple[int, int]]

    def cut(self, start: int, stop: int) -> _Items:
        part = slice(start, stop)
        return _Items(self.seq[part], self.token[part], self.head[part], self.real[part], self.tiles[part])


def attend(q: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
    """q [T, H, Dk] against one layer's pages -> [T, H * Dv] in q's dtype.

    keys [T, K]: the positions that each token sees, ascending, with -1 behind the last. Tiles are cut from this list,
    so a list of all positions gives the bytes of plain attention."""
    kv_heads = spec.kv.heads
    group = spec.heads // kv_heads
    grouped = q.view(q.shape[0], kv_heads, group, q.shape[2])
    out = q.new_zeros(q.shape[0], kv_heads, group, spec.kv.value_dim)
    items = _items(spec, ctx, group, q.device, keys)
    for start in range(0, len(items.tiles), _ITEMS):
        part = items.cut(start, start + _ITEMS)
        result = _attend_items(grouped[part.token, :, part.head].transpose(1, 2), part, spec, ctx, keys)
        out[part.token[part.real], :, part.head[part.real]] = result.transpose(1, 2)[part.real].to(q.dtype)
    return out.view(q.shape[0], -1)


def _items(spec: AttentionSpec, ctx: ForwardContext, group: int, device: torch.device, keys: Tensor | None) -> _Items:
    """Cut every sequence's (query, head-in-group) pairs into blocks of ROW_BLOCK rows, of one query each if every query
    has its own keys."""
    starts: list[tuple[int, int, int, int]] = []
    tiles: list[tuple[int, int]] = []
    for seq, (query_start, queries, kv_len) in enumerate(spans(ctx)):
        if keys is not None:
            each = [(seq, query_start + i, row, group) for i in range(queries) for row in range(0, group, ROW_BLOCK)]
            starts += each
            tiles += [(0, -(-min(kv_len, keys.shape[1]) // TILE))] * len(each)
            continue
        for row in range(0, queries * group, ROW_BLOCK):
            starts.append((seq, query_start, row, queries * group))
            # Queries are a sequence's newest positions, so the block's first and last query bound its tiles.
            oldest = kv_len - queries + row // group
            newest = kv_len - queries + min(row + ROW_BLOCK - 1, queries * group - 1) // group
            first = _lowest(oldest, spec.window)
            tiles.append((first // TILE, newest // TILE + 1))
    table = torch.tensor(starts, dtype=torch.int64).view(-1, 4).to(device)
    seq_of, query_start_of, row_of, rows_of = table.unbind(1)
    place = row_of[:, None] + torch.arange(ROW_BLOCK, device=device)
    real = place < rows_of[:, None]
    place = torch.minimum(place, rows_of[:, None] - 1)
    return _Items(seq_of, query_start_of[:, None] + place // group, place % group, real, tiles)


def _lowest(position: int, window: int) -> int:
    """The first position that a query at this one sees."""
    return position - position % -window if window < 0 else max(0, position - window + 1) if window else 0


def spans(ctx: ForwardContext) -> list[tuple[int, int, int]]:
    """(query_start, query count, kv_len) of each sequence; waits for a device that is not the host."""
    if ctx.spans is not None:
        return ctx.spans
    start, kv_len = ctx.query_start.tolist(), ctx.kv_len.tolist()
    return [(a, b - a, n) for a, b, n in zip(start, start[1:], kv_len, strict=False)]


def _attend_items(q: Tensor, items: _Items, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None) -> Tensor:
    """q [I, Hkv, R, Dk] -> [I, Hkv, R, Dv] in float32."""
    q = q.float()
    own = None if keys is None else F.pad(keys, (0, -keys.shape[1] % TILE), value=-1)[items.token[:, 0]]
    query_pos = ctx.positions[items.token][:, None, :, None]
    head = torch.arange(spec.kv.heads, device=q.device)[None, :, None] * (spec.heads // spec.kv.heads)
    head = head + items.head[:, None, :]
    slopes = None if spec.alibi is None else spec.alibi.float()[head].unsqueeze(-1)
    acc = q.new_zeros(*q.shape[:3], spec.kv.value_dim)
    if spec.sinks is None:
        top, total = q.new_full((*q.shape[:3], 1), _FLOOR), q.new_zeros(*q.shape[:3], 1)
    else:
        # A sink is one more logit in the denominator: start from it.
        top = spec.sinks.float()[head].unsqueeze(-1)
        total = torch.ones_like(top)
    for tile in range(min(t[0] for t in items.tiles), max(t[1] for t in items.tiles)):
        place = slice(tile * TILE, (tile + 1) * TILE)
        pos = torch.arange(place.start, place.stop, device=q.device)[None] if own is None else own[:, place]
        k, v, known = load_tile(pos, items.seq, spec, ctx)
        scores = _batched(q, k.transpose(-1, -2)) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = query_pos - pos[:, None, None, :]
        if slopes is not None:
            scores = scores - slopes * distance
        seen = (distance >= 0) & known[:, None, None, :]
        if spec.window > 0:
            seen = seen & (distance < spec.window)
        elif spec.window:
            seen = seen & (distance <= query_pos % -spec.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - new_top)
        p = torch.exp(scores - new_top)
        total = total * shrink + row_stable.sum_last(p)
        acc = acc * shrink + _weighted(p, v, seen)
        top = new_top
    return acc / total


def _weighted(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """p [I, Hkv, R, TILE] @ v [I, Hkv, TILE, Dv]; a key that a row does not see adds nothing, even if it is NaN."""
    broken = ~v.isfinite().all(-1)
    if v.device.type == "cpu" and not broken.any():
        return _batched(p, v)
    # 0 * NaN is NaN: without this a broken token would reach the positions before it, and caches that share those.
    sums = _batched(p, v.masked_fill(broken[..., None], 0.0))
    return sums.masked_fill((seen & broken[:, :, None, :]).any(-1, keepdim=True), float("nan"))


def load_tile(pos: Tensor, seq: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values [I, Hkv, TILE, D] at positions [I or 1, TILE], in float32, and which keys exist [I, TILE]."""
    plan, kv = ctx.groups[spec.group], ctx.kv[spec.layer]
    entry, offset, known = _locate(pos, seq, plan, ctx)
    block = plan.tables[seq].gather(1, entry).long().masked_fill(~known, 0)  # the rest of a table may be anything
    gone = ~known[:, None, :, None]
    # Absent keys are zeros, not leftovers: 0 * NaN would leak another sequence's trouble into this one.
    k = stored_kv.load(kv.key, kv.key_scale, block, offset).transpose(1, 2).masked_fill(gone, 0.0)
    if kv.value.data_ptr() == kv.key.data_ptr():
        return k, k[..., : spec.kv.value_dim], known
    v = stored_kv.load(kv.value, kv.value_scale, block, offset).transpose(1, 2).masked_fill(gone, 0.0)
    return k, v, known


def _locate(pos: Tensor, seq: Tensor, plan: GroupPlan, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
    """Table entry, offset in its block, and existence of each position [I or 1, TILE], all [I, TILE]."""
    last = plan.tables.shape[1] - 1
    entries, kv_len = plan.entries.long()[seq, None], ctx.kv_len.long()[seq, None]
    pos = pos.expand(seq.shape[0], -1)
    there = pos < kv_len
    if plan.paths is not None:
        pos = _placed(pos, seq, plan.paths)
    if plan.first is None:
        entry, start = pos // ctx.block_size, pos // ctx.block_size * ctx.block_size
    else:
        counted = torch.arange(last + 1, device=pos.device) < entries
        first = plan.first.long()[seq].masked_fill(~counted, torch.iinfo(torch.int64).max)
        entry = torch.searchsorted(first, pos.contiguous(), right=True) - 1
        start = first.gather(1, entry.clamp(0, last))
    known = (entry >= 0) & (entry < entries) & (pos - start < ctx.block_size) & there
    return entry.clamp(0, last), (pos - start).clamp(0, ctx.block_size - 1), known


def _placed(pos: Tensor, seq: Tensor, paths: Paths) -> Tensor:
    """Where the keys of these positions [I, TILE] lie."""
    root, places = paths.roots[seq, None], paths.places[seq].long()
    depth = (pos - root).clamp(max=places.shape[1] - 1)
    return torch.where(depth < 0, pos, root + places.gather(1, depth.clamp(min=0)))


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """[I, H, R, K] @ [I, H, K, N], one product per (item, head)."""
    return row_stable.batched(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
