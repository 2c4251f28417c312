"""On a CPU a row's bytes do not depend on its company: other rows, how many, its place, or the threads."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch

from tokenmill.compute.forward import AttentionSpec, KVSpec, NormSpec, RouteSpec
from tokenmill.kernels import row_stable
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.dense import DenseWeight

KERNELS = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (5, 5), (7, 33), (11, 513), (16, 16), (17, 31), (37, 100), (64, 64), (129, 257), (256, 1024)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def company_free(run, x: torch.Tensor) -> None:
    """run(x[some rows, in some order]) gives the same rows of run(x)."""
    whole = run(x)
    generator = torch.Generator().manual_seed(7)
    for count in (1, 2, 15, 16, 17, 33, x.shape[0]):
        index = torch.randperm(x.shape[0], generator=generator)[:count]
        assert torch.equal(run(x[index]), whole[index]), f"{count} rows"


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear(outputs, inputs, dtype):
    weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
    company_free(lambda x: KERNELS.product(x, weight, bias), random(40, inputs, dtype=dtype))


def test_linear_in_any_number_of_threads(threads):
    weight, x = random(129, 257, seed=1), random(40, 257)
    company_free(lambda x: KERNELS.product(x, weight), x)
    expected = x.double() @ weight.double().t()
    assert torch.allclose(KERNELS.product(x, weight).double(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 129, 1000])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm(kind, width, dtype):
    spec = NormSpec(random(width, seed=1).to(dtype), 1e-5, kind, bias=random(width, seed=2).to(dtype), offset=1.0)
    company_free(lambda x: KERNELS.norm(x, spec), random(40, width, dtype=dtype))


ACTS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "silu_mul", "gelu_mul", "gelu_tanh_mul", "oai_swiglu",
        "clipped_silu_mul"]  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("width", [2, 18, 126])
def test_activation(act, width):
    company_free(lambda x: KERNELS.activate(x, act), random(40, width) * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 129])
def test_streams(width, dtype):
    x, y, factors = random(40, 3 * width, dtype=dtype), random(40, width, dtype=dtype, seed=1), random(40, 3, seed=2)
    company_free(lambda at: KERNELS.add(x[at], y[at], factors[at]), torch.arange(40))
    company_free(lambda at: KERNELS.add_experts(x[at].view(-1, width), factors[at], dtype), torch.arange(40))


def test_activations_do_not_depend_on_threads(threads):
    x = random(50, 3001) * 4
    parts = torch.cat([KERNELS.activate(row[None], "gelu_tanh") for row in x])
    assert torch.equal(KERNELS.activate(x, "gelu_tanh"), parts)


@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 7, 24), (4, 16, 10), (2, 40, 64)])
def test_head_matmul(heads, outputs, inputs):
    weight, x = random(heads, outputs, inputs, seed=1), random(40, heads, inputs)
    company_free(lambda x: KERNELS.product(x, weight), x)
    assert torch.allclose(KERNELS.product(x, weight), torch.einsum("thk,hnk->thn", x, weight), atol=1e-5)


@pytest.mark.parametrize("columns", [1, 5, 6, 9, 10, 11, 16, 17, 64])
@pytest.mark.parametrize("inner", [6, 14, 64])
def test_batched_products(columns, inner):
    a, b = random(24, 16, inner), random(24, inner, columns, seed=1)
    whole, place = row_stable.batched(a, b), torch.randperm(16)
    for start, stop in ((0, 1), (3, 5), (1, 24)):
        assert torch.equal(row_stable.batched(a[start:stop][:, place], b[start:stop]), whole[start:stop][:, place])


SPECS = {
    "plain": {},
    "grouped": {"heads": 6, "kv_heads": 2},
    "window": {"window": 21},
    "chunks": {"window": -21},
    "capped": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "small-heads": {"dim": 6, "heads": 3, "kv_heads": 3},
    "many-heads": {"heads": 37, "kv_heads": 1},
    "bfloat16": {"dtype": torch.bfloat16},
}


def attention(heads=4, kv_heads=2, dim=16, window=0, softcap=0.0, sinks=False, alibi=False, dtype=torch.float32):
    kv = KVSpec("window" if window else "full", kv_heads, dim, dim, abs(window))
    return AttentionSpec(
        layer=0, group=0, heads=heads, kv=kv, scale=dim**-0.5, softcap=softcap, window=window,
        sinks=random(heads, seed=3) if sinks else None, alibi=random(heads, seed=4).abs() if alibi else None,
    ), dtype  # fmt: skip


def attend(spec: AttentionSpec, qkv: dict[str, torch.Tensor], steps, dtype) -> dict[str, torch.Tensor]:
    """Attention output of every sequence, computed in these steps of (name, count)."""
    batch, done, out = PagedBatch((spec.kv,), KERNELS, dtype=dtype), dict.fromkeys(qkv, 0), {name: [] for name in qkv}
    for grants in steps:
        ctx = batch.step(grants)
        x = torch.cat([qkv[name][done[name] : done[name] + n] for name, n in grants])
        y = KERNELS.attention(KERNELS.prepare_qkv(x, spec, ctx), spec, ctx)
        for name, n in grants:
            out[name].append(y[:n])
            y, done[name] = y[n:], done[name] + n
    return {name: torch.cat(parts) for name, parts in out.items()}


def naive(spec: AttentionSpec, qkv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal attention without pages, in double; keys and values as stored in dtype."""
    tokens, dim, kv_heads = qkv.shape[0], spec.kv.key_dim, spec.kv.heads
    q, k, v = qkv.split([spec.heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q = q.view(tokens, spec.heads, dim).double()
    k, v = (t.reshape(tokens, kv_heads, dim).to(dtype).double() for t in (k, v))
    k, v = (t.repeat_interleave(spec.heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi is not None:
        scores = scores - spec.alibi.double()[:, None, None] * distance
    reach = torch.arange(tokens)[:, None] % -spec.window + 1 if spec.window < 0 else spec.window or tokens
    hidden = (distance < 0) | (distance >= reach)
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sink = spec.sinks.double()[:, None, None].expand(-1, tokens, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1)


@pytest.mark.parametrize("name", SPECS)
def test_attention(name):
    spec, dtype = attention(**SPECS[name])
    width = (spec.heads + 2 * spec.kv.heads) * spec.kv.key_dim
    qkv = {"a": random(150, width, seed=1), "b": random(70, width, seed=2), "c": random(2, width, seed=3)}
    whole = {k: attend(spec, {k: v}, [[(k, len(v))]], dtype)[k] for k, v in qkv.items()}
    for key, x in qkv.items():
        assert torch.allclose(whole[key].double(), naive(spec, x, dtype), atol=2e-5), key

    steps = [[("a", 7)], [("b", 33), ("a", 64)], [("c", 1), ("a", 1), ("b", 1)], [("a", 78), ("c", 1), ("b", 36)]]
    for key, y in attend(spec, qkv, steps, dtype).items():
        assert torch.equal(y, whole[key]), key


@pytest.mark.parametrize("order", ["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid"])
def test_experts(order):
    spec = RouteSpec(experts=6, top_k=3, order=order, groups=3, top_groups=2) if order != "topk_softmax" else RouteSpec(
        experts=6, top_k=3, order=order)  # fmt: skip
    ctx = PagedBatch((), KERNELS).step([("a", 1)])
    router, x = random(6, 32, seed=5), random(40, 32)
    up = [DenseWeight(random(40, 32, seed=i) * 0.2, random(40, seed=20 + i)) for i in range(6)]
    down = [DenseWeight(random(32, 20, seed=10 + i) * 0.2) for i in range(6)]

    def run(x: torch.Tensor) -> torch.Tensor:
        ids, gates = KERNELS.route(KERNELS.product(x, router), spec)
        return KERNELS.experts(x, (up, down), ids, gates, "silu_mul", ctx)

    company_free(run, x)
    ids, gates = KERNELS.route(KERNELS.product(x, router), spec)
    for t in range(3):
        expected = torch.zeros(32)
        for expert, gate in zip(ids[t].tolist(), gates[t], strict=True):
            h = up[expert].dense() @ x[t] + up[expert].bias
            expected += gate * (down[expert].dense() @ (torch.nn.functional.silu(h[:20]) * h[20:]))
        assert torch.allclose(run(x)[t], expected, atol=1e-5)
