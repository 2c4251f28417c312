"""Triton kernels on the device against the reference in float32 on the same inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cpu.kernels.paged_batch import PagedBatch
from tests.gpu.gpu_helpers import rand, relative, triton_kernels

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, NormSpec, RopeSpec
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()


def wide(norm):
    return None if norm is None else replace(norm, weight=norm.weight.float())


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 33, 64, 100])
@pytest.mark.parametrize(("width", "inner"), [(6144, 4096), (4096, 14336), (1000, 1536), (320, 200)])
@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "all"])
def test_fused_linear(rows, width, inner, kind):
    kernels = triton_kernels()
    x, w = rand(rows, inner), rand(width, inner, scale=inner**-0.5)
    norm = NormSpec(rand(inner).abs() + 0.5, 1e-5) if kind in ("norm", "gated", "all") else None
    act = "silu_mul" if kind in ("gated", "all") else None
    bias = rand(width) if kind == "all" else None
    residual = rand(rows, width // 2 if act else width) if kind in ("norm", "all") else None
    exact = REFERENCE.product(
        x.float(), w.float(), None if bias is None else bias.float(), norm=wide(norm), act=act,
        residual=None if residual is None else residual.float(),
    )  # fmt: skip
    for _ in range(3):
        found = kernels.product(x, w, bias, norm=norm, act=act, residual=residual)
        assert relative(found, exact) < 1e-2
    assert not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("kind", ["plain", "gated", "all"])
@pytest.mark.parametrize(("width", "inner"), [(1024, 4096), (640, 1544), (1000, 200)])
def test_steady_products(width, inner, kind):
    """The same bytes alone, in fives, and in any larger company."""
    kernels = triton_kernels(steady=True)
    act = "silu_mul" if kind != "plain" else None
    bias = rand(width) if kind == "all" else None
    norm = NormSpec(rand(inner).abs() + 0.5, 1e-5) if kind == "all" else None
    x, w = rand(300, inner), rand(width, inner, scale=inner**-0.5)
    residual = rand(300, width // 2) if kind == "all" else None
    exact = REFERENCE.product(
        x.float(), w.float(), None if bias is None else bias.float(), norm=wide(norm), act=act,
        residual=None if residual is None else residual.float(),
    )  # fmt: skip
    whole = kernels.product(x, w, bias, norm=norm, act=act, residual=residual)
    assert relative(whole, exact) < 1e-2
    for at, count in ((0, 1), (7, 1), (3, 5), (20, 16), (9, 33), (100, 64), (50, 65), (13, 128), (0, 200)):
        part = slice(at, at + count)
        r = None if residual is None else residual[part]
        assert torch.equal(kernels.product(x[part], w, bias, norm=norm, act=act, residual=r), whole[part])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_other_types(dtype, rows):
    x, w = rand(rows, 512, dtype=dtype), rand(256, 512, dtype=dtype, scale=0.04)
    found = triton_kernels().product(x, w, act="gelu_tanh_mul")
    limit = 2e-3 if dtype == torch.float16 else 1e-5
    assert relative(found, REFERENCE.product(x.double(), w.double(), act="gelu_tanh_mul")) < limit


def test_greedy():
    kernels, x = triton_kernels(), rand(37, 128256, dtype=torch.float32)
    x[3, 77] = x[3, 99] = 100.0
    x[4, 5000] = float("nan")
    for _ in range(3):
        ids, marked, largest = kernels.greedy(x)
        assert marked[3] == ids[3] == 77 and marked[4] < 0 and torch.isnan(largest[4])
        good = torch.arange(37, device="cuda") != 4
        assert torch.equal(ids[good], x.argmax(-1)[good]) and torch.equal(largest[good], x.amax(-1)[good])


def rope(dim):
    angle = torch.arange(8192.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, dim // 2))
    return RopeSpec(angle.cos().cuda(), angle.sin().cuda(), dim)


SPECS = {
    "llama": {"heads": 32, "kv_heads": 8, "dim": 128},
    "one head each": {"heads": 5, "kv_heads": 5, "dim": 64},
    "wide window": {"heads": 8, "kv_heads": 4, "dim": 256, "window": 100, "softcap": 50.0},
    "sinks": {"heads": 16, "kv_heads": 2, "dim": 64, "window": 40, "sinks": True},
    "alibi": {"heads": 8, "kv_heads": 8, "dim": 80, "alibi": True},
    "chunks": {"heads": 8, "kv_heads": 2, "dim": 128, "window": -192},
    "sinks everywhere": {"heads": 16, "kv_heads": 2, "dim": 64, "sinks": True},
    "softcap": {"heads": 12, "kv_heads": 4, "dim": 128, "softcap": 30.0},
    "heads of 256": {"heads": 16, "kv_heads": 2, "dim": 256},
}
STEPS = [
    [("a", 700), ("b", 37), ("c", 300)],
    [("a", 1), ("b", 1), ("c", 1)],
    [("a", 1), ("b", 200), ("c", 1), ("d", 64)],
    [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
    [("a", 1100), ("b", 1), ("c", 129)],
    [("a", 1), ("b", 1)],
]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steady", [False, True])
def test_attention(name, steady):
    options = dict(SPECS[name])
    window, dim, heads = options.get("window", 0), options["dim"], options["heads"]
    kv = KVSpec("window" if window else "full", options["kv_heads"], dim, dim, abs(window))
    spec = AttentionSpec(
        0, 0, heads, kv, dim**-0.5, rope=rope(dim), window=window, softcap=options.get("softcap", 0.0),
        sinks=rand(heads) if options.get("sinks") else None,
        alibi=rand(heads, dtype=torch.float32).abs() * 0.1 if options.get("alibi") else None,
    )  # fmt: skip
    kernels = triton_kernels(steady=steady)
    ours = PagedBatch((kv,), kernels, dtype=torch.bfloat16, blocks=200, device="cuda")
    exact = PagedBatch((kv,), REFERENCE, dtype=torch.bfloat16, blocks=200, device="cuda")
    for grants in STEPS:
        x = rand(sum(n for _, n in grants), (heads + 2 * kv.heads) * dim)
        a, b = ours.step(grants), exact.step(grants)
        q = kernels.prepare_qkv(x, spec, a)
        expected_q = REFERENCE.prepare_qkv(x.float(), spec, b)
        assert relative(q, expected_q) < 1e-2
        expected = REFERENCE.attention(q.float(), spec, b)
        assert relative(kernels.attention(q, spec, a), expected) < 1e-2
        if a.max_query == 1:
            slots = a.groups[0].slots
            for pages in (a.kv[0].key, a.kv[0].value):
                pages[slots // 16, :, slots % 16] = float("nan")
            assert relative(kernels.attend(x, spec, a), expected) < 1e-2
    assert not kernels.launch.scratch.counters(x.device).any()


NARROW = {
    "int8": KVFormat("int8"), "fp8": KVFormat("float8_e4m3fn"), "int4": KVFormat("int4"),
    "int4-fp8k": KVFormat("float8_e4m3fn", 0, "int4"), "int8 in groups": KVFormat("int8", 32),
    "int4 in groups": KVFormat("int4", 16),
}  # fmt: skip
WIDTHS = {"heads of 96": {"heads": 8, "kv_heads": 1, "dim": 96}, "heads of 40": {"heads": 6, "kv_heads": 3, "dim": 40}}


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize(
    "name", ["llama", "wide window", "sinks everywhere", "softcap", "alibi", "chunks", "heads of 256", *WIDTHS]
)
def test_narrow_pages(name, form):
    """Stored as the reference stores, but for what rounds apart; and read as the reference reads the same pages."""
    options, stored = dict({**SPECS, **WIDTHS}[name]), NARROW[form]
    window, dim, heads = options.get("window", 0), options["dim"], options["heads"]
    if dim % max(1, stored.group):
        pytest.skip("groups do not divide these heads")
    kv = KVSpec("window" if window else "full", options["kv_heads"], dim, dim, abs(window))
    spec = AttentionSpec(
        0, 0, heads, kv, dim**-0.5, rope=rope(dim), window=window, softcap=options.get("softcap", 0.0),
        sinks=rand(heads) if options.get("sinks") else None,
        alibi=rand(heads, dtype=torch.float32).abs() * 0.1 if options.get("alibi") else None,
    )  # fmt: skip
    kernels = triton_kernels()
    ours, exact = (PagedBatch((kv,), k, stored=stored, blocks=200, device="cuda") for k in (kernels, REFERENCE))
    for grants in STEPS:
        x = rand(sum(n for _, n in grants), (heads + 2 * kv.heads) * dim)
        a, b = ours.step(grants), exact.step(grants)
        q = kernels.prepare_qkv(x, spec, a)
        REFERENCE.prepare_qkv(x, spec, b)
        expected = REFERENCE.attention(q, spec, a)
        assert relative(kernels.attention(q, spec, a), expected) < 1e-2
        if a.max_query == 1:
            slots = a.groups[0].slots
            for scales in (a.kv[0].key_scale, a.kv[0].value_scale):
                scales[slots // 16, :, slots % 16] = float("nan")
            assert relative(kernels.attend(x, spec, a), expected) < 1e-2
    assert not kernels.launch.scratch.counters(x.device).any()
    # Parts of a head whose number is no power of two have no kernel: plain torch computes them, counted.
    parts = dim // stored.group if stored.group else 1
    assert any(count["fallbacks"] for count in kernels.counters().values()) == (parts & (parts - 1) != 0)
    for mine, other in ((ours.kv[0].key, exact.kv[0].key), (ours.kv[0].value, exact.kv[0].value)):
        same = mine.view(torch.uint8) == other.view(torch.uint8)
        assert same.float().mean() > 0.97  # rotations in bf16 and float32 may round apart
    for mine, other in (
        (ours.kv[0].key_scale, exact.kv[0].key_scale),
        (ours.kv[0].value_scale, exact.kv[0].value_scale),
    ):
        assert torch.isclose(mine.float(), other.float(), rtol=0.02, atol=1e-6, equal_nan=True).all()


@pytest.mark.parametrize("seqs", [5, 40, 130])
@pytest.mark.parametrize("form", ["plain", "fp8", "int4", "int4-fp8k"])
def test_shared_prefix(seqs, form):
    kv = KVSpec("full", 8, 128, 128)
    spec = AttentionSpec(0, 0, 32, kv, 128**-0.5, rope=rope(128))
    kernels = triton_kernels()
    blocks, stored = 64 + 20 * seqs, NARROW.get(form)
    batch = PagedBatch((kv,), kernels, dtype=torch.bfloat16, blocks=blocks, device="cuda", stored=stored)
    names = [(str(i), 200 + i % 70) for i in range(seqs)]
    ctx = batch.step(names)
    kernels.prepare_qkv(rand(sum(n for _, n in names), 48 * 128), spec, ctx)
    ctx = batch.step([(name, 1) for name, _ in names])
    plan = ctx.groups[0]
    plan.tables[:, :11] = plan.tables[:1, :11]
    q = kernels.prepare_qkv(rand(seqs, 48 * 128), spec, ctx)
    plan.shared = True
    found = kernels.attention(q, spec, ctx)
    assert relative(found, REFERENCE.attention(q.float(), spec, ctx)) < 1e-2
    assert int(kernels._stepping._common[1]) == 11
