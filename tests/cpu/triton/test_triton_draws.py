"""Draws of every sampler through the Triton backend's ways, in the interpreter, against float64 definitions.

Few draws by default: they must be the reference's, token by token. TOKENMILL_DRAWS=20000 makes so many of each, which
must follow their definition by chi-square, too. All lines hold the same logits, and a cut reads nothing but its line:
of many lines it is then computed for one and given to all, since in the interpreter it takes most of the time.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from tests.cpu.sampling import plain_samplers as plain
from tests.cpu.sampling.sampler_cases import CASES, PROMPT, assert_follows, draws, logits_of, row, wanted_of

from tokenmill.core.step import RowSampling
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.sampling import cuts
from tokenmill.kernels.triton.sampling.cuts import cut_
from tokenmill.sampling.choose import Ask, Way, choose, way
from tokenmill.sampling.table import SamplingTable

Lines = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Limits = tuple[torch.Tensor | None, torch.Tensor | None]
COUNT = int(os.environ.get("TOKENMILL_DRAWS", "8"))
KERNELS = TritonKernels()
BY_BACKEND = {
    "temperature": (row(), lambda c: plain.temperature(c, 1.3)),
    "top-k": (row(top_k=7), lambda c: plain.top_k(plain.temperature(c, 1.3), 7)),
    "top-p": (row(top_p=0.8), lambda c: plain.top_p(plain.temperature(c, 1.3), 0.8)),
    "min-p": (row(min_p=0.05), lambda c: plain.min_p(plain.temperature(c, 1.3), 0.05)),
    "all three": (
        row(top_k=20, top_p=0.9, min_p=0.03),
        lambda c: plain.top_p(plain.top_k(plain.min_p(plain.temperature(c, 1.3), 0.03), 20), 0.9),
    ),
}


def once_(
    least: torch.Tensor, logits: torch.Tensor, lines: Lines, masks: Any, limits: Limits, *rest: Any, **kw: Any
) -> None:
    """cuts.cut_ for lines that are equal."""
    rows, scales, largest = lines
    for one in (least, logits, largest, scales[rows], *(limit[rows] for limit in limits if limit is not None)):
        assert bool((one == one[:1]).all())
    cut_(least[:1], logits[:1], (rows[:1], scales, largest[:1]), masks, limits, *rest, **kw)
    least[1:] = least[0]


def chosen(params: RowSampling, x: torch.Tensor, count: int) -> tuple[list[int], Way]:
    """As `draws`, by the backend."""
    table = SamplingTable(1, x.shape[1], "cpu")
    table.set_row(0, params, PROMPT)
    found: list[int] = []
    for first in range(0, count, 500):
        here = min(500, count - first)
        at = torch.zeros(here, dtype=torch.int64), PROMPT - 1 + first + torch.arange(here)
        ask = Ask(
            [0] * here, torch.zeros(1, 8, dtype=torch.int32), functools.partial(tuple, at), lambda: count + PROMPT
        )
        sampled, marked = choose(x.expand(here, -1).clone(), ask, table, KERNELS)
        assert torch.equal(sampled.ids, marked)
        found += sampled.ids.tolist()
    return found, way([0], ({}, {}), table, cuts=KERNELS.chooses)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*BY_BACKEND, *CASES])
def test_draws_follow_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if COUNT >= 500:
        monkeypatch.setattr(cuts, "cut_", once_)
    params, keep = BY_BACKEND.get(name) or CASES[name]
    x = logits_of()
    found, by = chosen(params, x, COUNT)
    assert by is (Way.BACKEND if name in (*BY_BACKEND, "plain") else Way.GENERAL)
    differ = sum(a != b for a, b in zip(found, draws(params, x, COUNT), strict=True))
    assert differ <= COUNT // 2000, "more than sums that are rounded otherwise explain"
    if COUNT >= 500:
        assert_follows(found, wanted_of(keep(plain.pairs(x[0].tolist()))))
