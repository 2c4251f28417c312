"""Workload files are checked whole, and percentiles mean what they say."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from tokenmill.core.errors import ParameterError
from tokenmill.measure.stats import percentile, summary_ms
from tokenmill.measure.workloads import Uniform, read_workload


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "w.jsonl"
    file.write_text(text)
    return file


def test_token_ids_and_text(tmp_path: Path) -> None:
    lines = '{"prompt_token_ids": [0, 5], "max_tokens": 3}\n\n{"prompt": "abc", "max_tokens": 1}\n'
    workload = read_workload(write(tmp_path, lines))
    assert workload.name == "w.jsonl"
    assert workload.jobs(lambda text: [ord(c) for c in text], 1000) == [([0, 5], 3), ([97, 98, 99], 1)]
    with pytest.raises(ParameterError, match=r"w\.jsonl, line 2: text needs a tokenizer"):
        workload.jobs(None, 1000)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": "a"}', "max_tokens must be a positive integer, got None"),
        ('{"prompt": "a", "max_tokens": 0}', "got 0"),
        ('{"prompt": "a", "max_tokens": true}', "got True"),
        ('{"prompt": "a", "max_tokens": 1.5}', "got 1.5"),
        ('{"prompt": "", "max_tokens": 1}', "not empty"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "not empty"),
        ('{"prompt_token_ids": [1, -1], "max_tokens": 1}', "not empty"),
        ('{"prompt_token_ids": [1, "2"], "max_tokens": 1}', "not empty"),
        ('{"max_tokens": 1}', "not empty"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, bad: str, part: str) -> None:
    file = write(tmp_path, '{"prompt": "fine", "max_tokens": 1}\n' + bad + "\n")
    with pytest.raises(ParameterError, match="line 2") as caught:
        read_workload(file)
    assert part in str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="at least one request"):
        read_workload(write(tmp_path, "\n\n"))


def test_made_up_workloads_repeat_themselves() -> None:
    jobs = Uniform(3, 5, 7, seed=1).jobs(None, 50)
    assert jobs == Uniform(3, 5, 7, seed=1).jobs(None, 50) != Uniform(3, 5, 7, seed=2).jobs(None, 50)
    assert [(len(ids), count) for ids, count in jobs] == [(5, 7)] * 3
    assert all(0 <= token < 50 for ids, _ in jobs for token in ids)


def test_percentiles_agree_with_the_standard_library() -> None:
    source = random.Random(0)
    for size in (2, 3, 10, 101):
        values = sorted(source.random() for _ in range(size))
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        for percent in (1, 50, 90, 95, 99):
            assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert percentile([4.0], 99) == 4.0


def test_summaries_are_in_milliseconds_and_null_without_values() -> None:
    assert summary_ms([0.003, 0.001, 0.002]) == {"p50": 2.0, "p90": 2.8, "p95": 2.9, "p99": 2.98, "mean": 2.0}
    assert set(summary_ms([]).values()) == {None}
