"""Triton attention over NaN-poisoned pages, in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.triton.triton_attention_helpers import REFERENCE, STEPS, both, make_spec, rope, width_of
from tests.thinned import covering

from tokenmill.compute.forward import NormSpec, Touches
from tokenmill.kernels.triton.attention import decode, prefill
from tokenmill.kernels.triton.attention.cascade import attend_shared, common_entries
from tokenmill.kernels.triton.attention.decode import attend_one
from tokenmill.kernels.triton.attention.prefill import fitting
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.kernels import TritonKernels

SPECS = {
    "plain": {},
    "norms": {
        "rope": rope(8, interleaved=True, start=4),
        "touches": Touches(NormSpec(torch.rand(16) + 0.5, 1e-6, offset=1.0), NormSpec(torch.rand(16) + 0.5, 1e-6)),
    },
    "alone": {"heads": 3, "kv_heads": 3, "softcap": 5.0, "rope": rope(16)},
    "odd sizes": {"heads": 6, "kv_heads": 2, "dim": 24, "value_dim": 40, "sinks": torch.randn(6)},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "window": {"window": 20, "sinks": torch.randn(4)},
    "chunks": {"window": -24},
    "heads of 512": {"heads": 2, "kv_heads": 1, "dim": 512, "value_dim": 512, "rope": rope(128)},
    "norms of rows": {"touches": Touches(NormSpec(torch.rand(64) + 0.5, 1e-6), NormSpec(torch.rand(32) + 0.5, 1e-6))},
    "other norms": {
        "rope": rope(16),
        "touches": Touches(
            NormSpec(torch.rand(16) + 0.5, 1e-6, "layer", torch.rand(16)), NormSpec(torch.rand(16) + 0.5, 1e-6)
        ),
    },
    "norms behind the rotation": {
        "dim": 24,
        "value_dim": 16,
        "rope": rope(8, start=4),
        "touches": Touches(NormSpec(torch.rand(24) + 0.5, 1e-6), NormSpec(torch.rand(24) + 0.5, 1e-6), late=True),
    },
    "heads with norms of their own": {
        "dim": 24,
        "value_dim": 16,
        "rope": rope(24, interleaved=True),
        "touches": Touches(NormSpec(torch.rand(4, 24), 1e-5, "layer"), NormSpec(torch.rand(2, 24), 1e-5)),
    },
    "tempers": {"rope": rope(16), "touches": Touches(temper=torch.rand(256) + 0.5)},
    "normed values": {
        "rope": rope(16),
        "touches": Touches(
            NormSpec(torch.rand(16), 1e-6), NormSpec(torch.rand(16), 1e-6), NormSpec(torch.ones(16), 1e-6)
        ),
    },
    "clipped": {"rope": rope(16), "touches": Touches(clip=0.7, factor=0.5)},
    "norms of rows, clipped": {
        "rope": rope(16),
        "touches": Touches(NormSpec(torch.ones(64), 1e-6), NormSpec(torch.ones(32), 1e-6), clip=0.7),
    },
    "values that are keys": {
        "rope": rope(16),
        "touches": Touches(None, NormSpec(torch.rand(16), 1e-6), NormSpec(torch.ones(16), 1e-6), values="keys"),
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_like_the_reference(name):
    for found, expected in both(make_spec(**SPECS[name]), STEPS):
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


@pytest.mark.parametrize("name", [*SPECS][-10:])
def test_nothing_falls_back(name):
    kernels = TritonKernels()
    list(both(make_spec(**SPECS[name]), STEPS[:2], kernels=kernels))
    assert not any(counted["fallbacks"] for counted in kernels.counters().values())


SPREAD = {name: SPECS[name] for name in ("plain", "alone", "odd sizes", "alibi", "heads of 512")}
SPREAD |= {"wide window": {"window": 90, "sinks": torch.randn(4)}, "wide chunks": {"window": -90}}


@pytest.mark.parametrize("name", SPREAD)
def test_few_queries_share_many_keys_out(name, monkeypatch):
    """Several programs have the keys of one tile; the last one joins their parts, and counters are zero again."""
    steps = [[("a", 150), ("b", 5)], [("a", 4), ("b", 3), ("c", 1)], [("a", 5)], [("c", 2), ("a", 1)]]
    kernels, own, shared = TritonKernels(), prefill.share_keys, []
    monkeypatch.setattr(prefill, "share_keys", lambda *given: shared.append(own(*given)) or shared[-1])
    for found, expected in both(make_spec(**SPREAD[name]), steps, kernels=kernels, drop=False):
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()
    assert any(splits > 1 for splits, _ in shared)
    assert not kernels.launch.scratch.counters(torch.device("cpu")).any()


def test_queries_alone():
    """They read what is stored, the newest keys included, and store nothing."""
    norm, kernels = NormSpec(torch.rand(16) + 0.5, 1e-6), TritonKernels()
    whole = make_spec(rope=rope(16))
    alone = replace(whole, touches=Touches(norm, values="stored"))
    batch = PagedBatch((whole.kv,), kernels)
    for grants in STEPS:
        ctx = batch.step(grants)
        REFERENCE.prepare_qkv(torch.randn(sum(n for _, n in grants), 128), whole, ctx)
        before, q = ctx.kv[0].key.clone(), torch.randn(sum(n for _, n in grants), 64)
        assert torch.allclose(kernels.attend(q, alone, ctx), REFERENCE.attend(q, alone, ctx), atol=2e-5)
        assert torch.equal(before.nan_to_num(7.0), ctx.kv[0].key.nan_to_num(7.0))
    assert not any(counted["fallbacks"] for counted in kernels.counters().values())


@pytest.mark.parametrize("room", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256, 512])
def test_tiles_fit_the_device(room, size, dim):
    """By the rule that was found from compiled kernels; what fits is left as it was measured."""
    spec = make_spec(dim=dim, value_dim=dim)
    for config in ((64, 64, 4, 3), (256, 64, 8, 5), (128, 64, 8, 5), (64, 32, 4, 2)):
        rows, block_n, warps, stages = found = fitting(config, spec, size, room)
        width = triton.next_power_of_2(dim)
        taken = width * size * (rows + 2 * block_n * max(1, stages // 2))
        assert taken < room or (rows, block_n) == (16, 16)
        assert warps == config[2] and rows <= config[0] and block_n <= config[1] and stages <= config[3]
        assert room < 227 << 10 or size > 2 or dim > 128 or found == config
        assert room < 227 << 10 or size > 2 or dim > 128 or found == fitting(config, spec, size, room, True)
    f32 = fitting((64, 32, 4, 2), make_spec(dim=256, value_dim=256), 4, 99 << 10)
    assert f32[0] * 256 * 4 + 2 * f32[1] * 256 * 4 <= (99 << 10) - 4096, "compiled for sm_89 it took 139,520 bytes"
    steady = fitting((64, 64, 4, 3), make_spec(dim=512, value_dim=512), 2, 227 << 10, asynchronous=True)
    assert steady == (32, 64, 4, 3), "compiled for sm_90, 64 rows take 328,704 bytes and 32 take 168,448"


def test_every_cut_of_wide_heads(monkeypatch):
    """Wide heads are cut otherwise for each number of rows, and never keep keys before the new ones exist."""
    spec = make_spec(heads=4, kv_heads=2, dim=160, value_dim=136, rope=rope(160))
    assert decode.is_wide(spec) and not decode.early_keys(2, wide=True, narrow=False)
    cuts = {decode.decode_config(units, 4096, spec) for units in (2, 8, 16, 32, 64, 128, 256, 512, 4096)}
    assert len(cuts) >= 5
    for cut in cuts:
        monkeypatch.setattr(decode, "decode_config", lambda *_, cut=cut, **__: cut)
        for found, expected in both(spec, [[("a", 70)], [("a", 1)]]):
            assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("window", [17, -30])
def test_windows_whose_blocks_are_gone(window):
    steps = [[("a", 60)], [("a", 1), ("b", 30)], [("a", 1), ("b", 1)], [("a", 5), ("b", 1)]]
    for found, expected in both(make_spec(window=window), steps):
        assert torch.allclose(found, expected, atol=2e-5)


def test_steady_attention_does_not_look_at_the_company():
    spec, kernels = make_spec(), TritonKernels(steady=True)
    torch.manual_seed(1)
    alone = list(both(spec, [[("a", 50)], [("a", 1)]], kernels=kernels))
    assert torch.allclose(*alone[-1], atol=2e-5)
    batch = PagedBatch((spec.kv,), kernels)
    torch.manual_seed(1)
    first, second = torch.randn(50, 128), torch.randn(1, 128)
    company = torch.randn(7, 128)
    for x, grants in ((torch.cat([first, company]), [("a", 50), ("b", 7)]), (second, [("a", 1)])):
        if len(grants) == 1:
            x, grants = torch.cat([x, torch.randn(1, 128)]), [("a", 1), ("b", 1)]
        ctx = batch.step(grants)
        y = kernels.attention(kernels.prepare_qkv(x, spec, ctx), spec, ctx)
    assert torch.equal(y[0], alone[-1][0][0])


@pytest.mark.parametrize("lengths", [(140, 145, 130), (140, 20, 130)])
def test_a_shared_prefix_is_read_once(lengths):
    """Three sequences whose tables begin alike (or, where one is too short, do not)."""
    spec, kernels = make_spec(softcap=8.0, sinks=torch.randn(4)), TritonKernels()
    batch = PagedBatch((spec.kv,), kernels)
    names = [("a", lengths[0]), ("b", lengths[1]), ("c", lengths[2])]
    ctx = batch.step(names)
    REFERENCE.prepare_qkv(torch.randn(sum(lengths), 128), spec, ctx)
    ctx = batch.step([(name, 1) for name, _ in names])
    plan = ctx.groups[0]
    for row, length in enumerate(lengths):
        same = min(length // 16, 8 if row else 0)
        plan.tables[row, :same] = plan.tables[0, :same]
    q = kernels.prepare_qkv(torch.randn(3, 128), spec, ctx)
    expected = REFERENCE.attention(q, spec, replace(ctx, kernels=REFERENCE))
    plan.shared = True
    assert torch.allclose(kernels.attention(q, spec, ctx), expected, atol=2e-5)
    entries = int(kernels._stepping._common[1])
    assert entries == (8 if min(lengths) > 128 else 0)


def test_rows_that_fill_up_a_step_leave_a_prefix_shared():
    spec, kernels = make_spec(), TritonKernels()
    batch = PagedBatch((spec.kv,), kernels)
    REFERENCE.prepare_qkv(torch.randn(270, 128), spec, batch.step([("a", 140), ("b", 130)]))
    ctx = batch.step([("a", 1), ("b", 1), ("spare", 1), ("another", 1)])
    plan = ctx.groups[0]
    plan.tables[1, :8] = plan.tables[0, :8]
    q = kernels.prepare_qkv(torch.randn(4, 128), spec, ctx)
    expected = REFERENCE.attention(q, spec, replace(ctx, kernels=REFERENCE))
    plan.shared = True
    found = kernels.attention(q, spec, ctx)
    assert int(kernels._stepping._common[1]) == 8
    assert torch.allclose(found[:2], expected[:2], atol=2e-5) and found.isfinite().all()
    ctx.kv_len.fill_(1)  # nothing but the spare row: a recording is made with it
    assert int(common_entries(plan, ctx, pdl=False)) == 0


@pytest.mark.parametrize("splits", [1, 2])
def test_shared_parts_join_the_sequences_own(splits):
    """One split joins in registers, several through memory."""
    spec, scratch = make_spec(sinks=torch.randn(4)), Scratch(1 << 18, 64)
    batch = PagedBatch((spec.kv,), TritonKernels())
    ctx = batch.step([("a", 150), ("b", 190)])
    REFERENCE.prepare_qkv(torch.randn(340, 128), spec, ctx)
    ctx = batch.step([("a", 1), ("b", 1)])
    ctx.groups[0].tables[1, :8] = ctx.groups[0].tables[0, :8]
    q = TritonKernels().prepare_qkv(torch.randn(2, 128), spec, ctx)
    common = common_entries(ctx.groups[0], ctx, pdl=False)
    assert int(common) == 8
    out = torch.full((2, 64), float("nan"))
    attend_shared(q, spec, ctx, common, scratch, before=2, parts=2 + splits, pdl=False)
    attend_one(q, out, spec, ctx, scratch, pdl=False, before=2, shared=common, config=(splits, 32, 4, 1, 1, 1))
    assert torch.allclose(out, REFERENCE.attention(q, spec, ctx), atol=2e-5)
    assert not scratch.counters(q.device).any()


def test_nan_stays_at_home():
    spec, kernels = make_spec(), TritonKernels()
    batch = PagedBatch((spec.kv,), kernels)
    good, bad = torch.randn(20, 128), torch.full((20, 128), float("nan"))
    ctx = batch.step([("b", 20), ("a", 20)])
    y = kernels.attention(kernels.prepare_qkv(torch.cat([bad, good]), spec, ctx), spec, ctx)
    assert torch.isnan(y[:20]).all() and torch.isfinite(y[20:]).all()
    ctx = batch.step([("b", 1), ("a", 1)])
    y = kernels.attention(kernels.prepare_qkv(torch.cat([bad[:1], good[:1]]), spec, ctx), spec, ctx)
    assert torch.isnan(y[0]).all() and torch.isfinite(y[1]).all()


EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("name", "dtype"), covering(["norms", "odd sizes", "window", "normed values", "values that are keys"], EIGHT_BITS)
)
def test_eight_bit_pages(dtype, name):
    """Numbers and scales like the reference's; attention reads what was stored."""
    torch.manual_seed(0)
    spec, kernels = make_spec(**SPECS[name]), TritonKernels()
    kv = spec.kv
    width = width_of(spec)
    ours, theirs = (PagedBatch((kv,), k, dtype=dtype) for k in (kernels, REFERENCE))
    for grants in [*STEPS, [("a", 40), ("b", 1)]]:
        x = torch.randn(sum(n for _, n in grants), width)
        a, b = ours.step(grants), theirs.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x, spec, b)
        expected = REFERENCE.attention(expected_q, spec, b)
        assert torch.allclose(q, expected_q, atol=1e-5)
        results = [kernels.attention(q, spec, a)] + ([kernels.attend(x, spec, a)] if a.max_query == 1 else [])
        for found in results:  # the interpreter cuts off what a float8 does not hold, where devices round
            assert (found - expected).norm() < (0.002 if dtype == torch.int8 else 0.12) * expected.norm()
    for mine, other in zip(ours.kv, theirs.kv, strict=True):
        for x, y in ((mine.key_scale, other.key_scale), (mine.value_scale, other.value_scale)):
            assert torch.equal(x.isnan(), y.isnan())
            assert torch.isclose(x.float(), y.float(), rtol=0.01, equal_nan=True).all()
        if dtype == torch.int8:
            assert (mine.key.short() - other.key.short()).abs().max() <= 1
