"""Sampling spelled out slowly, in Python integers and float64: what the tensor code must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.core.step import RowSampling
from tokenmill.sampling.sampler import Lines
from tokenmill.sampling.table import SamplingTable

M32, M64 = 2**32 - 1, 2**64 - 1
INF = math.inf


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def key_of(seed: int, index: int) -> int:
    stream = mix64((seed + 0x9E3779B97F4A7C15) & M64)
    return mix64((stream + (index + 1) * 0x9E3779B97F4A7C15) & M64)


def hash_of(key: int, token: int) -> int:
    h = ((token * 0x9E3779B1) & M32) ^ (key & M32)
    h ^= h >> 16
    h = (h * 0x7FEB352D) & M32
    h ^= h >> 15
    h = ((h + (key >> 32)) * 0x846CA68B) & M32
    return h ^ (h >> 16)


def exponential(seed: int, index: int, token: int) -> float:
    v = (np.float32(hash_of(key_of(seed, index), token) & 0x7FFFFFFF) + np.float32(0.5)) * np.float32(
        float.fromhex("0x1.fffffep-32")
    )
    return -math.log1p(-float(v))


def edited(logits: Sequence[float], p: RowSampling, prompt: list[int], output: list[int], allowed: set[int]) -> list:
    """Logits after allowed ids and masks, bad words, min_tokens, bias and penalties, in that order."""
    x = [v if i in allowed and (p.allowed_ids is None or i in p.allowed_ids) else -INF for i, v in enumerate(logits)]
    for word in p.bad_words:
        *prefix, last = word
        if last < len(x) and len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            x[last] = -INF
    if len(output) < p.min_tokens:
        for i in p.end_ids:
            if i < len(x):
                x[i] = -INF
    for i, bias in p.logit_bias.items():
        if i < len(x):
            x[i] += bias
    for i in set(prompt) | set(output):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(output):
        x[i] -= p.frequency_penalty * output.count(i) + p.presence_penalty
    return x


def softmax(x: Sequence[float]) -> list[float]:
    top = max(x)
    weights = [math.exp(v - top) for v in x]
    total = math.fsum(weights)
    return [w / total for w in weights]


def keep_min_p(x: Sequence[float], min_p: float) -> list[bool]:
    p = softmax(x)
    return [q >= min_p * max(p) for q in p]


def keep_top_k(x: Sequence[float], k: int) -> list[bool]:
    bound = sorted(x, reverse=True)[min(k, len(x)) - 1]
    return [v >= bound for v in x]


def keep_top_p(x: Sequence[float], top_p: float) -> list[bool]:
    p = softmax(x)
    return [math.fsum(q for q, w in zip(p, x, strict=True) if w > v) < top_p for v in x]


def keep_typical(x: Sequence[float], typical_p: float) -> list[bool]:
    p = softmax(x)
    entropy = -math.fsum(q * math.log(q) for q in p if q > 0)
    surprise = [abs(-math.log(q) - entropy) if q > 0 else INF for q in p]
    # Equal up to rounding is equal: the tensor code compares float32 numbers.
    return [
        math.fsum(q for q, w in zip(p, surprise, strict=True) if w < s - 1e-6) < typical_p and s < INF for s in surprise
    ]


def filtered(x: Sequence[float], p: RowSampling) -> list[float]:
    """Scaled logits after temperature, min-p, top-k, top-p and typical-p."""
    s = [(v - max(x)) / p.temperature for v in x]
    if p.min_p > 0:
        s = [v if k else -INF for v, k in zip(s, keep_min_p(s, p.min_p), strict=True)]
    if p.top_k > 0:
        s = [v if k else -INF for v, k in zip(s, keep_top_k(s, p.top_k), strict=True)]
    if p.top_p < 1:
        s = [v if k else -INF for v, k in zip(s, keep_top_p(s, p.top_p), strict=True)]
    if p.typical_p < 1:
        s = [v if k else -INF for v, k in zip(s, keep_typical(s, p.typical_p), strict=True)]
    return s


def chosen(x: Sequence[float], p: RowSampling, index: int) -> int:
    """The token of edited logits x at an output index."""
    if p.temperature < 1e-5:
        return x.index(max(x))
    s = filtered(x, p)
    scores = [v - math.log(exponential(p.seed, index, i)) if v > -INF else -INF for i, v in enumerate(s)]
    return scores.index(max(scores))


def logprobs(x: Sequence[float]) -> list[float]:
    top = max(x)
    total = math.log(math.fsum(math.exp(v - top) for v in x))
    return [v - top - total for v in x]


def packed(allowed: set[int], num_bits: int) -> bytes:
    """Little-endian allowed bits."""
    return sum(1 << i for i in allowed if i < num_bits).to_bytes((num_bits + 7) // 8, "little")


def make_lines(histories: Sequence[tuple[int, Sequence[int]]], table: SamplingTable, **late: dict) -> Lines:
    """Lines of rows with these histories; the token buffer past them holds rubbish."""
    longest = max(len(h) for _, h in histories)
    tokens = torch.full((len(table.bits), longest + 3), -77, dtype=torch.int32)
    for row, history in histories:
        tokens[row, : len(history)] = torch.tensor(list(history), dtype=torch.int32)
    rows = [row for row, _ in histories]
    lengths = torch.tensor([len(h) for _, h in histories])
    return Lines(rows, torch.tensor(rows), lengths, tokens, late.get("masks", {}), late.get("processors", {}))


def buckets_z(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts, as a standard normal deviate (Wilson-Hilferty)."""
    chi, free = float(((counts - expected) ** 2 / expected).sum()), counts.size - 1
    return ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
