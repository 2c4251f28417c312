"""What each reference operation means, where a model's parity test would not show it."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from tests.cpu.kernels.paged_batch import PagedBatch

from tokenmill.compute.forward import AttentionSpec, Kernels, KVSpec, NormSpec, RopeSpec, RouteSpec
from tokenmill.kernels import make_kernels
from tokenmill.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu2", lambda x: F.relu(x) ** 2),
        ("silu_mul", lambda x: F.silu(x[:, :20]) * x[:, 20:]),
        ("gelu_tanh_mul", lambda x: F.gelu(x[:, :20], approximate="tanh") * x[:, 20:]),
    ],
)
def test_activations(act, expected):
    x = torch.linspace(-30, 30, 400).view(10, 40)
    assert torch.allclose(KERNELS.activate(x, act), expected(x), atol=1e-5)


def test_extreme_values_stay_finite():
    x = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, 88.0]])
    for act in ("silu", "gelu", "silu_mul"):
        assert not torch.isnan(KERNELS.activate(x, act)).any(), act


def test_norms():
    x, weight, bias = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    layer = KERNELS.norm(x, NormSpec(weight, 1e-5, "layer", bias))
    assert torch.allclose(layer, F.layer_norm(x, (12,), weight, bias, 1e-5), atol=1e-5)
    rms = KERNELS.norm(x, NormSpec(weight, 1e-5, offset=1.0))
    assert torch.allclose(rms, F.rms_norm(x, (12,), weight + 1, 1e-5), atol=1e-5)


def test_embed_and_add():
    table = torch.randn(9, 4)
    assert torch.equal(KERNELS.embed(table, torch.tensor([3, 3, 8]), 2.0), table[[3, 3, 8]] * 2)
    assert torch.equal(KERNELS.add(table, table, 0.5), table + 0.5 * table)
    streams = KERNELS.add(table.repeat(1, 2), table, torch.tensor([[0.5, 2.0]]).expand(9, -1))
    assert torch.equal(streams, torch.cat([1.5 * table, 3.0 * table], dim=-1))


def test_another_sequence_full_of_nan_does_no_harm():
    kv = KVSpec("full", 1, 8, 8)
    spec = AttentionSpec(layer=0, group=0, heads=2, kv=kv, scale=0.3)
    good, bad = torch.randn(20, 32), torch.full((20, 32), float("nan"))
    alone = PagedBatch((kv,), KERNELS).step([("a", 20)])
    expected = KERNELS.attention(KERNELS.prepare_qkv(good, spec, alone), spec, alone)
    ctx = PagedBatch((kv,), KERNELS).step([("b", 20), ("a", 20)])
    y = KERNELS.attention(KERNELS.prepare_qkv(torch.cat([bad, good]), spec, ctx), spec, ctx)
    assert torch.equal(y[20:], expected)
    assert torch.isnan(y[:20]).all()


def test_positions_that_no_entry_covers_are_not_seen():
    kv = KVSpec("full", 1, 8, 8)
    spec = AttentionSpec(layer=0, group=0, heads=1, kv=kv, scale=0.3)
    x, batch = torch.randn(48, 24), PagedBatch((kv,), KERNELS)
    ctx = batch.step([("a", 48)])
    q = KERNELS.prepare_qkv(x, spec, ctx)
    plan = ctx.groups[0]
    kept = torch.tensor([0, 2])
    plan.tables, plan.first, plan.entries = plan.tables[:, kept], torch.tensor([[0, 32]]), torch.tensor([2])
    y = KERNELS.attention(q, spec, ctx)[47]
    _, k, v = x[[*range(16), *range(32, 48)]].split(8, dim=-1)
    expected = (q[47] @ k.t() * 0.3).softmax(-1) @ v
    assert torch.allclose(y, expected[0], atol=1e-5)


def test_latent_values_are_the_start_of_the_keys():
    kv = KVSpec("latent", 1, 12, 8)
    angle = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.1])
    rope = RopeSpec(angle.cos(), angle.sin(), 4, interleaved=True, start=8)
    spec = AttentionSpec(layer=0, group=0, heads=3, kv=kv, scale=0.2, rope=rope)
    x = torch.randn(10, 4 * 12)
    ctx = PagedBatch((kv,), KERNELS).step([("a", 10)])
    y = KERNELS.attention(KERNELS.prepare_qkv(x, spec, ctx), spec, ctx).view(10, 3, 8)
    turned = x.view(10, 4, 12).clone()
    pairs = torch.view_as_complex(turned[..., 8:].reshape(10, 4, 2, 2).contiguous())
    turned[..., 8:] = torch.view_as_real(pairs * torch.polar(torch.ones(10, 2), angle[:10])[:, None]).flatten(-2)
    q, k = turned[:, :3], turned[:, 3]
    scores = torch.einsum("qhd,kd->hqk", q, k) * 0.2
    scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
    assert torch.allclose(y, torch.einsum("hqk,kd->qhd", scores.softmax(-1), k[:, :8]), atol=1e-5)


@pytest.mark.parametrize("make", [ReferenceKernels, lambda: make_kernels("cpu")])
def test_an_index_chooses_the_best_keys_and_the_first_of_equal_ones(make):
    kernels = make()
    kv = KVSpec("latent", 1, 6, 6)
    spec = AttentionSpec(layer=0, group=0, heads=3, kv=kv, scale=0.7)
    x, gains = torch.randn(300, 4 * 6), torch.randn(300, 3)
    x[40:80, 18:] = x[40:41, 18:]  # one key many times
    batch, parts = PagedBatch((kv,), kernels), []
    for start, count in ((0, 100), (100, 1), (101, 199)):
        part = slice(start, start + count)
        parts.append(kernels.choose_keys(x[part], gains[part], spec, 50, batch.step([("a", count)])))
    q, k = x[:, :18].view(300, 3, 6).double(), x[:, 18:].double()
    scores = (torch.einsum("thd,kd->thk", q, k).float() * 0.7).relu()
    scores = torch.einsum("th,thk->tk", gains, scores)
    for token, chosen in enumerate(torch.cat(parts).tolist()):
        count = min(50, token + 1)
        assert chosen[:count] == sorted(set(chosen[:count])) and chosen[count:] == [-1] * (50 - count)
        best = scores[token, : token + 1].sort(descending=True).values[:count]
        assert torch.allclose(scores[token, chosen[:count]].sort(descending=True).values, best, atol=1e-5)
        same = [place for place in chosen[:count] if 40 <= place < 80]
        assert same == list(range(40, 40 + len(same)))


@pytest.mark.parametrize("kind", ["latent", "full"])
def test_chosen_keys_are_the_only_ones_that_are_seen(kind):
    kv = KVSpec("latent", 1, 12, 8) if kind == "latent" else KVSpec("full", 2, 12, 8)
    spec = AttentionSpec(layer=0, group=0, heads=4, kv=kv, scale=0.3)
    x = torch.randn(150, 4 * 12 + (12 if kind == "latent" else 40))
    ctx = PagedBatch((kv,), KERNELS).step([("a", 150)])
    q = KERNELS.prepare_qkv(x, spec, ctx)
    every = torch.arange(150).expand(150, -1)
    every = torch.where(every <= every.T, every, -1)
    assert torch.equal(KERNELS.attention(q, spec, ctx, every), KERNELS.attention(q, spec, ctx))
    some = torch.full((150, 70), -1)
    for token in range(150):
        picked = torch.randperm(token + 1)[: min(70, 1 + token // 2)].sort().values
        some[token, : len(picked)] = picked
    y = KERNELS.attention(q, spec, ctx, some).view(150, 4, 8)
    k = x[:, 48:60].unflatten(1, (1, 12)) if kind == "latent" else x[:, 48:72].unflatten(1, (2, 12))
    v = k[..., :8] if kind == "latent" else x[:, 72:].unflatten(1, (2, 8))
    k, v = (part.repeat_interleave(4 // part.shape[1], 1) for part in (k, v))
    for token in range(150):
        seen = some[token][some[token] >= 0]
        weights = (torch.einsum("hd,khd->hk", q[token], k[seen]) * 0.3).softmax(-1)
        assert torch.allclose(y[token], torch.einsum("hk,khd->hd", weights, v[seen]), atol=1e-5)


def test_route_stays_within_the_best_groups():
    logits = torch.tensor([[5.0, -5.0, 2.0, 2.1, 1.0, 1.1]])
    ids, gates = KERNELS.route(logits, RouteSpec(experts=6, top_k=2, order="sigmoid_topk", groups=3, top_groups=1))
    assert ids.tolist() == [[0, 1]]
    assert torch.allclose(gates.sum(), torch.tensor(1.0))
    ids, _ = KERNELS.route(
        logits, RouteSpec(experts=6, top_k=2, order="sigmoid_topk", groups=3, top_groups=1, group_sum2=True)
    )
    assert ids.tolist() == [[3, 2]]
    bias = torch.tensor([-9.0, 0, 0, 0, 9.0, 0])
    ids, gates = KERNELS.route(logits, RouteSpec(experts=6, top_k=1, order="sigmoid_topk", normalise=False, bias=bias))
    assert ids.tolist() == [[4]]
    assert torch.allclose(gates, torch.sigmoid(logits[:, 4:5]))


def test_experts_of_other_ranks_add_nothing():
    ctx = PagedBatch((), KERNELS).step([("a", 1)])
    from tokenmill.quant.dense import DenseWeight

    x = torch.randn(3, 8)
    up, down = [DenseWeight(torch.randn(8, 8))], [DenseWeight(torch.randn(8, 4))]
    gates = torch.full((3, 2), 0.5)
    one = KERNELS.experts(x, (up, down), torch.tensor([[0, 5]] * 3), gates, "silu_mul", ctx)
    two = KERNELS.experts(x, (up, down), torch.tensor([[0, 0]] * 3), gates, "silu_mul", ctx)
    assert torch.allclose(one * 2, two, atol=1e-5)


def test_counters():
    kernels = ReferenceKernels()
    kernels.add(torch.ones(1), torch.ones(1))
    kernels.count("add", fallback=True)
    assert kernels.counters() == {"add": {"calls": 1, "fallbacks": 1}}


def test_make_kernels_serves_the_host():
    kernels = make_kernels("cpu")
    assert torch.equal(kernels.add(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


def test_operations_stay_few_and_formats_are_none_of_them():
    """A format is a kind in backends' tables (docs/add-a-weight-format.md); what it needs is no new operation."""
    named = [name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_")]
    assert len(named) <= 32 and all(callable(getattr(KERNELS, name)) for name in named)
    for name in named:
        wanted, found = (list(inspect.signature(getattr(of, name)).parameters) for of in (Kernels, type(KERNELS)))
        assert found == wanted, name
