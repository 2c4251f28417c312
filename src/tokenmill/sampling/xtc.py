"""Exclude top choices. Owns: the coin of a position, and which tokens it takes away.

If the coin says so, all tokens of at least the threshold's probability are dropped but the least likely of them
(equally likely ones stay together). The coin is a hash of the noise's key, which is one of seed and output index:
nothing is remembered. Must not know: rows, other filters.

    coin = (mix64(key + 0xC2B2AE3D27D4EB4F) >>> 40) / 2^24, and the line is cut if coin < probability
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.sampling.noise import mix_keys
from tokenmill.sampling.stable import line_sums, wide

SALT = 0xC2B2AE3D27D4EB4F - (1 << 64)
COIN_BITS = 24


def coins(keys: Tensor) -> Tensor:
    """keys [n] int64 -> uniform in [0, 1) [n] float64."""
    mixed = mix_keys(keys + SALT)
    return wide((mixed >> (64 - COIN_BITS)) & ((1 << COIN_BITS) - 1)) / (1 << COIN_BITS)


def xtc_(s: Tensor, probability: Tensor, threshold: Tensor, keys: Tensor) -> None:
    """s [n, V] whose largest is 0, parameters [n] and keys [n]; afterwards the largest that stays is 0 again."""
    weights = s.exp()
    bound = (wide(threshold) * wide(line_sums(weights))).float()[:, None]
    above = (weights >= bound) & (s > -math.inf)  # a threshold of 0 takes in whatever is left, not what is forbidden
    least = torch.where(above, s, math.inf).amin(-1, keepdim=True)
    cut = (coins(keys) < wide(probability))[:, None]
    s.masked_fill_(cut & above & (s > least), -math.inf)
    s.sub_(s.amax(-1, keepdim=True))
