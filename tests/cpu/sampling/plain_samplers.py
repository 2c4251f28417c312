"""Samplers of llama.cpp and text-generation-webui, spelled out one line at a time from their definitions, in float64.

Each takes candidates as sorted (id, logit) pairs, likeliest first, and gives those that are left. Nothing here is
shared with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Pairs = list[tuple[int, float]]


def pairs(logits: Sequence[float]) -> Pairs:
    return sorted(((i, float(v)) for i, v in enumerate(logits) if v > -math.inf), key=lambda p: (-p[1], p[0]))


def chances(c: Pairs) -> list[float]:
    weights = [math.exp(v - c[0][1]) for _, v in c]
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy(c: Pairs) -> float:
    return -math.fsum(p * math.log(p) for p in chances(c) if p > 0)


def temperature(c: Pairs, t: float, reach: float = 0.0, exponent: float = 1.0) -> Pairs:
    if reach > 0 and len(c) > 1:
        low, high = max(0.0, t - reach), t + reach
        t = low + (high - low) * (entropy(c) / math.log(len(c))) ** exponent
    elif reach > 0:
        return c
    return [(i, v / max(t, 1e-5)) for i, v in c]


def smoothing(c: Pairs, factor: float, curve: float) -> Pairs:
    top = c[0][1]
    k, s = (3 - curve) / 2, (curve - 1) / 2
    bent = [(i, -(k * factor * (v - top) ** 2) + s * factor * (v - top) ** 3 + top) for i, v in c]
    return sorted(bent, key=lambda p: (-p[1], p[0]))


def top_n_sigma(c: Pairs, n: float) -> Pairs:
    sigma = float(np.std([v for _, v in c]))
    return [(i, v) for i, v in c if v >= c[0][1] - n * sigma]


def min_p(c: Pairs, least: float) -> Pairs:
    return [x for x, p in zip(c, chances(c), strict=True) if p >= least * chances(c)[0]]


def top_k(c: Pairs, k: int) -> Pairs:
    return c[:k]


def top_p(c: Pairs, most: float) -> Pairs:
    kept, mass = [], 0.0
    for x, p in zip(c, chances(c), strict=True):
        kept.append(x)
        mass += p
        if mass >= most:
            break
    return kept


def typical_p(c: Pairs, most: float) -> Pairs:
    p, even = chances(c), entropy(c)
    surprise = [abs(-math.log(q) - even) for q in p]
    return [x for x, mine in zip(c, surprise, strict=True)
            if math.fsum(q for q, other in zip(p, surprise, strict=True) if other < mine) < most]  # fmt: skip


def epsilon_cutoff(c: Pairs, epsilon: float) -> Pairs:
    return [x for n, (x, p) in enumerate(zip(c, chances(c), strict=True)) if n == 0 or p >= epsilon / 10_000]


def eta_cutoff(c: Pairs, eta: float) -> Pairs:
    bound = min(eta / 10_000, math.sqrt(eta / 10_000) * math.exp(-entropy(c)))
    return [x for n, (x, p) in enumerate(zip(c, chances(c), strict=True)) if n == 0 or p >= bound]


def top_a(c: Pairs, a: float) -> Pairs:
    return [x for x, p in zip(c, chances(c), strict=True) if p >= a * chances(c)[0] ** 2 or x == c[0]]


def xtc(c: Pairs, threshold: float) -> Pairs:
    """With the coin fallen so."""
    above = sum(p >= threshold for p in chances(c))
    return c[above - 1 :] if above >= 2 else c


def mirostat(c: Pairs, version: int, mu: float, vocab: int) -> Pairs:
    p = chances(c)
    if version == 2:
        return [x for n, x in enumerate(c) if n == 0 or -math.log2(p[n]) <= mu]
    steps = [math.log((i + 2) / (i + 1)) for i in range(min(100, len(c)) - 1)]
    falls = [math.log(p[i] / p[i + 1]) for i in range(len(steps))]
    s = sum(t * b for t, b in zip(steps, falls, strict=True)) / sum(t * t for t in steps)
    e = s - 1
    k = ((e * 2**mu) / (1 - vocab**-e)) ** (1 / s)
    return c[: max(int(k), 1)]


def dry(
    x: Sequence[float], tokens: list[int], *, multiplier: float, base: float, allowed: int, last_n: int,
    breakers: Sequence[Sequence[int]] = (),
) -> list[float]:  # fmt: skip
    """Logits less the penalties: for each earlier place how many tokens up to it equal the last ones, one by one."""
    x = list(x)
    known = tokens if last_n < 0 else tokens[len(tokens) - min(last_n, len(tokens)) :]
    limit = len(tokens)
    for word in breakers:
        for end in range(len(word), len(tokens) + 1):
            if tokens[end - len(word) : end] == list(word):
                limit = min(limit, len(tokens) - end)
    longest: dict[int, int] = {}
    for at in range(len(known) - 1):
        n = 0
        while n <= at and known[at - n] == known[len(known) - 1 - n]:
            n += 1
        n = min(n, limit)
        if n >= allowed:
            longest[known[at + 1]] = max(longest.get(known[at + 1], 0), n)
    for token, n in longest.items():
        x[token] -= multiplier * base ** (n - allowed)
    return x


def no_repeat(x: Sequence[float], tokens: list[int], size: int) -> list[float]:
    grams = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    tail = tokens[len(tokens) - size + 1 :] if size > 1 else []
    return [-math.inf if (*tail, i) in grams else v for i, v in enumerate(x)]
