"""The samplers of llama.cpp's users against plain_samplers.py: what is kept, and how often it is drawn."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import numpy as np
import pytest
import torch
from tests.cpu.sampling import plain_samplers as plain
from tests.cpu.sampling.sampler_cases import (
    CASES,
    DRAWS,
    EACH,
    PROMPT,
    VOCAB,
    assert_follows,
    draws,
    edited,
    hot,
    logits_of,
    repeats,
    row,
    wanted_of,
)

from tokenmill.core.samplers import USUAL_ORDER
from tokenmill.core.step import RowSampling
from tokenmill.sampling import repeats as repeats_of
from tokenmill.sampling.sampler import Lines, Sampled, sample
from tokenmill.sampling.steps import STEPS
from tokenmill.sampling.table import SamplingTable
from tokenmill.sampling.xtc import coins


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


@pytest.mark.parametrize("before", [{}, {"top_k": 2}, {"min_p": 0.9}])
def test_a_threshold_of_0_takes_in_no_token_that_is_forbidden(before: dict[str, float]) -> None:
    """XTC leaves the least likely of those that are left, which need not be all."""
    x = torch.full((1, 6), -math.inf)
    x[0, 2:4] = torch.tensor([1.5, 1.5 if "min_p" in before else 1.0])
    found = draws(row(xtc_probability=1.0, xtc_threshold=0.0, **before), x, 50)
    assert set(found) <= {2, 3} and ("min_p" in before or set(found) == {3})
    x[0, 3] = -math.inf
    assert set(draws(row(xtc_probability=1.0, xtc_threshold=0.0, **before), x, 50)) == {2}


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


def test_dry_and_ngrams_follow_the_definition() -> None:
    params, x, histories, wanted = repeats()
    found = edited(params, x, histories)
    assert sum(w != o for w, o in zip(wanted, x.tolist(), strict=True)) > 150
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=1e-5)
    alone = torch.cat([edited([p], x[i : i + 1], [h]) for i, (p, h) in enumerate(zip(params, histories, strict=True))])
    assert torch.equal(found, alone)


@pytest.mark.parametrize("at_once", [1 << 9, 32 << 20])
def test_windows_count_what_rounds_count(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats_of, "WINDOW_BYTES", at_once)
    generator = torch.Generator().manual_seed(9)
    for longest, rounds in ((1, 1), (2, 3), (60, 1), (60, 9), (60, 66)):
        history = torch.randint(0, 2, (40, longest), generator=generator, dtype=torch.int32)
        lengths = torch.randint(1, longest + 1, (40,), generator=generator)
        known = repeats_of.Known(history, lengths, torch.arange(longest))
        last, first = lengths[:, None] - 1, torch.randint(0, 9, (40, 1), generator=generator)
        rounds = min(rounds, longest)
        counted = [by(known, last, first, rounds) for by in (repeats_of._equal_by_rounds, repeats_of._equal_by_windows)]
        within = (known.places < last) & (known.places >= first)
        assert torch.equal(counted[0][within], counted[1][within])


def test_penalties_look_at_the_last_tokens_alone() -> None:
    history = [1, 2, 3, 4, 4, 5]
    x = torch.ones(1, VOCAB)
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.125}
    for last_n, halved, counted in ((-1, {1, 2, 3, 4, 5}, {4: 2, 5: 1}), (2, {4, 5}, {4: 1, 5: 1}), (0, set(), {})):
        found = edited([RowSampling(repeat_last_n=last_n, **fields)], x, [history])[0].tolist()
        for token in range(VOCAB):
            count = counted.get(token, 0)
            assert found[token] == (0.5 if token in halved else 1.0) - 0.25 * count - 0.125 * (count > 0)


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
