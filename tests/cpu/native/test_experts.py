"""Choosing experts, running them, and products per head: against the reference, and a row's bytes against its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, RouteSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import Unrounded

REFERENCE = ReferenceKernels()
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


ORDERS = ["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@FEW
@given(
    tokens=st.integers(1, 20), experts=st.sampled_from([4, 8, 24]), top_k=st.integers(1, 4), groups=st.integers(1, 2),
    order=st.sampled_from(ORDERS), normalise=st.booleans(), sum2=st.booleans(),
    bias=st.booleans(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    divisor=st.sampled_from([(1e-20, 0.0), (0.0, 0.0), (1e-6, 0.0), (0.0, 1e-12)]), shift=st.sampled_from([0, 24, -56]),
)  # fmt: skip
def test_choices_are_the_references(
    kernels, tokens, experts, top_k, groups, order, normalise, sum2, bias, seed, dtype, divisor, shift
):
    spec = RouteSpec(
        experts, min(top_k, experts // groups), order, normalise, 1.5, groups, 1, sum2,
        random(experts, seed=seed + 1) * 0.1 if bias else None, *divisor,
    )  # fmt: skip
    logits = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(seed + t))
                          for t in range(tokens)]).to(dtype) * 0.25 + shift  # fmt: skip
    (ids, gates), (want_ids, want_gates) = kernels.route(logits, spec), REFERENCE.route(logits, spec)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(gates, want_gates, rtol=1e-5, atol=1e-7)
    assert kernels.counters()["route"]["fallbacks"] == 0
    alone = [kernels.route(line[None], spec)[1] for line in logits]
    assert torch.equal(torch.cat(alone), gates)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("experts", "top_k", "groups"), [(4, 2, 1), (64, 8, 1), (64, 6, 8), (8, 8, 1)])
def test_of_equal_experts_the_first_are_taken(kernels, experts, top_k, groups, order):
    """As logits in bfloat16 often are, and those of a router that was never trained."""
    logits = torch.stack([torch.zeros(experts), *random(40, experts).mul(2).round() / 2])
    spec = RouteSpec(experts, top_k, order, groups=groups, top_groups=max(1, groups // 2))
    (ids, gates), (want_ids, want_gates) = kernels.route(logits, spec), REFERENCE.route(logits, spec)
    assert torch.equal(ids, want_ids) and ids[0].tolist() == list(range(top_k))
    torch.testing.assert_close(gates, want_gates, rtol=1e-5, atol=1e-7)


def settled(kernels, hidden: int, inner: int, count: int, dtype: torch.dtype, bits: int, bias: bool) -> Any:
    ups, downs = [], []
    for e in range(count):
        for made, (rows, columns) in ((ups, (2 * inner, hidden)), (downs, (hidden, inner))):
            seed = 10 * e + len(ups)
            weight, beside = (random(rows, columns, seed=seed) * 0.2).to(dtype), random(rows, seed=seed + 5).to(dtype)
            whole = DenseWeight(weight, beside if bias else None)
            made.append((whole if bits == 16 else Unrounded(weight, whole.bias, bits)).settle(kernels))
    return ups, downs


@pytest.mark.parametrize(
    ("bits", "act"), [(16, "silu_mul"), (8, "silu_mul"), (4, "silu_mul"), (16, "clipped_silu_mul")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FEW
@given(tokens=st.integers(1, 30), top_k=st.integers(1, 3), bias=st.booleans(), seed=st.integers(0, 99))
def test_experts_as_one_call(kernels, bits, act, dtype, tokens, top_k, bias, seed):
    """The same products one by one, in the same order of additions; experts of other ranks add nothing."""
    hidden, inner, count = 96, 64, 5
    weights = settled(kernels, hidden, inner, count, dtype, bits, bias)
    x, gates = (random(tokens, hidden, seed=seed) * 4).to(dtype), random(tokens, top_k, seed=seed + 1).abs()
    pick = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count + 2, generator=pick)[:top_k] - 1 for _ in range(tokens)])
    ctx = ForwardContext(kernels, ids, ids, ids, 1, [], [])
    got = kernels.experts(x, weights, ids, gates, act, ctx)
    assert kernels.counters()["experts"]["fallbacks"] == 0
    want = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for j in range(top_k):
            e = int(ids[t, j])
            if 0 <= e < count:
                y = weights[1][e].matmul(weights[0][e].matmul(x[t : t + 1], ctx, act=act), ctx)[0]
                want[t] += gates[t, j] * y.float()
    close = 1e-5 if dtype == torch.float32 else 2e-2
    assert (got.float() - want).abs().max() <= close * want.abs().max().clamp(min=1.0)
    for t in {0, tokens - 1}:
        one = kernels.experts(x[t : t + 1], weights, ids[t : t + 1], gates[t : t + 1], act, ctx)
        assert torch.equal(one[0], got[t])


def test_experts_that_do_not_fit_are_left_to_the_reference(kernels):
    weights = settled(kernels, 64, 40, 3, torch.float32, 16, False)  # gate and up share a tile
    ids, gates = torch.tensor([[0, 2]]), torch.ones(1, 2)
    ctx = ForwardContext(kernels, ids, ids, ids, 1, [], [])
    kernels.experts(random(1, 64), weights, ids, gates, "silu_mul", ctx)
    assert kernels.counters()["experts"]["fallbacks"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "outer", "inner"), [(3, 64, 48), (2, 128, 33), (5, 192, 16), (1, 20, 16)])
def test_products_per_head(kernels, dtype, heads, outer, inner):
    x, weight = random(17, heads, inner).to(dtype), random(heads, outer, inner, seed=1).to(dtype)
    got = kernels.product(x, weight)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert (got.double() - want).abs().max() < (2e-6 if dtype == torch.float32 else 8e-3) * want.abs().max()
    assert kernels.counters()["head_matmul"]["fallbacks"] == int(outer % 64 > 0 or inner % 2 > 0)
    assert torch.equal(kernels.product(x[3:4], weight), got[3:4])
