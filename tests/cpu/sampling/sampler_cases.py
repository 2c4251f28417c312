"""Cases of llama.cpp's samplers for any device: parameters, what their definition keeps, draws and edits of lines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from tests.cpu.sampling import plain_samplers as plain

from tokenmill.core.step import RowSampling
from tokenmill.sampling.edits import ChangedLines, edit_
from tokenmill.sampling.sampler import Lines, sample
from tokenmill.sampling.table import SamplingTable

VOCAB, DRAWS, PROMPT = 40, 20_000, 3
T = 1.3
Kept = Callable[[plain.Pairs], plain.Pairs]


def hot(c: plain.Pairs) -> plain.Pairs:
    return plain.temperature(c, T)


def row(**fields: object) -> RowSampling:
    return RowSampling(temperature=T, seed=11, **fields)


CASES: dict[str, tuple[RowSampling, Kept]] = {
    "plain": (row(), hot),
    "dynatemp": (row(dynatemp_range=0.9, dynatemp_exponent=1.7), lambda c: plain.temperature(c, T, 0.9, 1.7)),
    "dynatemp from 0": (row(dynatemp_range=2.0), lambda c: plain.temperature(c, T, 2.0, 1.0)),
    "smoothing": (row(smoothing_factor=0.4), lambda c: plain.smoothing(hot(c), 0.4, 1.0)),
    "smoothing curve": (row(smoothing_factor=0.3, smoothing_curve=4.5), lambda c: plain.smoothing(hot(c), 0.3, 4.5)),
    "top_n_sigma": (row(top_n_sigma=1.2), lambda c: plain.top_n_sigma(hot(c), 1.2)),
    "epsilon": (row(epsilon_cutoff=250.0), lambda c: plain.epsilon_cutoff(hot(c), 250.0)),
    "eta": (row(eta_cutoff=900.0), lambda c: plain.eta_cutoff(hot(c), 900.0)),
    "top_a": (row(top_a=0.6), lambda c: plain.top_a(hot(c), 0.6)),
    "typical": (row(typical_p=0.4), lambda c: plain.typical_p(hot(c), 0.4)),
    "typical before cut-offs": (
        row(typical_p=0.3, epsilon_cutoff=3000.0, top_a=0.9),
        lambda c: plain.top_a(plain.epsilon_cutoff(plain.typical_p(hot(c), 0.3), 3000.0), 0.9),
    ),
    "typical before min_p": (
        row(typical_p=0.4, min_p=0.5, order=["typical_p", "min_p", "temperature"]),
        lambda c: hot(plain.min_p(plain.typical_p(c, 0.4), 0.5)),
    ),
    "typical before sigma": (
        row(typical_p=0.5, top_n_sigma=0.5, smoothing_factor=0.3, order=["typical_p", "top_n_sigma", "smoothing"]),
        lambda c: plain.smoothing(plain.top_n_sigma(plain.typical_p(c, 0.5), 0.5), 0.3, 1.0),
    ),
    "xtc": (row(xtc_probability=1.0, xtc_threshold=0.08), lambda c: plain.xtc(hot(c), 0.08)),
    "xtc off": (row(xtc_probability=1.0, xtc_threshold=0.51), hot),
    "all": (
        row(top_n_sigma=2.0, min_p=0.02, top_k=25, top_p=0.97, top_a=0.1, xtc_probability=1.0, xtc_threshold=0.1),
        lambda c: plain.xtc(
            plain.top_a(plain.top_p(plain.top_k(plain.min_p(plain.top_n_sigma(hot(c), 2.0), 0.02), 25), 0.97), 0.1), 0.1
        ),
    ),
    "llama.cpp's order": (
        row(
            top_k=30,
            top_p=0.9,
            min_p=0.05,
            xtc_probability=1.0,
            xtc_threshold=0.1,
            order=["top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"],
        ),
        lambda c: hot(plain.xtc(plain.min_p(plain.top_p(plain.top_k(c, 30), 0.9), 0.05), 0.1)),
    ),
    "left out and twice": (
        row(top_k=3, top_p=0.9, order=["top_p", "temperature", "temperature"]),
        lambda c: hot(hot(plain.top_p(c, 0.9))),
    ),
    "no temperature": (row(min_p=0.1, order=["min_p"]), lambda c: plain.min_p(c, 0.1)),
}


def logits_of(seed: int = 5) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def draws(params: RowSampling, x: torch.Tensor, count: int) -> list[int]:
    """One line for each output index: a row's noise depends on it alone."""
    device = x.device
    table = SamplingTable(1, x.shape[1], device)
    table.set_row(0, params, PROMPT)
    lengths, zeros = PROMPT + torch.arange(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    lines = Lines([0] * count, zeros, lengths, torch.zeros(1, 8, dtype=torch.int32, device=device), {}, {})
    sampled = sample(x.expand(count, -1), lines, table)
    assert not sampled.bad.any()
    return sampled.ids.tolist()


def chi_square(tokens: list[int], wanted: dict[int, float]) -> tuple[float, int]:
    """Of cells that are expected at least eight times; the others are one cell."""
    cells = [t for t, p in wanted.items() if p * len(tokens) >= 8]
    counts = np.bincount(tokens, minlength=VOCAB)
    found = [float(counts[t]) for t in cells] + [len(tokens) - float(sum(counts[t] for t in cells))]
    mean = [wanted[t] * len(tokens) for t in cells]
    mean.append(len(tokens) - sum(mean))
    if mean[-1] < 1:
        assert found[-1] <= 12
        found, mean = found[:-1], mean[:-1]
    return sum((f - m) ** 2 / m for f, m in zip(found, mean, strict=True)), len(found) - 1


def assert_follows(tokens: list[int], wanted: dict[int, float]) -> None:
    assert set(tokens) <= set(wanted), "a token that had been dropped"
    value, freedom = chi_square(tokens, wanted)
    if freedom:  # Wilson and Hilferty: about normal; the draws are fixed by the seed
        z = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        assert z < 4, (value, freedom)


def wanted_of(kept: plain.Pairs) -> dict[int, float]:
    return {i: p for (i, _), p in zip(kept, plain.chances(kept), strict=True)}


def edited(params: list[RowSampling], x: torch.Tensor, histories: list[list[int]]) -> torch.Tensor:
    """The lines after penalties, DRY, bans of n-grams and the like."""
    count, device = len(histories), x.device
    table = SamplingTable(count, x.shape[1], device)
    tokens = torch.full((count, 80), 77, dtype=torch.int32)
    for i, known in enumerate(histories):
        table.set_row(i, params[i], PROMPT)
        tokens[i, : len(known)] = torch.tensor(known, dtype=torch.int32)
    lengths = torch.tensor([len(h) for h in histories])
    at = torch.arange(count, device=device)
    lines = Lines(list(range(count)), at, lengths.to(device), tokens.to(device), {}, {})
    changed = ChangedLines(
        x.clone(), list(range(count)), [table.bits[i] for i in range(count)], lines, table, {}, None, {}
    )
    edit_(changed)
    return changed.x


def repeats(count: int = 300) -> tuple[list[RowSampling], torch.Tensor, list[list[int]], list[list[float]]]:
    """Rows that repeat themselves under DRY and bans of n-grams: parameters, logits, histories, edited lines."""
    rng = random.Random(4)
    params, histories, wanted = [], [], []
    x = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(4))
    for i in range(count):
        few = rng.choice([2, 3, VOCAB])
        history = [rng.randrange(few) for _ in range(rng.randint(PROMPT, 70))]
        if rng.random() < 0.5:  # a long repetition
            part = history[-rng.randint(1, 20) :]
            history = [*part, *history, *part][-75:]
        breakers = [([5, 1], []), ([0, 2], [1, 1])] if rng.random() < 0.5 else []
        spelled = [[5], [1], [0, 1, 1], [2, 1, 1]] if breakers else []
        fields = {"multiplier": 0.8, "base": rng.choice([1.0, 1.75]), "allowed": rng.choice([0, 1, 2, 5])}
        last_n = rng.choice([-1, 0, 9, 1000])
        size = rng.choice([0, 0, 1, 2, 4])
        line = x[i].tolist()
        kind = rng.randrange(3)
        if kind != 1:
            line = plain.dry(line, history, last_n=last_n, breakers=spelled, **fields)
        if kind != 0 and size:
            line = plain.no_repeat(line, history, size)
        params.append(
            RowSampling(
                dry_multiplier=0.8 if kind != 1 else 0.0,
                dry_base=fields["base"],
                dry_allowed_length=fields["allowed"],
                dry_penalty_last_n=last_n,
                dry_breakers=breakers,
                no_repeat_ngram_size=size if kind != 0 else 0,
            )
        )
        histories.append(history)
        wanted.append(line)
    return params, x, histories, wanted


EACH = {
    **{name: params for name, (params, _) in CASES.items()},
    "mirostat 1": row(mirostat=1, mirostat_tau=2.0),
    "mirostat 2": row(mirostat=2, mirostat_tau=2.0),
    "dry": row(dry_multiplier=2.0, dry_breakers=[([1], []), ([4, 5], [6])]),
    "ngrams": row(no_repeat_ngram_size=3, xtc_probability=0.5, xtc_threshold=0.05),
    "window": row(repetition_penalty=1.4, repeat_last_n=9),
    "greedy dry": RowSampling(dry_multiplier=2.0),
}
