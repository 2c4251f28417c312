"""Prompt lookup in one launch leaves what the specification leaves."""

from __future__ import annotations

import random

import pytest
import torch

from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton import TritonKernels

WIDE = 5000
"""More tokens than a program compares at one time, twice."""


@pytest.mark.parametrize("sizes", [(2, 4), (1, 1), (3, 3), (1, 9), (2, 64)])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_same_guesses(sizes: tuple[int, int], count: int) -> None:
    kernels, dice = TritonKernels(), random.Random(f"{sizes} {count}")
    lengths = [1, 2, 3, 30, 700, 2048, 2049, 4100, WIDE]
    tokens = torch.zeros((2 * len(lengths), WIDE + count), dtype=torch.int32)
    length = torch.zeros(2 * len(lengths), dtype=torch.int64)
    for i, known in enumerate(lengths):
        kinds = dice.choice([1, 2, 3, 40])
        tokens[2 * i] = torch.tensor(dice.choices(range(kinds), k=WIDE + count))  # behind the known ones: rubbish
        length[2 * i] = known
        if known > 100:  # a long run that comes again early, and a shorter one late
            end = tokens[2 * i, known - 20 : known].clone()
            tokens[2 * i, 11:31] = end
            tokens[2 * i, known - 50 : known - 47] = end[-3:]
    row_ids = torch.tensor(dice.sample(range(0, 2 * len(lengths), 2), len(lengths)))
    wanted, before = tokens.clone(), tokens.clone()
    ReferenceKernels().look_up_(row_ids, count, sizes, WIDE, wanted, length)
    kernels.look_up_(row_ids, count, sizes, WIDE, tokens, length)
    assert torch.equal(tokens, wanted) and not torch.equal(tokens, before)
    assert kernels.counters()["look_up_"] == {"calls": 1, "fallbacks": 0}
