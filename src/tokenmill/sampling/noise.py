"""The randomness of sampling. Owns: the formula that turns (seed, output index, token id) into Gumbel noise.

Must not know: logits filters, rows, the engine. There is no generator state: the noise of a token is a function of
three integers, so speculation, preemption, replay, company and parallelism cannot change a sample. Every backend
repeats exactly this (all integers wrap; `>>>` is a logical shift; float steps are float32):

    mix64(z):   z ^= z >>> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >>> 27;  z *= 0x94D049BB133111EB;  z ^= z >>> 31
    stream    = mix64(seed + 0x9E3779B97F4A7C15)                    64 bit, once per row, on the host
    key       = mix64(stream + (index + 1) * 0x9E3779B97F4A7C15)    64 bit, once per sampled position
    k0, k1    = key & 0xFFFFFFFF, key >>> 32

    h         = (token * 0x9E3779B1) ^ k0                           32 bit, per token
    h        ^= h >>> 16;   h *= 0x7FEB352D
    h        ^= h >>> 15;   h += k1;   h *= 0x846CA68B
    h        ^= h >>> 16
    v         = (float(h & 0x7FFFFFFF) + 0.5) * 0x1.fffffep-32      uniform in (0, 1), both ends excluded
    e         = -log1p(-v)                                          exponential with mean 1, in [2^-32, 16.7]
    score     = scaled - log(e)                                     scaled = (logit - max logit) * (1 / temperature)

The token with the highest score is taken (the lowest id of equal ones): it is t with probability softmax(scaled)[t].
The integers are the same everywhere. log and log1p may differ in the last bit between devices, which matters only
when the two best scores are that close. Uniforms that are small, and so the scores that win, are the finely resolved
ones: with 31 bits, a token wins ties in a vocabulary of 2^17 about once in 2^14 samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GOLDEN64 = 0x9E3779B97F4A7C15
MULTIPLIERS64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN32 = 0x9E3779B1
MULTIPLIERS32 = (0x7FEB352D, 0x846CA68B)
SCALE = float.fromhex("0x1.fffffep-32")
SLICE = 1 << 18
"""How many scores a slice has, so that its scratch memory stays in a CPU's cache."""


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def stream_of(seed: int) -> int:
    """The 64-bit stream of a seed, as a signed integer."""
    z = (seed + GOLDEN64) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * MULTIPLIERS64[0]) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * MULTIPLIERS64[1]) & (2**64 - 1)
    return _signed(z ^ (z >> 31), 64)


def _shift_xor(z: Tensor, shift: int) -> Tensor:
    """z ^ (z >> shift), where z counts as unsigned."""
    return z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))


def position_keys(streams: Tensor, indexes: Tensor) -> Tensor:
    """streams [n] int64, output indexes [n] int64 -> keys [n] int64."""
    return mix_keys(streams + (indexes + 1) * _signed(GOLDEN64, 64))


def mix_keys(z: Tensor) -> Tensor:
    """mix64 of each int64."""
    z = _shift_xor(z, 30) * _signed(MULTIPLIERS64[0], 64)
    z = _shift_xor(z, 27) * _signed(MULTIPLIERS64[1], 64)
    return _shift_xor(z, 31)


def token_bases(tokens: npt.NDArray[Any]) -> Tensor:
    """Token ids -> int32, the part of the hash that depends on the token alone.

    numpy multiplies them: torch would wake all its threads for every table, which takes longer than the work."""
    return torch.from_numpy((tokens.astype(np.uint32) * np.uint32(GOLDEN32)).view(np.int32))


def _halves(keys: Tensor) -> tuple[Tensor, Tensor]:
    pair = keys.contiguous().view(torch.int32).view(-1, 2)
    return pair[:, :1], pair[:, 1:]


def hash_bits(keys: Tensor, bases: Tensor) -> Tensor:
    """keys [n] int64, bases [V] or [n, V] int32 -> h [n, V] int32 (the bits of the unsigned h)."""
    k0, k1 = _halves(keys)
    h = bases ^ k0
    shifted = torch.empty_like(h)

    def fold(shift: int) -> None:
        torch.bitwise_right_shift(h, shift, out=shifted)
        shifted.bitwise_and_((1 << (32 - shift)) - 1)
        h.bitwise_xor_(shifted)

    fold(16)
    h.mul_(MULTIPLIERS32[0])
    fold(15)
    h.add_(k1).mul_(_signed(MULTIPLIERS32[1], 32))
    fold(16)
    return h


def exponentials(keys: Tensor, bases: Tensor) -> Tensor:
    """keys [n] int64, bases [V] or [n, V] int32 -> e [n, V] float32, exponentially distributed."""
    v = hash_bits(keys, bases).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    return v.add_(0.5).mul_(-SCALE).log1p_().neg_()


def few_exponentials(keys: npt.NDArray[Any], bases: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """log(e) [k] float32 of `exponentials`, for pairs of keys [k] int64 and bases [k] int32, with the same bits. It is
    for so few pairs that torch's calls would take most of the time."""
    halves = keys.view(np.uint32).reshape(-1, 2)
    h = bases.view(np.uint32) ^ halves[:, 0]
    h ^= h >> 16
    h *= np.uint32(MULTIPLIERS32[0])
    h ^= h >> 15
    h += halves[:, 1]
    h *= np.uint32(MULTIPLIERS32[1])
    h ^= h >> 16
    h &= np.uint32(0x7FFFFFFF)
    v = h.astype(np.float32)
    v += np.float32(0.5)
    v *= np.float32(-SCALE)
    return torch.from_numpy(v).log1p_().neg_().log_().numpy()


def noisy_(scores: Tensor, keys: Tensor, bases: Tensor) -> Tensor:
    """scores [n, V] float32 -> the same tensor with Gumbel noise added."""
    lines = max(1, SLICE // max(1, scores.shape[1]))
    if scores.device.type != "cpu":
        lines = scores.shape[0]
    for start in range(0, scores.shape[0], max(1, lines)):
        part = slice(start, start + lines)
        own = bases if bases.dim() == 1 else bases[part]
        scores[part].sub_(exponentials(keys[part], own).log_())
    return scores
