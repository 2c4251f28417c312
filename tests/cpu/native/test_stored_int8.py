"""Keys and values in int8 and int4: what is stored against the reference's bytes, attention against the reference on
the same pages, and a row's bytes against its own in chunks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, KVFormat, KVSpec, KVView
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kvcache.pool import KVPool, make_layout

REFERENCE = ReferenceKernels()
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 30)), min_size=1, max_size=3)
BLOCK = 16


def pages(
    kind: str, kv_heads: int, dims: tuple[int, int], group: int, blocks: int, stored: str = "int8"
) -> tuple[AttentionSpec, KVView]:
    heads = 1 if kind == "latent" else kv_heads
    kv = KVSpec(kind, heads, dims[0], min(dims) if kind == "latent" else dims[1])  # type: ignore[arg-type]
    view = KVPool(make_layout((kv,), BLOCK, KVFormat(stored, group)), [blocks], "cpu").views[0]
    assert view.key_scale is not None and view.value_scale is not None
    view.key_scale.fill_(math.nan)  # what was never stored must not be seen
    view.value_scale.fill_(math.nan)
    return AttentionSpec(0, 0, heads * 3, kv, 1 / math.sqrt(dims[0])), view


def step(kernels, view: KVView, spans: list[tuple[int, int]], bases: list[int]) -> ForwardContext:
    """Sequences with (tokens before, new tokens); sequence i has the blocks up to bases[i], in descending order."""
    width = max(-(-(old + new) // BLOCK) for old, new in spans)
    counts = [-(-(old + new) // BLOCK) for old, new in spans]
    tables = [[max(base - j, 0) for j in range(width)] for base in bases]
    positions, slots, host, at = [], [], [], 0
    for (old, new), table in zip(spans, tables, strict=True):
        positions += range(old, old + new)
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(old, old + new)]
        host.append((at, new, old + new))
        at += new
    ints = lambda v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    plan = GroupPlan(ints(tables), None, ints(counts), torch.tensor(slots))
    return ForwardContext(
        kernels, torch.tensor(positions), ints([0] + [s + n for s, n, _ in host]), ints([n for _, _, n in host]),
        max(n for _, n, _ in host), [view], [plan], host, block_size=BLOCK,
    )  # fmt: skip


def product(spec: AttentionSpec, tokens: int, dtype: torch.dtype, seed: int) -> Tensor:
    kv = spec.kv
    width = spec.heads * kv.key_dim + kv.key_dim if kv.kind == "latent" else (
        spec.heads * kv.key_dim + kv.heads * (kv.key_dim + kv.value_dim)
    )  # fmt: skip
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FEW
@given(
    sizes=SIZES, dims=st.sampled_from([(64, 64), (24, 40), (32, 8)]), group=st.sampled_from([0, 4, 8]),
    kind=st.sampled_from(["full", "latent"]), kv_heads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_stores_and_attends_as_the_reference(kernels, dtype, stored, sizes, dims, group, kind, kv_heads, seed):
    width = max(-(-(a + b) // BLOCK) for a, b in sizes)
    bases = [(i + 1) * width - 1 for i in range(len(sizes))]
    spec, view = pages(kind, kv_heads, dims, group, width * len(sizes), stored)
    _, same = pages(kind, kv_heads, dims, group, width * len(sizes), stored)
    before = [(0, old) for old, _ in sizes if old]
    for spans, at in ((before, [b for b, (old, _) in zip(bases, sizes, strict=True) if old]), (sizes, bases)):
        if not spans:
            continue
        qkv = product(spec, sum(new for _, new in spans), dtype, seed)
        mine, theirs = step(kernels, view, spans, at), step(REFERENCE, same, spans, at)
        q, wanted_q = kernels.prepare_qkv(qkv, spec, mine), REFERENCE.prepare_qkv(qkv, spec, theirs)
        assert torch.equal(q, wanted_q)
        for got, want in zip(parts(view), parts(same), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    got, want = kernels.attention(q, spec, mine), REFERENCE.attention(q.float(), spec, theirs)
    assert kernels.counters()["attention"]["fallbacks"] == 0
    assert bool(got.isfinite().all())
    assert (got.float() - want).abs().max() < (2e-5 if dtype == torch.float32 else 3e-2) * want.abs().max().clamp(
        min=0.5
    )


def parts(view: KVView) -> list[Tensor]:
    assert view.key_scale is not None and view.value_scale is not None
    return [view.key, view.value, view.key_scale, view.value_scale]


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.bfloat16, "int4")]
)
def test_chunks_company_and_threads_change_no_byte(kernels, threads, dtype, stored):
    spec, view = pages("full", 2, (64, 64), 0, 200, stored)
    qkv = product(spec, 1300, dtype, 1)
    threads(2)
    whole = step(kernels, view, [(0, 1300)], [90])
    wanted = kernels.attention(kernels.prepare_qkv(qkv, spec, whole), spec, whole)
    for count, cuts in ((1, [0, 1, 640, 1299, 1300]), (3, [0, 511, 513, 1298, 1300])):
        threads(count)
        spec, view = pages("full", 2, (64, 64), 0, 200, stored)
        for start, stop in itertools.pairwise(cuts):
            other = product(spec, 5, dtype, stop)
            mixed = step(kernels, view, [(start, stop - start), (0, 5)], [90, 100])
            q = kernels.prepare_qkv(torch.cat([qkv[start:stop], other]), spec, mixed)
            got = kernels.attention(q, spec, mixed)[: stop - start]
            assert torch.equal(got, wanted[start:stop]), (start, stop)


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_a_broken_token_does_not_reach_those_before_it(kernels, stored):
    spec, view = pages("full", 1, (32, 32), 0, 8, stored)
    qkv = product(spec, 40, torch.float32, 2)
    qkv[30, -1] = math.nan
    ctx = step(kernels, view, [(0, 40)], [7])
    found = kernels.attention(kernels.prepare_qkv(qkv, spec, ctx), spec, ctx)
    assert bool(found[:30].isfinite().all())
    assert bool(found[30:].isnan().any(-1).all())
