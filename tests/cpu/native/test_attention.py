"""Native q/k/v preparation and paged attention against a naive float64 form, and against their own bytes."""

from __future__ import annotations

import math
import random as pyrandom
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmill.compute.forward import (
    AttentionSpec,
    ForwardContext,
    GroupPlan,
    KVSpec,
    KVView,
    NormSpec,
    RopeSpec,
    Touches,
)
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Case:
    """Sequences of (kv_len, queries) with keys and values of their own, laid out in shuffled pages."""

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    latent: bool = False
    gaps: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False

    def __post_init__(self) -> None:
        self.heads -= self.heads % self.kv_heads
        kind = "latent" if self.latent else "window" if self.window else "full"
        kv = KVSpec(kind, self.kv_heads, self.key_dim, self.value_dim, abs(self.window))
        self.spec = AttentionSpec(
            0, 0, self.heads, kv, 1 / math.sqrt(self.key_dim), softcap=self.softcap, window=self.window,
            sinks=random(self.heads, seed=8) if self.sinks else None,
            alibi=random(self.heads, seed=9).abs() if self.alibi else None,
        )  # fmt: skip
        self.keys = [random(n, self.kv_heads, self.key_dim, dtype=self.kv_dtype, seed=10 + i)
                     for i, (n, _) in enumerate(self.lengths)]  # fmt: skip
        self.values = [k[..., : self.value_dim] if self.latent else
                       random(k.shape[0], self.kv_heads, self.value_dim, dtype=self.kv_dtype, seed=50 + i)
                       for i, k in enumerate(self.keys)]  # fmt: skip
        self.q = [random(m, self.heads, self.key_dim, dtype=self.dtype, seed=90 + i)
                  for i, (_, m) in enumerate(self.lengths)]  # fmt: skip
        # The first blocks of a sequence may be gone (a window, or a span that was never loaded).
        self.dropped = [max(0, n - m - abs(self.window) + 1) // self.block if self.gaps else 0 for n, m in self.lengths]

    def seen(self, i: int, j: int) -> Tensor:
        """Keys that query j of sequence i sees."""
        n, m = self.lengths[i]
        at, pos = n - m + j, torch.arange(n)
        mask = (pos <= at) & (pos >= self.dropped[i] * self.block)
        if self.window < 0:
            return mask & (pos >= at - at % -self.window)
        return mask & (pos > at - self.window) if self.window else mask

    def naive(self) -> Tensor:
        out = []
        for i, (n, m) in enumerate(self.lengths):
            group = self.heads // self.kv_heads
            k = self.keys[i].double().repeat_interleave(group, 1)
            v = self.values[i].double().repeat_interleave(group, 1)
            for j in range(m):
                scores = torch.einsum("hd,nhd->hn", self.q[i][j].double(), k) * self.spec.scale
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.spec.alibi is not None:
                    scores = scores - self.spec.alibi.double()[:, None] * (n - m + j - torch.arange(n))
                scores = scores.masked_fill(~self.seen(i, j), -math.inf)
                if self.spec.sinks is not None:
                    scores = torch.cat([scores, self.spec.sinks.double()[:, None]], 1)
                p = torch.softmax(scores, -1)[:, :n]
                out.append(torch.einsum("hn,nhd->hd", p, v).flatten())
        return torch.stack(out)

    def context(self, kernels, order: list[int], parts: dict[int, tuple[int, int]] | None = None) -> ForwardContext:
        """Pages in shuffled order; sequence i may run only its queries parts[i] (later keys are then absent)."""
        blocks = sum(-(-n // self.block) for n, _ in self.lengths) + 1
        key = torch.full((blocks, self.kv_heads, self.block, self.key_dim), math.nan, dtype=self.kv_dtype)
        value = key[..., : self.value_dim] if self.latent else key.new_full((*key.shape[:3], self.value_dim), math.nan)
        free = pyrandom.Random(3).sample(range(blocks), blocks)
        rows: dict[int, list[int]] = {}
        for i, (n, _) in enumerate(self.lengths):
            rows[i] = [free.pop() for _ in range(-(-n // self.block))]
            for p in range(n):
                key[rows[i][p // self.block], :, p % self.block] = self.keys[i][p]
                if not self.latent:
                    value[rows[i][p // self.block], :, p % self.block] = self.values[i][p]
        spans, positions = [], []
        for i in order:
            n, m = self.lengths[i]
            a, b = parts[i] if parts else (0, m)
            spans.append((len(positions), b - a, n - m + b))
            positions += range(n - m + a, n - m + b)
        tables = [rows[i][self.dropped[i] :] for i in order]
        width = max(map(len, tables))
        first = [[(self.dropped[i] + j) * self.block for j in range(width)] for i in order]
        ints = lambda v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
        plan = GroupPlan(
            ints([t + [0] * (width - len(t)) for t in tables]), ints(first) if self.gaps else None,
            ints([len(t) for t in tables]), torch.full((len(positions),), -1),
        )  # fmt: skip
        return ForwardContext(
            kernels, torch.tensor(positions), ints([0] + [s + c for s, c, _ in spans]), ints([n for _, _, n in spans]),
            max(c for _, c, _ in spans), [KVView(key, value)], [plan], spans, block_size=self.block,
        )  # fmt: skip

    def run(self, kernels, order: list[int] | None = None) -> Tensor:
        order = list(range(len(self.lengths))) if order is None else order
        return kernels.attention(torch.cat([self.q[i] for i in order]), self.spec, self.context(kernels, order))


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    tolerance = 2e-5 if torch.float32 is dtype is kv_dtype or kv_dtype == dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@FEW
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=3),
    heads=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 7])),
    dims=st.sampled_from([(16, 16), (64, 64), (20, 12), (80, 80), (96, 40), (7, 5)]),
    block=st.sampled_from([4, 16, 32]),
    dtypes=st.sampled_from([(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                            (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]),
    extras=st.sampled_from([{}, {"window": 7}, {"window": 40, "gaps": True}, {"window": -48},
                            {"window": -40, "gaps": True}, {"softcap": 3.0}, {"sinks": True},
                            {"alibi": True}, {"sinks": True, "window": 9, "softcap": 5.0}]),
)  # fmt: skip
def test_attention(kernels, lengths, heads, dims, block, dtypes, extras):
    case = Case(
        [(max(n, m), min(n, m)) for n, m in lengths], heads[0] * heads[1], heads[0], *dims, block, *dtypes, **extras
    )
    close(case.run(kernels), case.naive(), *dtypes)
    assert kernels.counters()["attention"]["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_and_the_merge_of_chunks(kernels, threads, dtype):
    case = Case([(1700, 1), (3, 2), (1030, 40)], 4, 1, 64, 64, dtype=dtype, kv_dtype=dtype)
    wanted = case.naive()
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(case.run(kernels))
        close(results[-1], wanted, dtype, dtype)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    alone = case.run(kernels, [0])  # few rows over many keys: chunks are tasks
    assert torch.equal(alone, results[0][:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_reads_values_from_keys(kernels, dtype):
    case = Case([(70, 5), (600, 1)], 8, 1, 72, 64, dtype=dtype, kv_dtype=dtype, latent=True)
    close(case.run(kernels), case.naive(), dtype, dtype)


@pytest.mark.parametrize(
    "extras", [{}, {"window": 50}, {"window": -50}, {"alibi": True}, {"sinks": True, "softcap": 4.0}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bytes_in_any_company_and_chunking(kernels, threads, extras, dtype):
    case = Case([(600, 130), (40, 1), (90, 30)], 6, 2, 32, 32, dtype=dtype, kv_dtype=dtype, **extras)
    whole = case.run(kernels)
    shuffled = case.run(kernels, [2, 0, 1])
    assert torch.equal(torch.cat([shuffled[30:160], shuffled[160:], shuffled[:30]]), whole)
    start = 0
    for stop in (1, 2, 50, 129, 130):  # prefill in chunks, later keys not there yet
        threads(1 + stop % 3)
        context = case.context(kernels, [0], {0: (start, stop)})
        assert torch.equal(kernels.attention(case.q[0][start:stop], case.spec, context), whole[start:stop])
        start = stop


def test_sparse_tables_skip_what_no_entry_covers(kernels):
    """A table with a hole in its middle: those positions are not attended to."""
    case = Case([(64, 2)], 2, 1, 16, 16, block=8)
    context = case.context(kernels, [0])
    plan = context.groups[0]
    keep = [0, 1, 4, 5, 6, 7]
    hole = GroupPlan(plan.tables[:, keep], torch.tensor([[8 * j for j in keep]], dtype=torch.int32),
                     torch.tensor([6], dtype=torch.int32), plan.slots)  # fmt: skip
    context.groups[0] = hole
    got = kernels.attention(case.q[0], case.spec, context)
    torch.testing.assert_close(got, REFERENCE.attention(case.q[0], case.spec, context), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, case.run(kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 8])
def test_a_broken_token_reaches_only_the_queries_that_see_it(kernels, dtype, window):
    case = Case([(600, 90)], 4, 2, 32, 32, dtype=dtype, kv_dtype=dtype, window=window)
    clean = case.run(kernels)
    for broken in (case.keys[0], case.values[0]):
        kept = broken[560].clone()
        broken[560] = math.nan
        got = case.run(kernels)
        broken[560] = kept
        first = 560 - (600 - 90)
        last = first + window if window else 90
        assert torch.equal(got[:first], clean[:first])
        assert torch.equal(got[last:], clean[last:])
        assert bool(got[first:last].isnan().any(-1).all())


@FEW
@given(
    tokens=st.integers(1, 30), heads=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3])),
    dims=st.sampled_from([(16, 16), (64, 64), (20, 12)]), rope=st.sampled_from(["none", "half", "pairs", "part"]),
    norm=st.sampled_from(["none", "head", "whole"]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16]), latent=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_prepare_qkv(kernels, tokens, heads, dims, rope, norm, dtype, kv_dtype, latent, seed):
    kv_heads = 1 if latent else heads[0]
    query_heads, (dk, dv) = kv_heads * heads[1], dims
    angle = random(200, 4 if rope == "part" else dk // 2, seed=1)
    spec = AttentionSpec(
        0, 0, query_heads, KVSpec("latent" if latent else "full", kv_heads, dk, dv), 1.0,
        rope=None if rope == "none" else RopeSpec(
            angle.cos(), angle.sin(), 8 if rope == "part" else dk, rope == "pairs", 5 if rope == "part" else 0),
        touches=Touches() if norm == "none" else Touches(
            NormSpec(random(dk if norm == "head" else query_heads * dk, seed=2), 1e-5),
            NormSpec(random(dk if norm == "head" else kv_heads * dk, seed=3), 1e-5)),
    )  # fmt: skip
    width = query_heads * dk + (dk if latent else kv_heads * (dk + dv))
    qkv = random(tokens, width, dtype=dtype, seed=seed)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:tokens]
    results = []
    for backend in (kernels, REFERENCE):
        key = torch.zeros(8, kv_heads, 8, dk, dtype=kv_dtype)
        value = key[..., :dv] if latent else torch.zeros(8, kv_heads, 8, dv, dtype=kv_dtype)
        context = ForwardContext(
            backend, torch.randint(0, 200, (tokens,), generator=torch.Generator().manual_seed(seed)),
            torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32), tokens,
            [KVView(key, value)], [GroupPlan(torch.zeros(1, 1, dtype=torch.int32), None, torch.ones(1), slots)],
            block_size=8,
        )  # fmt: skip
        results.append((backend.prepare_qkv(qkv, spec, context), key, value))
    tolerance = 1e-5 if dtype == kv_dtype == torch.float32 else 3e-2
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert kernels.counters()["prepare_qkv"]["fallbacks"] == 0


def test_slots_and_positions_outside_are_refused(kernels):
    kv = KVSpec("full", 1, 16, 16)
    angle = random(8, 8)
    spec = AttentionSpec(0, 0, 1, kv, 1.0, rope=RopeSpec(angle.cos(), angle.sin(), 16))
    view = KVView(torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16))
    for slot, position, message in ((8, 0, "slot outside"), (0, 8, "rope table"), (0, -1, "rope table")):
        one = torch.ones(1, dtype=torch.int32)
        plan = GroupPlan(torch.zeros(1, 1, dtype=torch.int32), None, one, torch.tensor([slot]))
        context = ForwardContext(
            kernels, torch.tensor([position]), torch.tensor([0, 1], dtype=torch.int32), one, 1, [view], [plan],
            block_size=4,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kernels.prepare_qkv(random(1, 48), spec, context)


def test_pages_that_move_are_bound_again(kernels):
    case = Case([(20, 1)])
    assert torch.equal(case.run(kernels), case.run(kernels))  # each run makes new pages
    case.keys[0] = case.keys[0].flip(0)
    torch.testing.assert_close(case.run(kernels).double(), case.naive(), rtol=2e-5, atol=2e-5)
