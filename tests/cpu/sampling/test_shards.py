"""Ranks that choose among their own words choose what one rank with all words does, and tell each other little."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmill.compute.model import Words
from tokenmill.core.step import RowSampling
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.sampling.choose import Ask, choose, find_largest
from tokenmill.sampling.shards import takes
from tokenmill.sampling.table import SamplingTable

PROMPT = 3


class Meeting:
    """Ranks in threads, which meet at every exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.given: list[Any] = [None] * size
        self.bytes = 0


class Member:
    """One of them."""

    exact = True
    calls = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.meeting.given[self.rank] = x.clone()
        self.meeting.barrier.wait()
        found = torch.cat(self.meeting.given, dim)
        if self.rank == 0:
            self.meeting.bytes += x.numel() * x.element_size()
        self.meeting.barrier.wait()
        return found


def apart(logits: Tensor, borders: list[int], work: Callable[[Tensor, Words], Any]) -> tuple[list[Any], int]:
    """What each rank finds with its part of the words, and how many bytes the first one told."""
    meeting = Meeting(len(borders) - 1)
    found: list[Any] = [None] * meeting.size

    def run(rank: int) -> None:
        try:
            first, last = borders[rank : rank + 2]
            words = Words(Member(meeting, rank), first, last - first)  # type: ignore[arg-type]
            with torch.inference_mode():
                found[rank] = work(logits[:, first:last].clone(), words)
        except BaseException as error:
            found[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(meeting.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found, meeting.bytes


def borders_of(vocab: int, ranks: int) -> list[int]:
    """Parts that are as even as they can be: of vocabularies that do not divide the last one is smaller."""
    part = -(-vocab // ranks)
    return [*range(0, vocab, part), vocab]


GREEDY = RowSampling(temperature=0.0)
KINDS = {
    "greedy": [GREEDY],
    "temperature": [RowSampling(temperature=0.8, seed=1), RowSampling(temperature=2.5, seed=2)],
    "top-k": [RowSampling(temperature=1.0, seed=3, top_k=k) for k in (1, 2, 7, 40)],
    "min-p": [RowSampling(temperature=1.3, seed=4, min_p=0.03), RowSampling(temperature=0.6, seed=5, min_p=0.5)],
    "all of these": [
        RowSampling(temperature=0.9, seed=6, top_k=5, min_p=0.01),
        GREEDY,
        RowSampling(temperature=0.9, seed=7),
        RowSampling(temperature=0.9, seed=8, top_k=30),
        RowSampling(temperature=0.9, seed=9, min_p=0.2),
    ],
}
GATHERED = {
    "top-p": RowSampling(temperature=0.9, seed=6, top_p=0.9),
    "top-k and top-p": RowSampling(temperature=0.9, seed=6, top_k=20, top_p=0.9),
    "logprobs": RowSampling(temperature=0.0, num_logprobs=3),
    "typical": RowSampling(temperature=0.9, seed=2, typical_p=0.8),
    "penalty": RowSampling(temperature=0.0, repetition_penalty=1.3),
    "bias": RowSampling(temperature=0.0, logit_bias={3: 20.0}),
    "beams": RowSampling(temperature=0.0, num_candidates=4),
    "more than a part": RowSampling(temperature=0.9, seed=2, top_k=300),
    "own order": RowSampling(temperature=0.9, seed=2, top_k=9, order=["top_k", "temperature"]),
    "mirostat": RowSampling(temperature=0.9, seed=2, mirostat=2),
}


def table_of(params: list[RowSampling], vocab: int) -> SamplingTable:
    table = SamplingTable(len(params), vocab, "cpu")
    for row, each in enumerate(params):
        table.set_row(row, each, PROMPT)
    return table


def ask_of(rows: list[int], count: int) -> Ask:
    """So many lines, at positions of their own."""
    positions = PROMPT - 1 + torch.arange(count)
    tokens = torch.arange(8).repeat(max(rows) + 1, 1).to(torch.int32)
    return Ask(rows, tokens, lambda: (torch.tensor(rows), positions % 7 + 2), lambda: 8)


def lines(count: int, vocab: int) -> Tensor:
    """Logits, with equal largest ones in different parts, and lines that are bad."""
    x = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    x[1, vocab // 5] = x[1, vocab - 2] = x[1].max() + 1
    x[2, vocab - 1] = torch.nan
    x[3, 0] = torch.inf
    x[4] = -torch.inf
    x[5] = 0.0
    x[6, : vocab - 3] = -torch.inf
    return x


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("vocab", [320, 1001, 40_000])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_choose_what_the_whole_does(kind: str, vocab: int, ranks: int) -> None:
    params, kernels = KINDS[kind], ReferenceKernels()
    count = 8 if vocab > 2000 else 24
    rows = [i % len(params) for i in range(count)]
    logits, table = lines(count, vocab), table_of(params, vocab)
    sampled, marked = choose(logits.clone(), ask_of(rows, count), table, kernels)
    good = marked >= 0

    def work(part: Tensor, words: Words) -> Any:
        assert takes(rows, table, words)
        mine, said = choose(part, ask_of(rows, count), table, kernels, words)
        mine.collect()
        return said, mine.bad, mine.errors

    sampled.bad = marked < 0  # as the runner reads it
    sampled.collect()
    found, told = apart(logits, borders_of(vocab, ranks), work)
    for said, bad, errors in found:
        assert torch.equal(said >= 0, good) and torch.equal(said[good], marked[good])
        assert torch.equal(bad, sampled.bad) and errors.keys() == sampled.errors.keys()
        assert all(errors[i] == sampled.errors[i] for i in (2, 3))
    most = max((params[row].top_k for row in rows if params[row].top_k > 0), default=0)
    drawn = sum(params[row].temperature > 0 for row in rows)
    assert told <= 8 * count + 8 * drawn + 4 * most * drawn


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", GATHERED)
def test_what_needs_all_logits_gathers_them(kind: str, ranks: int) -> None:
    vocab, kernels = 600, ReferenceKernels()
    params = [GATHERED[kind], GREEDY]
    logits, table = lines(24, vocab)[7:15], table_of(params, vocab)
    rows = [i % 2 for i in range(8)]
    sampled, marked = choose(logits.clone(), ask_of(rows, 8), table, kernels)
    sampled.collect()

    def work(part: Tensor, words: Words) -> Any:
        assert not takes(rows, table, words)
        mine, said = choose(part, ask_of(rows, 8), table, kernels, words)
        mine.collect()
        return said, mine.logprobs, mine.candidates

    found, told = apart(logits, borders_of(vocab, ranks), work)
    for said, logprobs, candidates in found:
        assert torch.equal(said, marked) and logprobs == sampled.logprobs and candidates == sampled.candidates
    assert told == 8 * vocab // ranks * 4


def test_a_mask_needs_all_logits() -> None:
    vocab, kernels = 64, ReferenceKernels()
    table, logits = table_of([GREEDY], vocab), lines(9, vocab)[7:8]
    masked = ask_of([0], 1)
    masked.masks = {0: bytes([1 << 4]) + bytes(7)}
    found, _ = apart(logits, borders_of(vocab, 2), lambda part, words: choose(part, masked, table, kernels, words)[1])
    assert [each.tolist() for each in found] == [[4], [4]]


def test_the_largest_of_all_is_found_without_a_table() -> None:
    """As recorded steps do it, which know nothing of rows."""
    kernels = ReferenceKernels()
    for vocab, ranks in itertools.product((64, 333), (1, 2, 3)):
        logits = lines(12, vocab)
        wanted = kernels.greedy(logits)
        found, told = apart(logits, borders_of(vocab, ranks), lambda part, words: find_largest(part, kernels, words))
        for ids, marked, largest in found:
            good = wanted[1] >= 0
            assert torch.equal(marked >= 0, good) and torch.equal(ids[good], wanted[0][good])
            assert torch.equal(largest[good], wanted[2][good])
        assert told == 8 * len(logits)
