"""Cuts without sorting, in the interpreter: the tokens that top-k and top-p keep by their definition."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmill.core.step import RowSampling
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.sampling.choose import Ask, Way, choose, way
from tokenmill.sampling.table import SamplingTable

KERNELS = TritonKernels()


def scaled(lines: int, size: int, seed: int) -> torch.Tensor:
    x = torch.randn(lines, size, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 9, lines)[:, None]
    x[1::4, ::3] = -math.inf
    x[2::4] = x[2::4].round()  # many equal ones
    x[3::4, : size - 2] -= 80.0  # two tokens have all of the probability
    return x - x.amax(-1, keepdim=True)


def kept_by_definition(line: list[float], k: int, p: float) -> set[int]:
    best = sorted(line, reverse=True)
    least = best[min(k, len(line)) - 1]
    weights = [math.exp(v) if v >= least else 0.0 for v in line]
    bound = p * math.fsum(weights)
    if p < 1.0:
        least = next(
            v for v in reversed(best) if math.fsum(w for w, u in zip(weights, line, strict=True) if u > v) < bound
        )
    return {i for i, v in enumerate(line) if v >= least}


LIMITS = ((1, 1.0), (3, 0.5), (40, 0.9), (1 << 20, 0.3), (1 << 20, 0.999), (1 << 20, 1.0))


@pytest.mark.parametrize("size", [1, 700])
def test_what_is_kept(size):
    s = scaled(4, size, size) if size > 5 else torch.zeros(4, size)
    for i in range(0, 6, 1 if size < 9 else 2):
        ks = torch.tensor([min(LIMITS[(i + j) % 6][0], size) for j in range(4)])
        ps = torch.tensor([LIMITS[(i + j) % 6][1] for j in range(4)])
        least = KERNELS.least_kept(s, ks, ps)
        assert least is not None
        # In two steps, as filters are applied one by one, the border has the same bits.
        first = KERNELS.least_kept(s, ks, None)
        second = KERNELS.least_kept(s.masked_fill(s < first[:, None], -math.inf), None, ps)
        assert torch.equal(torch.maximum(first, second), least)
        for line, border, k, p in zip(s.tolist(), least.tolist(), ks.tolist(), ps.tolist(), strict=True):
            assert {i for i, v in enumerate(line) if v >= border} == kept_by_definition(line, k, p)


def test_rows_of_every_kind_choose_the_same_in_any_company():
    size, rows = 300, [0, 1, 2, 3, 4, 5, 1, 3]
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(3)) * 4
    params = [RowSampling(), RowSampling(temperature=0.7, seed=1, top_k=20, top_p=0.8),
              RowSampling(temperature=1.0, seed=2, min_p=0.05),
              RowSampling(temperature=1.3, seed=3, top_p=0.95, min_p=0.01), RowSampling(temperature=0.9, seed=4),
              RowSampling(temperature=0.9, seed=5, top_k=5)]  # fmt: skip
    masks = {3: [(b"\x55" * 38), (b"\x0f" * 38)], 4: b"\xf0" * 38}

    def run(lines: list[int], more: list[RowSampling], masked: dict) -> list[int]:
        table = SamplingTable(8, size, "cpu")
        for row, one in enumerate(more):
            table.set_row(row, one, 3)
        some = [rows[i] for i in lines]
        at = torch.tensor(some), torch.tensor([i + 5 for i in lines])
        ask = Ask(some, torch.zeros(8, 32, dtype=torch.int32), lambda: at, lambda: 32, masked)
        expected = Way.BACKEND if len(more) == 6 else Way.GENERAL
        assert way([*some, 6] if len(more) > 6 else some, (masked, {}), table, cuts=True) is expected
        if len(more) > 6:  # a row in the company wants what no backend does
            at = torch.cat([at[0], torch.tensor([6])]), torch.cat([at[1], torch.tensor([9])])
            ask = Ask([*some, 6], ask.tokens, lambda: at, lambda: 32, masked)
            return choose(torch.cat([logits[lines], logits[:1]]), ask, table, KERNELS)[0].ids.tolist()[:-1]
        return choose(logits[lines].clone(), ask, table, KERNELS)[0].ids.tolist()

    whole = run(list(range(8)), params, masks)
    assert run(list(range(8)), [*params, RowSampling(temperature=1.0, repetition_penalty=1.2)], masks) == whole
    for i in (1, 3, 7):
        mine = {}
        if rows[i] in masks:
            mask = masks[rows[i]]
            mine = {rows[i]: mask if isinstance(mask, bytes) else mask[rows[:i].count(rows[i])]}
        assert run([i], params, mine) == [whole[i]], i
