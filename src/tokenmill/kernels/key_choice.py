"""Which keys an index chooses, in plain torch: the specification. Owns: scores of keys, and what happens to equal ones.

Scores are computed in tiles of fixed positions, so a token's choice does not depend on what is computed beside it.
Must not know: models, who attends to the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext
from tokenmill.kernels import paged, row_stable

_TILE = 256
_TOKENS = 64
"""How many tokens of a sequence are scored together: it bounds the scores that exist at once."""


def choose(q: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext) -> Tensor:
    """q [T, H, D] and gains [T, H] -> positions [T, K] of the `top` best keys that each token sees, ascending, with -1
    behind the last; K = top, or the longest sequence's length if that is less."""
    spans = paged.spans(ctx)
    width = min(top, max((length for _, _, length in spans), default=0))
    out = torch.full((q.shape[0], width), -1, dtype=torch.int64, device=q.device)
    for seq, (start, queries, length) in enumerate(spans):
        for first in range(start, start + queries, _TOKENS):
            part = slice(first, min(first + _TOKENS, start + queries))
            own = ctx.positions[part, None]
            if length <= top:
                best = torch.arange(length, device=q.device).expand(len(own), -1)
            else:
                scores = _scores(q[part].float(), gains[part].float(), seq, length, spec, ctx)
                scores = scores.masked_fill(torch.arange(length, device=q.device) > own, float("-inf"))
                best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
            found = best.masked_fill(best > own, length).sort(dim=-1).values
            out[part, : best.shape[1]] = found.masked_fill(found == length, -1)
    return out


def _scores(q: Tensor, gains: Tensor, seq: int, length: int, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
    """The scores [n, length] of a sequence's keys for q [n, H, D]: the sum over heads of gain * relu(scale * q . k)."""
    tokens, heads, dim = q.shape
    rows = torch.stack(row_stable.row_blocks(q.reshape(-1, dim)))
    whose = torch.tensor([seq], device=q.device)
    parts = []
    for start in range(0, length, _TILE):
        positions = torch.arange(start, start + _TILE, device=q.device)[None]
        keys = paged.load_tile(positions, whose, spec, ctx)[0][0]
        products = row_stable.batched(rows, keys.transpose(1, 2).expand(len(rows), -1, -1))
        products = (products.reshape(-1, _TILE)[: tokens * heads] * spec.scale).clamp(min=0.0)
        parts.append(row_stable.batched(gains[:, None], products.view(tokens, heads, _TILE))[:, 0])
    return torch.cat(parts, -1)[:, :length]
