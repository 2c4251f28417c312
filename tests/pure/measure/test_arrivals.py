"""Arrival processes have the gaps they promise, and traces mean what they say."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import ParameterError
from tokenmill.measure.arrivals import arrival_times
from tokenmill.measure.conversations import HASH_BLOCK, Lengths, Made, Reader, make_conversations, read_lengths
from tokenmill.measure.stats import SAMPLES, percentile, summary_ms, thin

MANY = 20_000


def gaps(pattern: str, rate: float = 5.0, **options: float) -> list[float]:
    times = arrival_times(pattern, rate, MANY, seed=3, **options)
    assert len(times) == MANY and times[0] == 0.0 and times == sorted(times)
    return [b - a for a, b in itertools.pairwise(times)]


def test_constant_gaps_are_equal() -> None:
    assert all(gap == pytest.approx(0.2) for gap in gaps("constant"))


@pytest.mark.parametrize(("pattern", "shape"), [("poisson", 1.0), ("bursty", 0.25), ("bursty", 0.5), ("bursty", 1.0)])
def test_random_gaps_have_mean_and_spread(pattern: str, shape: float) -> None:
    found = gaps(pattern, shape=shape)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.04)
    # The squared coefficient of variation of gamma gaps is 1 / shape; exponential ones have shape 1.
    assert statistics.pvariance(found) / mean**2 == pytest.approx(1 / shape, rel=0.1)


def test_exponential_gaps_have_the_right_shape() -> None:
    ordered = np.sort(gaps("poisson"))
    expected = 1 - np.exp(-5.0 * ordered)
    distance = np.abs(expected - np.arange(1, len(ordered) + 1) / len(ordered)).max()
    assert distance < 1.63 / len(ordered) ** 0.5, "Kolmogorov-Smirnov at 1 %"


def test_seeds_repeat_and_bad_rates_are_refused() -> None:
    assert arrival_times("poisson", 2.0, 9, seed=1) == arrival_times("poisson", 2.0, 9, seed=1)
    assert arrival_times("poisson", 2.0, 9, seed=1) != arrival_times("poisson", 2.0, 9, seed=2)
    assert arrival_times("poisson", 2.0, 0) == [] and arrival_times("bursty", 2.0, 1) == [0.0]
    for rate in (0.0, -1.0):
        with pytest.raises(ParameterError, match="must be positive"):
            arrival_times("poisson", rate, 3)


def test_percentiles_agree_with_numpy() -> None:
    source = random.Random(0)
    for size in (1, 2, 3, 10, 101, 1000):
        values = [source.expovariate(1.0) for _ in range(size)]
        found = summary_ms(values)
        for percent in (50, 90, 95, 99):
            exact = 1000 * np.percentile(values, percent)
            assert percentile(sorted(values), percent) * 1000 == pytest.approx(exact)
            assert found[f"p{percent}"] == pytest.approx(exact, abs=1e-4)
        assert found["mean"] == pytest.approx(1000 * np.mean(values), abs=1e-4)


def test_thinned_samples_keep_their_percentiles() -> None:
    source = random.Random(1)
    values = [source.gauss(5.0, 1.0) for _ in range(5 * SAMPLES)]
    kept = thin(values)
    assert len(kept) == SAMPLES and kept == sorted(kept)
    for percent in (0, 1, 50, 99, 100):
        assert np.percentile(kept, percent) == pytest.approx(1000 * np.percentile(values, percent), rel=1e-3)
    assert thin([0.002, 0.001]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("512", 512, 512, 512),
        ("10:20", 10, 20, 15),
        ("normal:100:10", 40, 160, 100),
        ("lognormal:64:0.5", 1, 900, 64),
        ("4k", 4000, 4000, 4000),
        ("1k:1Ki", 1000, 1024, 1012),
        ("normal:1k:10", 940, 1060, 1000),
    ],
)
def test_length_distributions(text: str, low: int, high: int, median: float) -> None:
    lengths, source = read_lengths(text, "--x"), random.Random(0)
    drawn = [lengths.draw(source) for _ in range(5000)]
    assert low <= min(drawn) and max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "a", "5:3", "-1", "1:2:3", "normal:5", "lognormal:0:1", "normal:a:b"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="--x takes a length"):
        read_lengths(text, "--x")


def test_made_conversations_share_prefixes() -> None:
    load = Made(30, Lengths("fixed", 5), Lengths("fixed", 7), turns=2, prefix=20, prefixes=3, vocab=500, seed=4)
    found = make_conversations(load)
    assert found == make_conversations(load)
    assert len({tuple(talk.turns[0].prompt[:20]) for talk in found}) == 3
    assert all(len(talk.turns[0].prompt) == 25 and len(talk.turns[1].prompt) == 5 for talk in found)
    assert all(10 <= token < 500 for talk in found for turn in talk.turns for token in turn.prompt)
    words = (
        make_conversations(Made(1, Lengths("fixed", 5), Lengths("fixed", 7), prefix=3, text=True))[0].turns[0].prompt
    )
    assert isinstance(words, str) and len(words.split()) == 8


def read(tmp_path: Path, text: str) -> list:
    file = tmp_path / "trace"
    file.write_text(text)
    return Reader(file, vocab=300).read()


def test_mooncake_traces_share_what_their_hashes_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 4500, "input_length": 600, "output_length": 6, "hash_ids": [7, 10]},
    ]
    a, b = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert (a.at, b.at) == (0.0, 1.5)
    (one,), (two,) = a.turns, b.turns
    assert (len(one.prompt), one.max_tokens, len(two.prompt), two.max_tokens) == (1100, 5, 600, 6)
    assert one.prompt[:HASH_BLOCK] == two.prompt[:HASH_BLOCK]
    assert one.prompt[HASH_BLOCK:600] != two.prompt[HASH_BLOCK:]


def test_sharegpt_traces_become_turns(tmp_path: Path) -> None:
    talk = {
        "id": "x",
        "conversations": [
            {"from": "system", "value": "Be brief. "},
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "x" * 40},
            {"from": "human", "value": "More"},
            {"from": "gpt", "value": "yes"},
            {"from": "human", "value": "unanswered"},
        ],
    }
    (found,) = read(tmp_path, json.dumps([talk, {"conversations": []}]))  # the published files have such entries
    assert [(t.prompt, t.max_tokens) for t in found.turns] == [("Be brief. Hello", 10), ("More", 1)]
    assert read(tmp_path, json.dumps(talk))[0] == found, "JSON lines do as well"


def test_our_own_lines_may_carry_times(tmp_path: Path) -> None:
    text = '{"prompt_token_ids": [1, 2], "max_tokens": 3, "at": 2}\n\n{"prompt": "abc", "max_tokens": 1, "at": 2.5}\n'
    a, b = read(tmp_path, text)
    assert a.turns[0].prompt == [1, 2] and b.turns[0].prompt == "abc" and (a.at, b.at) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ("nonsense", "is not JSON"),
        ("5", "must be a JSON object"),
        ('{"prompt": "a"}', "max_tokens must be a positive integer"),
        ('{"prompt": "a", "max_tokens": 1, "at": -1}', "must be a time"),
        ('{"input_length": 5, "output_length": 0}', "output_length must be a positive integer"),
        ('{"input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be"),
        ('{"conversations": 5}', "must be a list of objects"),
        ('{"conversations": [{"from": "human"}]}', "must be a list of objects"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1}', "timestamp must be a time"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 1}', "input_length must be a positive integer"),
        ('{"conversations": [5]}', "must be a list of objects"),
        ('{"prompt_token_ids": [1, "2"], "max_tokens": 1}', "not empty"),
    ],
)
def test_bad_lines_are_named_by_number(tmp_path: Path, bad: str, part: str) -> None:
    with pytest.raises(ParameterError, match="line 2") as caught:
        read(tmp_path, '{"prompt": "fine", "max_tokens": 1}\n' + bad)
    assert part in str(caught.value)
    with pytest.raises(ParameterError, match="empty"):
        read(tmp_path, "\n")
    with pytest.raises(ParameterError, match="cannot be read"):
        Reader(tmp_path / "none").read()
