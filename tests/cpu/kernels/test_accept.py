"""Verification of drafts: which samples stand, and where rows are afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.kernels import ReferenceKernels, make_kernels

WIDTH = 12
BACKENDS = ["reference", "auto"]


def made(backend: str) -> Kernels:
    return ReferenceKernels() if backend == "reference" else make_kernels("cpu")


def standing(samples: list[int], drafts: list[int]) -> list[int]:
    """The samples that stand, by the words of the specification; a bad one is negative."""
    for n, sample in enumerate(samples):
        if sample < 0:
            return samples[:n] or [~sample]
        if n == len(drafts) or sample != drafts[n]:
            return samples[: n + 1]
    raise AssertionError("a row samples once per draft and once more")


def run(
    kernels: Kernels, known: list[list[int]], drafts: list[list[int]], samples: list[list[int]]
) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Row 2 i + 1 holds the i-th case."""
    tokens = torch.full((2 * len(known) + 1, WIDTH), 7, dtype=torch.int32)
    length = torch.zeros(len(tokens), dtype=torch.int64)
    computed = torch.zeros_like(length)
    first, grants = 0, []
    for i, (head, tail, lines) in enumerate(zip(known, drafts, samples, strict=True)):
        row = 2 * i + 1
        tokens[row, : len(head) + len(tail)] = torch.tensor(head + tail)
        length[row], computed[row] = len(head), len(head) + len(tail)
        grants.append((row, first, len(tail)))
        first += len(lines)
    marked = torch.tensor([s for lines in samples for s in lines])
    given = torch.tensor(grants).T.contiguous()
    _, kept = kernels.accept_(given, max(len(d) for d in drafts), None, marked, tokens, length, computed)
    return kept.tolist(), tokens, length, computed


CASES = [
    ([], [5], [5]),
    ([1, 2], [1, 2, 3], [1, 2, 3]),
    ([1, 5], [1, 2, 3], [1, 2]),
    ([1, 2], [9, 2, 3], [9]),
    ([1, 2], [1, ~2, 3], [1]),  # bad behind a right draft: it is sampled again, as the first
    ([1, 2], [1, 2, ~3], [1, 2]),
    ([1, 2], [9, ~2, ~3], [9]),  # bad behind a wrong draft: no part of the text
    ([1, 2], [~1, 2, 3], [1]),  # bad, and first: the host is told by the mark
    ([0, 0], [~0, 0, 0], [0]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_stands(backend: str, case: int) -> None:
    drafts, samples, wanted = CASES[case]
    kept, tokens, length, computed = run(made(backend), [[3, 4]], [drafts], [samples])
    assert kept == [len(wanted)]
    assert tokens[1, : int(length[1])].tolist() == [3, 4, *wanted]
    assert computed[1] == length[1] - 1
    assert length[0] == length[2] == 0 and (tokens[0] == 7).all() and (tokens[2] == 7).all()


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_rows_together_are_as_each_alone(data: st.DataObject) -> None:
    known, drafts, samples = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        tried = data.draw(st.integers(0, 4))
        known.append(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH - 5)))
        drafts.append(data.draw(st.lists(st.integers(0, 1), min_size=tried, max_size=tried)))
        samples.append(data.draw(st.lists(st.integers(-2, 1), min_size=tried + 1, max_size=tried + 1)))
    for backend in BACKENDS:
        kept, tokens, length, computed = run(made(backend), known, drafts, samples)
        for i, head in enumerate(known):
            wanted = standing(samples[i], drafts[i])
            end = int(length[2 * i + 1])
            assert kept[i] == len(wanted) and tokens[2 * i + 1, :end].tolist() == head + wanted
            assert computed[2 * i + 1] == end - 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_at_the_end_of_its_room(backend: str) -> None:
    """One that tries fewer drafts than its company does not read or write past the end."""
    known = [[1] * (WIDTH - 1), [1]]
    kept, tokens, length, _ = run(made(backend), known, [[], [2, 3, 4]], [[6], [2, 3, 4, 5]])
    assert kept == [1, 4] and tokens[1].tolist() == [1] * (WIDTH - 1) + [6]
    assert tokens[3, :5].tolist() == [1, 2, 3, 4, 5] and length.tolist() == [0, WIDTH, 0, 5, 0]


def test_nothing_is_read_by_the_host() -> None:
    """Tensors without contents: whoever asks for a number raises."""

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    found = ReferenceKernels().accept_(empty(3, 4), 2, None, empty(9), empty(8, WIDTH), empty(8), empty(8))
    assert found[1].shape == (4,)
