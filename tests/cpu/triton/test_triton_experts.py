"""Triton routing and experts, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.triton.bounds import Bounds

from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.experts import mixture as mixture_module
from tokenmill.kernels.triton.experts.experts import combine, one_down, one_up
from tokenmill.kernels.triton.experts.grouped import Stack, Tiling, grouped
from tokenmill.kernels.triton.experts.mixture import stack
from tokenmill.kernels.triton.experts.route import pick, route
from tokenmill.kernels.triton.experts.route_few import pick_few
from tokenmill.kernels.triton.experts.sorting import sort_pairs, sort_rows
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.quant.dense import DenseWeight

REFERENCE = ReferenceKernels()
ROUTES = {
    "softmax": RouteSpec(20, 4),
    "raw": RouteSpec(8, 3, normalise=False, scale=2.5),
    "best first": RouteSpec(16, 2, order="topk_softmax"),
    "biased": RouteSpec(12, 3, order="topk_softmax", bias=torch.randn(12)),
    "groups": RouteSpec(20, 3, normalise=False, groups=4, top_groups=2),
    "sums of two": RouteSpec(
        24, 4, order="sigmoid_topk", groups=4, top_groups=2, group_sum2=True, bias=torch.randn(24) * 0.1, scale=1.5
    ),
    "sigmoids of the best": RouteSpec(16, 3, order="topk_sigmoid", eps=0.0),
    "one by one": RouteSpec(16, 2, order="sparsemixer", jitter=0.3),
    "raw sigmoids": RouteSpec(16, 1, order="topk_sigmoid", normalise=False),
    "biased sigmoids": RouteSpec(12, 4, order="topk_sigmoid", bias=torch.randn(12), eps=1e-6, scale=1.5),
    "a little more": RouteSpec(12, 4, order="sigmoid_topk", bias=torch.randn(12) * 0.1, eps=1e-6),
    "experts' own scales": RouteSpec(12, 4, scale=torch.linspace(0.5, 2.0, 12)),
    "at least": RouteSpec(12, 4, bias=torch.randn(12) * 2, eps=0.0, floor=1e-12),
}
SOME = ["softmax", "biased", "sums of two", "sigmoids of the best", "biased sigmoids", "at least", "one by one"]


@pytest.mark.parametrize("name", ROUTES)
def test_route(name):
    spec, logits = ROUTES[name], torch.randn(6, ROUTES[name].experts)
    ids, gates = route(logits, spec, pdl=False, near=torch.zeros(64, 64))
    expected, weights = REFERENCE.route(logits, spec)
    assert torch.equal(ids, expected)
    assert torch.allclose(gates, weights, atol=1e-6)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(("scale", "shift"), [(4.0, 24.0), (4.0, -56.0), (60.0, 0.0)])
def test_scores_at_their_ends(name, scale, shift):
    """Sigmoids that round to 1, sums that are next to nothing, all weight on one expert."""
    spec = ROUTES[name]
    logits = torch.randn(6, spec.experts) * scale + shift
    ids, gates = route(logits, spec, pdl=False)
    expected, weights = REFERENCE.route(logits, spec)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(gates, weights, rtol=1e-4, atol=1e-30)
    if spec.order.startswith("topk") and spec.bias is None:
        assert torch.equal(ids, logits.topk(spec.top_k).indices)


def test_equal_scores_take_the_lowest_and_nan_stays_inside():
    spec, logits = RouteSpec(6, 3), torch.zeros(2, 6)
    logits[1, 4] = float("nan")
    ids, gates = route(logits, spec, pdl=False)
    assert ids[0].tolist() == [0, 1, 2]
    assert sorted(set(ids[1].tolist())) == sorted(ids[1].tolist()) and ids[1].min() >= 0 and ids[1].max() < 6
    assert torch.isnan(gates[1]).all()


@pytest.mark.parametrize("name", ["raw", *SOME])
@pytest.mark.parametrize(("tokens", "keep"), [(1, False), (3, True)])
def test_pick_is_norm_router_and_route(name, tokens, keep):
    spec, scratch = ROUTES[name], Scratch(1 << 12, 8)
    x, w, add = torch.randn(tokens, 40), torch.randn(spec.experts, 40), torch.randn(spec.experts)
    norm = NormSpec(torch.rand(40) + 0.5, 1e-6, offset=0.5)
    ids, gates, h = pick(x, w, add, norm, spec, scratch=scratch, pdl=False, keep=keep, near=torch.zeros(64, 64))
    normed = REFERENCE.norm(x, norm)
    expected, weights = REFERENCE.route(REFERENCE.product(normed, w, add), spec)
    assert torch.equal(ids.long(), expected) and torch.allclose(gates, weights, atol=1e-5)
    assert torch.allclose(h, normed if keep else x, atol=1e-5)
    assert not scratch.counters(x.device).any()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("tokens", "width"), [(3, 40), (19, 64)])
def test_several_pick_together(name, tokens, width):
    spec = ROUTES[name]
    x, w, add = torch.randn(tokens, width), torch.randn(spec.experts, width) / 6, torch.randn(spec.experts)
    norm = NormSpec(torch.rand(width) + 0.5, 1e-6, offset=0.5)
    for norm, add in ((norm, add), (None, None)):  # noqa: B020
        ids, gates, h = pick_few(x, w, add, norm, spec, scratch=Scratch(1 << 14, 8), count=None, pdl=False)
        normed = x if norm is None else REFERENCE.norm(x, norm)
        expected, weights = REFERENCE.route(REFERENCE.product(normed, w, add), spec)
        assert torch.equal(ids.long(), expected) and torch.allclose(gates, weights, atol=1e-5)
        assert torch.allclose(h, normed, atol=1e-5)


@pytest.mark.parametrize(("tokens", "per_tile", "skewed"), [(47, 4, False), (47, 16, True), (450, 16, False)])
def test_pairs_are_sorted_by_expert(tokens, per_tile, skewed):
    scratch, experts = Scratch(1 << 8, 8), 9
    ids = torch.randint(0, experts, (tokens, 3))
    ids = torch.full_like(ids, 5) if skewed else ids
    ids[3, 1], ids[40, 2] = -1, experts
    found = sort_pairs(ids, experts, per_tile, scratch, pdl=False)
    flat = ids.flatten()
    wanted = [p for e in range(experts) for p in torch.where(flat == e)[0].tolist()]
    assert found.order[: len(wanted)].tolist() == wanted
    covered = []
    for expert, first, last in found.tiles.tolist():
        assert last - first <= per_tile
        assert all(int(flat[p]) == expert for p in wanted[first:last])
        covered += range(first, last)
    assert covered == list(range(len(wanted)))
    assert not scratch.counters(ids.device).any()


@pytest.mark.parametrize(("tokens", "per_tile"), [(9, 4), (21, 16), (47, 4)])
def test_rows_are_laid_in_the_order_of_experts(tokens, per_tile):
    experts, x = 9, torch.randn(tokens, 2100)
    ids = torch.randint(0, experts, (tokens, 3))
    ids[1, 1], ids[2, 2] = -1, experts
    wanted = sort_pairs(ids, experts, per_tile, Scratch(1 << 8, 8), pdl=False)
    order, rows = sort_rows(x, ids, experts, per_tile, Scratch(1 << 8, 8), pdl=False)
    real = int(((ids >= 0) & (ids < experts)).sum())
    assert torch.equal(order.order[:real], wanted.order[:real]) and torch.equal(order.tiles, wanted.tiles)
    assert torch.equal(rows[:real], x[order.order[:real].long() // 3])


def exact_experts(x, ups, downs, ids, gates, act):
    """[T, hidden] in float32, pair by pair; weights (table [E, N, K], bias)."""
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < len(ups[0]):
                h = ups[0][e] @ x[t] + (0 if ups[1] is None else ups[1][e])
                h = downs[0][e] @ REFERENCE.activate(h[None], act)[0] + (0 if downs[1] is None else downs[1][e])
                y[t] += gates[t, j] * h
    return y


def operands(tokens, experts, hidden, inner, top, *, gated=True, bias=False):
    ids = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).int()
    ups = torch.randn(experts, inner * (2 if gated else 1), hidden) / hidden**0.5
    downs = torch.randn(experts, hidden, inner) / inner**0.5
    biases = (torch.randn(ups.shape[:2]), torch.randn(downs.shape[:2])) if bias else (None, None)
    return torch.randn(tokens, hidden), (ups, biases[0]), (downs, biases[1]), ids, torch.rand(tokens, top)


@pytest.mark.parametrize(("act", "bias", "hidden", "inner", "top"), [
    ("silu_mul", False, 128, 48, 4), ("oai_swiglu", True, 72, 40, 3), ("gelu", True, 64, 20, 1),
    ("clipped_silu_mul", False, 64, 32, 2),
])  # fmt: skip
def test_one_token(act, bias, hidden, inner, top):
    gated = act != "gelu"
    x, ups, downs, ids, gates = operands(1, 7, hidden, inner, top, gated=gated, bias=bias)
    ids[0, 0] = -1 if top > 1 else ids[0, 0]
    norm, residual = NormSpec(torch.rand(hidden) + 0.5, 1e-6), torch.randn(1, hidden)
    up = one_up(x, Stack(*ups), ids, norm, act, pdl=False)
    found = one_down(up, Stack(*downs), (ids, gates), residual, pdl=False, early=True)
    expected = residual + exact_experts(REFERENCE.norm(x, norm), ups, downs, ids, gates, act)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("sort", "bulk"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("act", "bias", "hidden", "inner"), [
    ("silu_mul", False, 64, 32), ("oai_swiglu", True, 72, 40), ("relu2", False, 32, 20),
    ("clipped_silu_mul", False, 64, 32),
])  # fmt: skip
def test_several_tokens(sort, bulk, act, bias, hidden, inner):
    gated = act != "relu2"
    x, ups, downs, ids, gates = operands(23, 6, hidden, inner, 3, gated=gated, bias=bias)
    ids[:, 0], ids[2, 1], ids[5] = 4, 77, -1  # one expert has more than a tile, one pair and one token have none
    order = sort_pairs(ids, 6, 16, Scratch(1 << 8, 8), pdl=False) if sort else None
    cut = Tiling(16, 16, 32, 1, 4, bulk)
    up = grouped(x, Stack(*ups), ids, order, act, up=True, pdl=False, tiling=cut)
    parts = grouped(up, Stack(*downs), ids, order, None, up=False, pdl=False, tiling=cut)
    residual = torch.randn_like(x)
    found = combine(parts, ids, gates, residual, 6, x.dtype, pdl=False)
    assert torch.allclose(found, residual + exact_experts(x, ups, downs, ids, gates, act), atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("act", ["silu_mul", "relu2"])
def test_a_whole_layer(tokens, shared, act):
    """Every way through it, against the operations one by one; experts of three matrices and of two."""
    experts, hidden, inner, gated = 8, 32, 24, act == "silu_mul"
    x, ups, downs, _, _ = operands(tokens, experts, hidden, inner, 6, gated=gated)
    router, beside = DenseWeight(torch.randn(experts, hidden)), None
    if shared:
        up = DenseWeight(torch.randn(80 if gated else 40, hidden) * 0.1)
        beside = up, DenseWeight(torch.randn(hidden, 40) * 0.1)
    spec, norm = RouteSpec(experts, 6), NormSpec(torch.rand(hidden) + 0.5, 1e-6)
    lists = [DenseWeight(w) for w in ups[0]], [DenseWeight(w.clone()) for w in downs[0]]
    kernels = TritonKernels()
    fused = kernels.pack_mixture(Mixture(router, spec, *lists, act, beside))
    assert fused is not None and not lists[0] and not lists[1], "the lists are emptied"
    assert fused.ups.table.data_ptr() == ups[0].data_ptr(), "what lies together is not copied"
    ctx = ForwardContext(kernels, x, x, x, 1, [], [])
    found = fused(x, ctx, norm=norm, residual=x)
    h = REFERENCE.norm(x, norm)
    ids, gates = REFERENCE.route(REFERENCE.product(h, router.table), spec)
    expected = x + exact_experts(h, ups, downs, ids, gates, act)
    if beside is not None:
        expected += REFERENCE.activate(h @ beside[0].table.T, act) @ beside[1].table.T
    assert torch.allclose(found, expected, atol=1e-4)
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("tokens", [1, 20, 70])
@pytest.mark.parametrize("gated", [False, True])
def test_what_every_token_visits_is_one_of_the_experts(tokens, gated, steady):
    """A shared expert of an expert's shape, with a gate or without: one more that is always chosen."""
    experts, hidden, inner = 8, 32, 24
    x, ups, downs, _, _ = operands(tokens, experts, hidden, inner, 3)
    router, gate = (DenseWeight(torch.randn(rows, hidden) * 0.3) for rows in (experts, 1))
    beside = DenseWeight(torch.randn(2 * inner, hidden) * 0.1), DenseWeight(torch.randn(hidden, inner) * 0.1)
    spec, norm = RouteSpec(experts, 3, scale=1.5), NormSpec(torch.rand(hidden) + 0.5, 1e-6)
    lists = [DenseWeight(w) for w in ups[0]], [DenseWeight(w.clone()) for w in downs[0]]
    kernels = TritonKernels(steady=steady)
    mixture = Mixture(router, spec, *lists, "silu_mul", beside, gate if gated else None)
    fused = kernels.pack_mixture(mixture)
    assert fused is not None and fused.takes and mixture.shared is None
    with Bounds().watching():
        found = fused(x, ForwardContext(kernels, x, x, x, 1, [], []), norm=norm, residual=x)
    h = REFERENCE.norm(x, norm)
    ids, gates = REFERENCE.route(REFERENCE.product(h, router.table), spec)
    expected = x + exact_experts(h, ups, downs, ids, gates, "silu_mul")
    share = torch.sigmoid(h @ gate.table.T) if gated else 1.0
    expected += share * (REFERENCE.activate(h @ beside[0].table.T, "silu_mul") @ beside[1].table.T)
    assert torch.allclose(found, expected, atol=1e-4)
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()


def test_a_shared_expert_that_others_may_change_stays_apart():
    _, ups, downs, _, _ = operands(1, 8, 32, 24, 3)
    lists = [DenseWeight(w) for w in ups[0]], [DenseWeight(w) for w in downs[0]]
    beside = DenseWeight(torch.randn(48, 32)), DenseWeight(torch.randn(32, 24))
    router = DenseWeight(torch.randn(8, 32))
    fused = TritonKernels().pack_mixture(Mixture(router, RouteSpec(8, 3), *lists, "silu_mul", beside, fixed=False))
    assert fused is not None and not fused.takes


@pytest.mark.parametrize("tokens", [1, 20])
def test_ranks_with_some_experts_each_add_up_to_the_layer(tokens):
    x, ups, downs, _, _ = operands(tokens, 8, 32, 24, 3)
    router, spec, norm = DenseWeight(torch.randn(8, 32)), RouteSpec(8, 3), NormSpec(torch.rand(32) + 0.5, 1e-6)

    def run(first, stop):
        kernels = TritonKernels()
        lists = [DenseWeight(w.clone()) for w in ups[0][first:stop]], [DenseWeight(w) for w in downs[0][first:stop]]
        fused = kernels.pack_mixture(Mixture(router, spec, *lists, "silu_mul", first=first))
        found = fused(x, ForwardContext(kernels, x, x, x, 1, [], []), norm=norm)
        assert kernels.waits == 0
        return found

    apart = run(0, 2) + run(2, 5) + run(5, 8)
    assert torch.allclose(apart, run(0, 8), atol=1e-4)


@pytest.mark.parametrize(("tokens", "top", "steady"), [(1, 1, False), (3, 1, False), (20, 3, False), (20, 3, True)])
def test_layers_may_choose_the_experts(tokens, top, steady):
    """Llama 4 (gates multiply the input), Phi-3.5-MoE and Gemma 4 (choices of their own); experts of other ranks add
    nothing."""
    x, ups, downs, ids, gates = operands(tokens, 8, 32, 24, top)
    kernels = TritonKernels(steady=steady)
    lists = [DenseWeight(w) for w in ups[0]], [DenseWeight(w) for w in downs[0]]
    fused = kernels.pack_mixture(Mixture(DenseWeight(torch.randn(8, 32)), RouteSpec(8, top), *lists, "silu_mul"))
    ctx = ForwardContext(kernels, x, x, x, 1, [], [])
    wanted = exact_experts(x, ups, downs, ids, gates, "silu_mul")
    assert torch.allclose(fused.chosen(x, ids, gates, ctx), wanted, atol=1e-4)
    outside = torch.where(ids < 4, ids, 8 + ids), torch.where(ids >= 4, ids, -1)
    parts = [fused.chosen(x, some, gates, ctx) for some in outside]
    assert torch.allclose(parts[0] + parts[1], wanted, atol=1e-4)
    assert kernels.waits == 0


def test_other_formats_are_left_alone():
    weights = [DenseWeight(torch.randn(4, 8)), DenseWeight(torch.randn(6, 8))]
    assert stack(weights) is None and len(weights) == 2


@pytest.mark.parametrize(("up", "down"), [(48, 8), (16, 40)])
def test_the_smaller_matrices_are_stacked_first(up, down, monkeypatch):
    """The stack of the smaller ones would otherwise be laid into the larger ones' memory, and split it."""
    sizes, joined = [], mixture_module._joined
    monkeypatch.setattr(mixture_module, "_joined", lambda parts: sizes.append(parts[0].numel()) or joined(parts))
    lists = [[DenseWeight(torch.randn(n, 16)) for _ in range(4)] for n in (up, down)]
    router = DenseWeight(torch.randn(4, 16))
    assert TritonKernels().pack_mixture(Mixture(router, RouteSpec(4, 2), *lists, "silu_mul")) is not None
    assert sizes == sorted(sizes) and len(sizes) == 2


def test_steady_rows_ignore_their_company():
    x, ups, downs, _, _ = operands(9, 8, 32, 24, 3)
    kernels = TritonKernels(steady=True)
    mixture = Mixture(
        DenseWeight(torch.randn(8, 32)), RouteSpec(8, 3), [DenseWeight(w) for w in ups[0]],
        [DenseWeight(w) for w in downs[0]], "silu_mul",
    )  # fmt: skip
    fused, norm = kernels.pack_mixture(mixture), NormSpec(torch.rand(32) + 0.5, 1e-6)

    def run(x):
        return fused(x, ForwardContext(kernels, x, x, x, 1, [], []), norm=norm, residual=x)

    together = run(x)
    assert torch.equal(run(x[4:5]), together[4:5]) and torch.equal(run(x[2:7]), together[2:7])
