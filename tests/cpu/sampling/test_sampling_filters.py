"""min-p, top-k, top-p and typical-p keep what their definitions say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.cpu.sampling.sampling_oracle import keep_min_p, keep_top_k, keep_top_p, keep_typical, softmax

from tokenmill.sampling import filters

LOGITS = st.lists(st.integers(-40, 8).map(lambda i: i / 4) | st.just(-math.inf), min_size=1, max_size=30)
SHARES = st.floats(0.001, 0.999)


def scaled(line: list[float]) -> torch.Tensor:
    top = max(line)
    return torch.tensor([[v - top for v in line]])


def kept(s: torch.Tensor) -> list[bool]:
    return (s[0] > -math.inf).tolist()


def live(line: list[float], keep: list[bool]) -> list[bool]:
    return [k and v > -math.inf for v, k in zip(line, keep, strict=True)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LOGITS, SHARES)
def test_min_p(line: list[float], p: float) -> None:
    assume(max(line) > -math.inf)
    q = softmax(line)
    assume(all(abs(v - p * max(q)) > 1e-6 for v in q))
    s = scaled(line)
    filters.min_p_(s, torch.tensor([math.log(p)]))
    assert kept(s) == live(line, keep_min_p(line, p))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(LOGITS, st.integers(1, 40))
def test_top_k(line: list[float], k: int) -> None:
    assume(max(line) > -math.inf)
    s = scaled(line)
    filters.top_k_(s, torch.tensor([min(k, len(line))]), k)
    assert kept(s) == live(line, keep_top_k(line, k))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LOGITS, SHARES)
def test_top_p(line: list[float], p: float) -> None:
    assume(max(line) > -math.inf)
    q = softmax(line)
    assume(all(abs(math.fsum(a for a, w in zip(q, line, strict=True) if w > v) - p) > 1e-5 for v in line))
    s = scaled(line)
    filters.top_p_(s, torch.tensor([p]))
    assert kept(s) == live(line, keep_top_p(line, p))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LOGITS, SHARES)
def test_typical_p(line: list[float], p: float) -> None:
    assume(max(line) > -math.inf)
    keeps = [keep_typical(line, q) for q in (p - 1e-4, p, p + 1e-4)]
    assume(keeps[0] == keeps[1] == keeps[2])
    q = [v for v in softmax(line) if v > 0]
    entropy = -sum(v * math.log(v) for v in q)
    surprise = sorted({abs(-math.log(v) - entropy) for v in q})
    assume(all(b - a > 1e-5 or b - a < 1e-12 for a, b in itertools.pairwise(surprise)))
    s = scaled(line)
    filters.typical_p_(s, torch.tensor([p]))
    assert kept(s) == live(line, keeps[1])


def test_typical_p_agrees_with_transformers() -> None:
    from transformers.generation.logits_process import TypicalLogitsWarper

    x = torch.randn(20, 500, generator=torch.Generator().manual_seed(3)) * 4
    for p in (0.1, 0.5, 0.95):
        s = x - x.amax(-1, keepdim=True)
        filters.typical_p_(s, torch.full((20,), p))
        wanted = TypicalLogitsWarper(mass=p)(torch.zeros(20, 1, dtype=torch.long), x)
        assert torch.equal(s == -math.inf, wanted == -math.inf)


def test_top_k_and_top_p_agree_with_transformers() -> None:
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    x = torch.randn(20, 5000, generator=torch.Generator().manual_seed(4)) * 4
    none = torch.zeros(20, 1, dtype=torch.long)
    for k, p in ((50, 0.9), (5, 0.5), (4999, 0.99), (1, 0.01)):
        s = x - x.amax(-1, keepdim=True)
        filters.top_k_(s, torch.full((20,), k), k)
        filters.top_p_(s, torch.full((20,), p))
        wanted = TopPLogitsWarper(p)(none, TopKLogitsWarper(k)(none, x))
        assert torch.equal(s == -math.inf, wanted == -math.inf)


@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
def test_top_p_of_a_wide_vocabulary_is_the_full_sort(spread: float) -> None:
    """The first look finds the same threshold as sorting everything, and flat lines fall back to it."""
    x = torch.randn(4, 40_001, generator=torch.Generator().manual_seed(5)) * spread
    x = (x - x.amax(-1, keepdim=True)).mul(64).round().div(64)
    p = torch.tensor([0.1, 0.5, 0.9, 0.999])
    s = x.clone()
    filters.top_p_(s, p)
    bound = p.double() * filters.line_sums(x.exp()).double()
    threshold, _ = filters._mass_threshold(x.sort(dim=1, descending=True).values, bound)
    assert torch.equal(s > -math.inf, x >= threshold[:, None])
    for i in range(4):
        q = torch.softmax(x[i].double(), 0)
        mass = q[s[i] > -math.inf].sum()
        assert mass >= p[i] - 1e-5
        border = x[i][s[i] > -math.inf].min()
        assert q[x[i] > border].sum() < p[i] + 1e-5


def test_lines_are_independent_here_too() -> None:
    x = torch.randn(6, 32003, generator=torch.Generator().manual_seed(6)) * 2
    x -= x.amax(-1, keepdim=True)
    p = torch.tensor([0.3, 0.9, 0.95, 0.2, 0.7, 0.99])
    for change_ in (filters.top_p_, filters.typical_p_):
        together = x.clone()
        change_(together, p)
        for i in range(6):
            alone = x[i : i + 1].clone()
            change_(alone, p[i : i + 1])
            assert torch.equal(alone[0], together[i])
