"""K/V in 8 and 4 bits: what rounding costs, what it never does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.compute.forward import KVFormat, KVSpec
from tokenmill.core.errors import ParameterError
from tokenmill.core.step import BlockCopy
from tokenmill.kernels.stored_kv import load, packed, quantise, store, unpacked
from tokenmill.kvcache.pool import KVPool, make_layout

STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}
"""The largest error: of the group's largest magnitude (int8), of the number itself (fp8)."""


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(STEP)),
    groups=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e8]),
    seed=st.integers(0, 99),
)
def test_reading_back_errs_by_half_a_step(kind, groups, size, seed):
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scale = quantise(x, getattr(torch, kind), groups)
    back = (numbers.float().unflatten(-1, (groups, -1)) * scale.float()[..., None]).flatten(-2)
    largest = x.unflatten(-1, (groups, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 16 // groups).flatten(-2)
    most = largest * STEP[kind] if kind == "int8" else x.abs() * STEP[kind] + largest * 2.0**-18
    assert ((back - x).abs() <= most * 1.01 + largest * 2.0**-9).all()


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1e-20, 1e-3, 1.0, 1e8]),
    away=st.sampled_from([0.0, 3.0, -50.0]),
    seed=st.integers(0, 99),
)
def test_four_bits_err_by_half_a_step_of_the_range(groups, size, away, seed):
    x = (torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(seed)) + away) * size
    numbers, scale = packed(x, groups)
    assert numbers.shape == (5, 3, 8) and scale.shape == (5, 3, 2 * groups)
    low, high = (
        each.expand(-1, -1, -1, 16 // groups).flatten(-2)
        for each in x.unflatten(-1, (groups, -1)).aminmax(dim=-1, keepdim=True)
    )
    most = (high - low) / 30 + 2.0**-8 * (high - low) + 2.0**-8 * low.abs()
    assert ((unpacked(numbers, scale) - x).abs() <= most * 1.01).all()


def test_four_bits_keep_zeros_and_trouble():
    x = torch.zeros(4, 1, 8)
    x[1, 0, 3], x[2, 0, 0], x[3] = float("nan"), float("-inf"), 1e-30
    back = unpacked(*packed(x, 1))
    assert (back[0] == 0).all() and torch.allclose(back[3], x[3], rtol=0.01, atol=0.0)
    assert back[1].isnan().all() and back[2].isnan().all()


@pytest.mark.parametrize("kind", STEP)
def test_zeros_stay_zeros_and_trouble_stays_trouble(kind):
    x = torch.zeros(4, 1, 8)
    x[1, 0, 3], x[2, 0, 0], x[3] = float("nan"), float("inf"), 1e-30
    numbers, scale = quantise(x, getattr(torch, kind), 1)
    back = numbers.float() * scale.float()[..., None].flatten(-2)
    assert (back[0] == 0).all() and torch.allclose(back[3], x[3], rtol=0.01, atol=0.0)
    assert back[1].isnan().all() and back[2].isnan().all()


@pytest.mark.parametrize("kind", [*STEP, "int4"])
@pytest.mark.parametrize("spec", [KVSpec("full", 2, 16, 8), KVSpec("latent", 1, 24, 16)])
def test_pages_keep_what_is_stored_and_copied(kind, spec):
    layout = make_layout((spec, spec), 4, KVFormat(kind, 8))
    pool = KVPool(layout, [5], "cpu")
    assert pool.size_bytes == 6 * layout.page_bytes[0]
    generator = torch.Generator().manual_seed(3)
    heads = 1 if spec.kind == "latent" else spec.heads
    k = torch.randn(7, heads, spec.key_dim, generator=generator)
    v = None if spec.kind == "latent" else torch.randn(7, heads, spec.value_dim, generator=generator)
    block, offset = torch.tensor([0, 0, 0, 0, 2, 2, 2]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    first, second = pool.views
    store(second, block, offset, k, v)
    assert not first.key.view(torch.uint8).any()
    err = 0.2 if kind == "int4" else 0.15
    assert torch.allclose(load(second.key, second.key_scale, block, offset), k, atol=err)
    if v is not None:
        assert torch.allclose(load(second.value, second.value_scale, block, offset), v, atol=err)
    pool.copy_blocks(0, torch.tensor([0, 2]), torch.tensor([4, 1]))
    for source, copy in ((0, 4), (2, 1)):
        for part in (second.key, second.value, second.key_scale, second.value_scale):
            assert torch.equal(part[source].view(torch.uint8), part[copy].view(torch.uint8))


def test_blocks_are_read_before_they_are_written():
    specs = KVSpec("full", 2, 16, 8), KVSpec("full", 2, 16, 8), KVSpec("latent", 1, 24, 16)
    pool = KVPool(make_layout(specs, 4, KVFormat("float32")), [5, 5], "cpu")
    for view in pool.views:
        view.key.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand(view.key.shape))
        view.value.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand(view.value.shape))
    pool.copy_blocks(0, torch.tensor([0, 1]), torch.tensor([1, 2]))
    for view, wanted in zip(pool.views, ([0, 0, 1, 3, 4], [0, 0, 1, 3, 4], [0, 1, 2, 3, 4]), strict=True):
        assert view.key[:5, 0, 0, 0].tolist() == view.value[:5, 0, 0, 0].tolist() == wanted


def test_a_block_that_a_copy_frees_may_be_taken_for_another_group():
    """In the plan's order: block 1 is read for one group, then written for another one of the same pool."""
    pool = KVPool(
        make_layout((KVSpec("full", 1, 4, 4), KVSpec("window", 1, 4, 4, window=8)), 2, KVFormat("float32")), [6], "cpu"
    )
    for view in pool.views:
        view.key.copy_(torch.arange(7.0).view(7, 1, 1, 1).expand(view.key.shape))
    plan = [BlockCopy(*each) for each in ((1, 1, 4), (0, 0, 1), (0, 2, 5), (1, 3, 2))]
    for group, pairs in pool.turns(plan):
        pool.copy_blocks(group, *torch.tensor(pairs).unbind(1))
    (full,), (window,) = pool.group_views(0), pool.group_views(1)
    assert window.key[[4, 2], 0, 0, 0].tolist() == [1, 3] and full.key[[1, 5], 0, 0, 0].tolist() == [0, 2]
    assert [len(pairs) for _, pairs in pool.turns(plan[1:3])] == [2]


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ParameterError, match="kv-cache-group 7"):
        make_layout((KVSpec("full", 2, 16, 16),), 4, KVFormat("int8", 7))


@pytest.mark.parametrize("kind", STEP)
def test_keys_beyond_float8_attend_as_unrounded_ones(kind):
    """Two channels of the keys reach 3000. Without scales float8 ends at 448, and attention goes elsewhere."""
    spec, random = KVSpec("full", 2, 32, 32), torch.Generator().manual_seed(5)
    k, v, q = (torch.randn(n, 2, 32, generator=random) for n in (40, 40, 6))
    k[..., [3, 20]] *= torch.tensor([900.0, 40.0])
    q[..., [3, 20]] *= 0.02
    view = KVPool(make_layout((spec,), 4, KVFormat(kind, 8)), [10], "cpu").views[0]
    block, offset = torch.arange(40) // 4, torch.arange(40) % 4
    store(view, block, offset, k, v)

    def attended(keys, values):
        scores = torch.einsum("thd,shd->hts", q, keys) * 32**-0.5
        return torch.einsum("hts,shd->thd", scores.softmax(-1), values)

    assert float(k.abs().max()) > 2000
    wanted = attended(k, v)
    scaled = attended(load(view.key, view.key_scale, block, offset), load(view.value, view.value_scale, block, offset))
    cut = [x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v)]
    off, without = ((found - wanted).square().mean().sqrt() for found in (scaled, attended(*cut)))
    assert off < 0.25 * without and off < 0.2
