"""The noise formula: exact integers, good distribution over tokens, indexes and seeds, exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.sampling.sampling_oracle import buckets_z, exponential, hash_of, key_of, softmax

from tokenmill.sampling.noise import (
    exponentials,
    few_exponentials,
    hash_bits,
    noisy_,
    position_keys,
    stream_of,
    token_bases,
)
from tokenmill.sampling.stable import first_max


def keys_of(seeds: list[int], indexes: list[int]) -> torch.Tensor:
    return position_keys(torch.tensor([stream_of(s) for s in seeds]), torch.tensor(indexes))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
)
def test_formula_in_python_integers(places: list[tuple[int, int]], tokens: list[int]) -> None:
    keys = keys_of([s for s, _ in places], [i for _, i in places])
    assert [k & (2**64 - 1) for k in keys.tolist()] == [key_of(s, i) for s, i in places]
    bases = token_bases(np.array(tokens))
    bits = hash_bits(keys, bases)
    wanted = [[hash_of(key_of(s, i), t) for t in tokens] for s, i in places]
    assert [[h & (2**32 - 1) for h in line] for line in bits.tolist()] == wanted
    assert torch.equal(bits, hash_bits(keys, bases.expand(len(places), -1)))
    e = exponentials(keys, bases)
    exact = [[exponential(s, i, t) for t in tokens] for s, i in places]
    np.testing.assert_allclose(e.numpy(), np.array(exact), rtol=3e-7)


KNOWN = [
    [0x2A003055, 0x25538E38, 0xAE165E98, 0x1C0518D4],
    [0xB6B41F59, 0xBF5DD3B8, 0xFE793D3E, 0x15DBAAAF],
    [0x2F0030EB, 0x8F386325, 0xD2096C89, 0x25CDA663],
]


def test_known_values() -> None:
    """Frozen: a change here changes every seeded sample that anyone has recorded."""
    keys = keys_of([0, 1, 2**64 - 1], [0, 5, 1000])
    bits = hash_bits(keys, token_bases(np.array([0, 1, 50256, 2**31 - 1])))
    assert [[h & (2**32 - 1) for h in line] for line in bits.tolist()] == KNOWN


def test_extreme_bits_stay_finite() -> None:
    bits = torch.tensor([0, 1, 0x7FFFFFFF, 0x7FFFFFC0], dtype=torch.int32)
    v = bits.float().add_(0.5).mul_(-float.fromhex("0x1.fffffep-32"))
    e = v.log1p().neg()
    assert (e > 0).all() and e.isfinite().all() and e.log().isfinite().all()


STREAMS = {
    "tokens": lambda n: (keys_of([7], [3]), torch.arange(n)),
    "indexes": lambda n: (keys_of([7] * n, list(range(n))), torch.tensor([42])),
    "seeds": lambda n: (keys_of(list(range(n)), [0] * n), torch.tensor([42])),
    "high seeds": lambda n: (keys_of([i << 48 for i in range(n)], [9] * n), torch.tensor([0])),
    "strided tokens": lambda n: (keys_of([7], [3]), torch.arange(n) * 1024),
}


@pytest.mark.parametrize("name", STREAMS)
def test_bits_are_uniform_and_serially_independent(name: str) -> None:
    keys, tokens = STREAMS[name](1 << 16)
    h = hash_bits(keys, token_bases(tokens.numpy())).flatten().numpy().view(np.uint32)
    for shift in (0, 8, 16, 23, 24):
        counts = np.bincount((h >> shift) & 255, minlength=256)
        assert abs(buckets_z(counts, np.full(256, h.size / 256))) < 4.5, shift
    for lag in (1, 2, 256):
        pairs = ((h[:-lag] >> 24 & 31) << 5) | (h[lag:] >> 24 & 31)
        counts = np.bincount(pairs, minlength=1024)
        assert abs(buckets_z(counts, np.full(1024, pairs.size / 1024))) < 4.5, lag


@pytest.mark.parametrize("what", ["token", "index", "seed"])
def test_each_input_bit_flips_half_of_the_output_bits(what: str) -> None:
    trials, rng = 4000, np.random.default_rng(1)
    seeds = rng.integers(0, 2**62, trials).tolist()
    indexes, tokens = rng.integers(0, 2**20, trials).tolist(), rng.integers(0, 2**17, trials).tolist()

    def bits(s: list[int], i: list[int], t: list[int]) -> np.ndarray:
        return hash_bits(keys_of(s, i), token_bases(np.array(t))[:, None])[:, 0].numpy().view(np.uint32)

    plain = bits(seeds, indexes, tokens)
    for bit in range(17 if what == "token" else 20):
        flip = 1 << bit
        other = bits(
            [s ^ flip for s in seeds] if what == "seed" else seeds,
            [i ^ flip for i in indexes] if what == "index" else indexes,
            [t ^ flip for t in tokens] if what == "token" else tokens,
        )
        for out in range(32):
            share = (((plain ^ other) >> out) & 1).mean()
            assert abs(share - 0.5) < 0.06, (bit, out, share)


@pytest.mark.parametrize("over", ["seeds", "indexes", "both"])
def test_choice_has_exact_probabilities(over: str) -> None:
    n = 40_000
    logits = torch.tensor([0.0, -0.5, -1.0, -1.0, -2.0, -3.0, -4.0, -5.0, -float("inf"), -6.0])
    seeds = [7] * n if over == "indexes" else list(range(n))
    indexes = [3] * n if over == "seeds" else [i % 977 for i in range(n)] if over == "both" else list(range(n))
    scores = noisy_(logits.repeat(n, 1), keys_of(seeds, indexes), token_bases(np.arange(10)))
    counts = np.bincount(first_max(scores)[1].numpy(), minlength=10)
    p = np.array(softmax(logits.tolist()))
    assert counts[8] == 0
    live = p > 0
    assert abs(buckets_z(counts[live], n * p[live])) < 4


def test_choice_in_a_large_flat_vocabulary() -> None:
    """The winner's noise is tiny here: it must be resolved finely enough, or low ids win ties."""
    n, size = 640, 1 << 15
    scores = noisy_(torch.zeros(n, size), keys_of(list(range(n)), [0] * n), token_bases(np.arange(size)))
    best = scores.topk(2, dim=1).values
    assert (best[:, 0] == best[:, 1]).sum() <= 2
    counts = np.bincount(first_max(scores)[1].numpy() * 32 // size, minlength=32)
    assert abs(buckets_z(counts, np.full(32, n / 32))) < 4


def test_choice_weighs_a_long_tail() -> None:
    n, size = 1500, 50257
    logits = -torch.linspace(0, 12, size).sqrt() * 3
    scores = noisy_(logits.repeat(n, 1), keys_of([99] * n, list(range(n))), token_bases(np.arange(size)))
    p = torch.softmax(logits.double(), 0).cumsum(0).numpy()
    places = np.searchsorted(np.linspace(0, 1, 21)[1:-1], p[first_max(scores)[1].numpy()])
    expected = np.bincount(np.searchsorted(np.linspace(0, 1, 21)[1:-1], p), np.diff(p, prepend=0), minlength=20) * n
    assert abs(buckets_z(np.bincount(places, minlength=20), expected)) < 4


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 300])
def test_few_numbers_have_the_same_bits(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    keys = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    ids = torch.randint(0, 128256, (count,), generator=generator)
    whole = exponentials(keys, token_bases(np.arange(128256))).log_()
    few = few_exponentials(keys.numpy(), token_bases(ids.numpy()).numpy())
    assert torch.equal(torch.from_numpy(few), whole[torch.arange(count), ids])
