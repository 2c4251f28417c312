"""Reductions over the vocabulary whose result for a line depends on that line alone. Owns: sum, maximum, top-k,
and which float is the widest there.

Must not know: sampling. torch.sum splits its work by the shape of the whole call, so the sum of a line can change
with the company; torch.topk returns any of several equal tokens. These do neither, and never wait for the device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 64
WIDE = 1 << 15
"""From this vocabulary size on, a CPU searches the maximum in blocks, because argmax is not vectorised there."""


@cache
def widest_float(kind: str) -> torch.dtype:
    """The type of long sums on this kind of device: float64, except on Apple's GPUs, which lack it."""
    try:
        torch.zeros(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def wide(x: Tensor) -> Tensor:
    """x in the widest float of its device."""
    return x.to(widest_float(x.device.type))


def line_sums(x: Tensor) -> Tensor:
    """x [n, V] -> sums [n], added up as a tree whose shape depends on V only."""
    width = x.shape[1]
    owned = False
    while width > 1:
        half = (width + 1) // 2
        low = x[:, :half] if owned else x[:, :half].clone()
        low[:, : width - half] += x[:, half:]
        x, width, owned = low, half, True
    return x[:, 0]


def _block_maxima(x: Tensor, block: int) -> Tensor:
    whole = x.shape[1] // block * block
    maxima = x[:, :whole].unflatten(1, (whole // block, block)).amax(-1)
    if whole == x.shape[1]:
        return maxima
    return torch.cat([maxima, x[:, whole:].amax(-1, keepdim=True)], dim=1)


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, V] -> (maxima [n], the lowest id with the maximum [n]). NaN counts as the maximum; the id may then be
    any."""
    if x.device.type != "cpu" or x.shape[1] < WIDE:
        ids = x.argmax(-1)
        return x.gather(1, ids[:, None])[:, 0], ids
    block = 4 * BLOCK
    best, blocks = first_max(_block_maxima(x, block))
    places = blocks[:, None] * block + torch.arange(block)
    places.clamp_(max=x.shape[1] - 1)
    return best, places.gather(1, x.gather(1, places).argmax(-1, keepdim=True))[:, 0]


def _order_keys(x: Tensor, ids: Tensor) -> Tensor:
    """One int64 per entry that sorts by value, then by lower id; adding 0.0 makes -0.0 equal to 0.0."""
    bits = (x + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) + (0x7FFFFFFF - ids)


def top_tokens(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x [n, V] float32 -> (values [n, k], ids [n, k]), best first, equal values by lower id; k is at most V."""
    size = x.shape[1]
    k = min(k, size)
    places = torch.arange(size, device=x.device)
    keys: Tensor
    if k * BLOCK < size:
        # The k best blocks (equal maxima: the lower block) hold the k best tokens: each block that beats another
        # one has a token that comes before all tokens of the other.
        maxima = _block_maxima(x, BLOCK)
        best = _order_keys(maxima, places[: maxima.shape[1]]).topk(k, dim=1).indices
        spread = (best[:, :, None] * BLOCK + places[:BLOCK]).flatten(1)
        keys = _order_keys(x.gather(1, spread.clamp(max=size - 1)), spread)
        keys.masked_fill_(spread >= size, torch.iinfo(torch.int64).min)
    else:
        keys = _order_keys(x, places)
    ids = 0x7FFFFFFF - (keys.topk(k, dim=1).values & 0x7FFFFFFF)
    return x.gather(1, ids), ids
