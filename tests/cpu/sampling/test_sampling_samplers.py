"""The samplers of llama.cpp's users against plain_samplers.py: what is kept, and how often it is drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import plain_samplers as plain
import pytest
import torch

from tokenmill.core.samplers import USUAL_ORDER
from tokenmill.core.step import RowSampling
from tokenmill.sampling.sampler import Lines, Sampled, sample
from tokenmill.sampling.steps import STEPS
from tokenmill.sampling.table import SamplingTable
from tokenmill.sampling.xtc import coins

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
    table = SamplingTable(1, x.shape[1], "cpu")
    table.set_row(0, params, PROMPT)
    lengths = PROMPT + torch.arange(count)
    lines = Lines(
        [0] * count, torch.zeros(count, dtype=torch.int64), lengths, torch.zeros(1, 8, dtype=torch.int32), {}, {}
    )
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


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_definition(name: str) -> None:
    params, keep = CASES[name]
    x = logits_of()
    assert_follows(draws(params, x, DRAWS), wanted_of(keep(plain.pairs(x[0].tolist()))))


def test_xtc_tosses_a_coin_per_position() -> None:
    x = logits_of()
    c = hot(plain.pairs(x[0].tolist()))
    whole, cut = wanted_of(c), wanted_of(plain.xtc(c, 0.08))
    assert set(whole) - set(cut)
    mixed = {i: 0.7 * p + 0.3 * cut.get(i, 0.0) for i, p in whole.items()}
    assert_follows(draws(row(xtc_probability=0.3, xtc_threshold=0.08), x, DRAWS), mixed)


def test_coins_are_uniform_and_no_part_of_the_noise() -> None:
    found = coins(torch.arange(DRAWS) * 0x9E3779B97F4A7C1)
    counts = np.histogram(found.numpy(), bins=20, range=(0, 1))[0]
    assert abs(counts - DRAWS / 20).max() < 5 * math.sqrt(DRAWS / 20)


def keeps(params: RowSampling, x: torch.Tensor) -> list[set[int]]:
    """Which tokens stay, line by line: each is made to win by a draw of its own."""
    from tokenmill.sampling.noise import position_keys
    from tokenmill.sampling.sampler import steps_of
    from tokenmill.sampling.steps import Part

    table = SamplingTable(1, x.shape[1], "cpu")
    table.set_row(0, params, PROMPT)
    s = (x - x.amax(-1, keepdim=True)) * table.inverse_temperature[0]
    zeros = torch.zeros(len(x), dtype=torch.int64)
    for taken, users in steps_of([table.bits[0]] * len(x), [params] * len(x)):
        assert len(users) == len(x)
        part = Part(s, zeros, [params] * len(x), position_keys(zeros, zeros), table.columns)
        for step in taken:
            step.apply_(part)
            assert (part.s.amax(-1) == 0).all(), step.name
    return [{i for i, v in enumerate(line) if v > -math.inf} for line in s.tolist()]


@pytest.mark.parametrize("name", CASES)
def test_any_distribution_keeps_what_the_definition_keeps(name: str) -> None:
    params, keep = CASES[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, VOCAB, generator=generator) * torch.linspace(0.01, 9, 200)[:, None]
    x[::7, :25] = -math.inf
    differ = 0
    for line, found in zip(x.tolist(), keeps(params, x), strict=True):
        differ += found != {i for i, _ in keep(plain.pairs(line))}
    assert differ <= 2, "more than rounding at a border explains"


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_the_definition(version: int) -> None:
    x = logits_of(8)
    mu = 2.6
    params = row(mirostat=version, mirostat_tau=2.0, mirostat_eta=0.25, top_k=1, xtc_probability=1.0)
    table = SamplingTable(DRAWS, VOCAB, "cpu")
    table.set_row(0, params, PROMPT, mu)
    for name in ("_floats", "_ints", "_rare"):
        values = getattr(table, name)
        values[1:] = values[:1]
    table.bits, table.params = [table.bits[0]] * DRAWS, [params] * DRAWS
    lines = Lines(
        list(range(DRAWS)),
        torch.arange(DRAWS),
        PROMPT + torch.arange(DRAWS),
        torch.zeros(DRAWS, 4, dtype=torch.int32),
        {},
        {},
    )
    sampled = sample(x.expand(DRAWS, -1), lines, table)
    kept = plain.mirostat(hot(plain.pairs(x[0].tolist())), version, mu, VOCAB)
    assert 1 < len(kept) < VOCAB
    wanted = wanted_of(kept)
    assert_follows(sampled.ids.tolist(), wanted)
    assert sampled.pending.mus is not None
    found, numbers = sampled.pending.mus
    assert numbers == list(range(DRAWS))
    for token, new in {*zip(sampled.ids.tolist(), found.tolist(), strict=True)}:
        assert new == pytest.approx(mu - 0.25 * (-math.log2(wanted[token]) - 2.0), abs=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_of_drafts_is_one_token_after_the_other(version: int) -> None:
    x = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    params = row(mirostat=version, mirostat_tau=3.0)

    def run(lines: list[int], mu: float | None) -> Sampled:
        table = SamplingTable(2, VOCAB, "cpu")
        table.set_row(0, RowSampling(), PROMPT)
        table.set_row(1, params, PROMPT, mu)
        rows = [1] * len(lines)
        lengths = torch.tensor([PROMPT + i for i in lines])
        at = Lines(rows, torch.tensor(rows), lengths, torch.zeros(2, 16, dtype=torch.int32), {}, {})
        return sample(x[lines], at, table)

    together = run(list(range(6)), None)
    mu: float | None = None
    for i in range(6):
        alone = run([i], mu)
        assert alone.pending.mus is not None and together.pending.mus is not None
        assert alone.ids.tolist() == together.ids.tolist()[i : i + 1]
        mu = alone.pending.mus[0].item()
        assert mu == together.pending.mus[0][i].item()


def test_a_forced_token_leaves_mirostat_alone() -> None:
    table = SamplingTable(1, VOCAB, "cpu")
    table.set_row(0, row(mirostat=2, allowed_ids=[7]), PROMPT, 4.25)
    lines = Lines([0], torch.tensor([0]), torch.tensor([PROMPT]), torch.zeros(1, 8, dtype=torch.int32), {}, {})
    sampled = sample(logits_of(), lines, table)
    assert sampled.pending.mus is not None
    assert (sampled.ids.tolist(), sampled.pending.mus[0].tolist()) == ([7], [4.25])


def edited(params: list[RowSampling], x: torch.Tensor, histories: list[list[int]]) -> torch.Tensor:
    from tokenmill.sampling.edits import ChangedLines, edit_

    count = len(histories)
    table = SamplingTable(count, x.shape[1], "cpu")
    tokens = torch.full((count, 80), 77, dtype=torch.int32)
    for i, known in enumerate(histories):
        table.set_row(i, params[i], PROMPT)
        tokens[i, : len(known)] = torch.tensor(known, dtype=torch.int32)
    lengths = torch.tensor([len(h) for h in histories])
    lines = Lines(list(range(count)), torch.arange(count), lengths, tokens, {}, {})
    changed = ChangedLines(
        x.clone(), list(range(count)), [table.bits[i] for i in range(count)], lines, table, {}, None, {}
    )
    edit_(changed)
    return changed.x


def test_dry_and_ngrams_follow_the_definition() -> None:
    rng = random.Random(4)
    params, histories, wanted = [], [], []
    x = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(4))
    for i in range(300):
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
    found = edited(params, x, histories)
    assert sum(w != o for w, o in zip(wanted, x.tolist(), strict=True)) > 150
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=1e-5)
    alone = torch.cat([edited([p], x[i : i + 1], [h]) for i, (p, h) in enumerate(zip(params, histories, strict=True))])
    assert torch.equal(found, alone)


def test_penalties_look_at_the_last_tokens_alone() -> None:
    history = [1, 2, 3, 4, 4, 5]
    x = torch.ones(1, VOCAB)
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.125}
    for last_n, halved, counted in ((-1, {1, 2, 3, 4, 5}, {4: 2, 5: 1}), (2, {4, 5}, {4: 1, 5: 1}), (0, set(), {})):
        found = edited([RowSampling(repeat_last_n=last_n, **fields)], x, [history])[0].tolist()
        for token in range(VOCAB):
            count = counted.get(token, 0)
            assert found[token] == (0.5 if token in halved else 1.0) - 0.25 * count - 0.125 * (count > 0)


EACH = {
    **{name: params for name, (params, _) in CASES.items()},
    "mirostat 1": row(mirostat=1, mirostat_tau=2.0),
    "mirostat 2": row(mirostat=2, mirostat_tau=2.0),
    "dry": row(dry_multiplier=2.0, dry_breakers=[([1], []), ([4, 5], [6])]),
    "ngrams": row(no_repeat_ngram_size=3, xtc_probability=0.5, xtc_threshold=0.05),
    "window": row(repetition_penalty=1.4, repeat_last_n=9),
    "greedy dry": RowSampling(dry_multiplier=2.0),
}


@pytest.mark.parametrize("size", [VOCAB, 1000])
def test_the_same_bytes_in_any_company(size: int) -> None:
    rng = random.Random(size)
    names = list(EACH)
    table = SamplingTable(len(names), size, "cpu")
    tokens = torch.randint(0, 9, (len(names), 64), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    x = torch.randn(len(names), size, generator=torch.Generator().manual_seed(size)) * 3
    lengths = torch.tensor([rng.randint(PROMPT, 60) for _ in names])
    for i, name in enumerate(names):
        table.set_row(i, EACH[name], PROMPT)

    def run(rows: list[int]) -> list[tuple[int, float | None]]:
        lines = Lines(rows, torch.tensor(rows), lengths[rows], tokens, {}, {})
        sampled = sample(x[rows], lines, table)
        mus = (
            {}
            if sampled.pending.mus is None
            else dict(zip(sampled.pending.mus[1], sampled.pending.mus[0].tolist(), strict=True))
        )
        return [(token, mus.get(i)) for i, token in enumerate(sampled.ids.tolist())]

    alone = [run([i])[0] for i in range(len(names))]
    for _ in range(12):
        rows = rng.sample(range(len(names)), rng.randint(2, len(names)))
        assert run(rows) == [alone[i] for i in rows]


@pytest.mark.parametrize("name", EACH)
def test_nothing_waits_for_the_device_or_mixes_devices(name: str) -> None:
    """Tensors without memory: a number that the host would read, or a host tensor among them, is an error."""
    table = SamplingTable(2, VOCAB, "meta")
    for i in range(2):
        table.set_row(i, EACH[name], PROMPT)
    rows = [0, 1, 1]
    lengths, tokens = torch.full((3,), 9, device="meta"), torch.zeros(2, 32, dtype=torch.int32, device="meta")
    lines = Lines(rows, torch.tensor(rows, device="meta"), lengths, tokens, {}, {}, 16)
    sampled = sample(torch.zeros(3, VOCAB, device="meta"), lines, table)
    assert sampled.ids.is_meta and sampled.bad.is_meta


def test_the_table_of_steps_is_the_usual_order() -> None:
    assert tuple(step.name for step in STEPS) == USUAL_ORDER
    bits = [step.bit for step in STEPS]
    assert len(set(bits)) == len(bits) and list(accumulate(bits))[-1] == sum(bits)
