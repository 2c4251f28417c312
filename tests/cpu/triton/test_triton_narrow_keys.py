"""Keys and values in 8 and 4 bits: every number is unpacked exactly, heads of every form are stored and read as the
reference does, and scales of any size leave the result right."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, KVView, NormSpec, RopeSpec, Touches
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.attention import decode
from tokenmill.kernels.triton.attention.narrow_keys import halves_of, in_words, quarters_of
from tokenmill.kernels.triton.attention.stored import can_pair, can_store
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
FP8 = torch.float8_e4m3fn


@triton.jit
def _unpack_kernel(pairs_ptr, low_ptr, high_ptr, N: tl.constexpr, TYPE: tl.constexpr):
    at = tl.arange(0, N)
    low, high = halves_of(tl.load(pairs_ptr + at), TYPE, True)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, tl.int8), (FP8, tl.float8e4nv)])
def test_every_pair_is_exact(dtype, kind):
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers[[0x7F, 0xFF]] = 0  # NaN is never stored
    pairs = torch.stack([numbers, numbers.roll(77)], 1).contiguous().view(dtype)
    low, high = (torch.full((256,), float("nan"), dtype=torch.float16) for _ in range(2))
    _unpack_kernel[(1,)](in_words(pairs).flatten(), low, high, N=256, TYPE=kind)
    assert torch.equal(low.float(), pairs[:, 0].float())
    assert torch.equal(high.float(), pairs[:, 1].float())


@triton.jit
def _unpack_four_kernel(words_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    even, odd, upper_even, upper_odd = quarters_of(tl.load(words_ptr + at), True)
    tl.store(out_ptr + at * 4, even)
    tl.store(out_ptr + at * 4 + 1, upper_even)
    tl.store(out_ptr + at * 4 + 2, odd)
    tl.store(out_ptr + at * 4 + 3, upper_odd)


def test_every_word_of_four_is_exact():
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    found = torch.full((1 << 16, 4), float("nan"), dtype=torch.float16)
    _unpack_four_kernel[(1,)](words, found, N=1 << 16)
    numbers = torch.stack([words.int() >> (4 * i) & 15 for i in range(4)], 1)
    assert torch.equal(found.float(), numbers.float() - 8)


FORMS = {
    "int4": KVFormat("int4"), "int4-fp8k": KVFormat("float8_e4m3fn", 0, "int4"), "int8": KVFormat("int8"),
    "int8 in groups": KVFormat("int8", 16), "int4 in groups": KVFormat("int4", 8),
    "int4-fp8k in groups": KVFormat("float8_e4m3fn", 16, "int4"),
}  # fmt: skip
STEPS = [[("a", 21), ("b", 5)], [("a", 1), ("b", 1), ("c", 10)], [("a", 1), ("b", 1), ("c", 1)], [("a", 33)]]


def rope(dim: int, start: int = 0) -> RopeSpec:
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, dim // 2))
    return RopeSpec(angle.cos(), angle.sin(), dim, start=start)


def compare(form: KVFormat, steps=STEPS, kernels=None, size: int = 16, **options) -> dict[str, dict[str, int]]:
    """The same steps by kernels and by the reference, over pages of this form: the same pages, nearly the same
    results -> what was counted."""
    torch.manual_seed(0)
    heads, kv_heads, dim, value_dim, window = (
        options.pop(name, usual) for name, usual in
        (("heads", 4), ("kv_heads", 2), ("dim", 64), ("value_dim", 0), ("window", 0))
    )  # fmt: skip
    kv = KVSpec("window" if window else "full", kv_heads, dim, value_dim or dim, abs(window))
    spec = AttentionSpec(0, 0, heads, kv, dim**-0.5, window=window, **options)
    kernels = kernels or TritonKernels()
    width = (heads + kv_heads) * dim + kv_heads * kv.value_dim
    ours, theirs = (PagedBatch((kv,), k, stored=form, block_size=size) for k in (kernels, REFERENCE))
    tolerance = 0.12 if form.dtype == "float8_e4m3fn" else 0.002  # the interpreter cuts off what float8 does not hold
    for grants in steps:
        x = torch.randn(sum(n for _, n in grants), width)
        a, b = ours.step(grants), theirs.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x, spec, b)
        expected = REFERENCE.attention(expected_q, spec, b)
        results = [kernels.attention(q, spec, a)]
        if a.max_query == 1:  # fresh: the newest keys are not stored yet
            view, slots = a.kv[0], a.groups[0].slots
            for scales in (view.key_scale, view.value_scale):
                scales[slots // size, :, slots % size] = float("nan")
            results.append(kernels.attend(x, spec, a))
        for found in results:
            assert (found - expected).norm() < tolerance * expected.norm()
    for mine, other in zip(_parts(ours.kv[0]), _parts(theirs.kv[0]), strict=True):
        if mine.dtype == torch.bfloat16:
            assert torch.equal(mine.isnan(), other.isnan())
            assert torch.isclose(mine.float(), other.float(), rtol=0.01, equal_nan=True).all()
        elif mine.dtype == torch.uint8:
            numbers = torch.stack([mine.int() & 15, mine.int() >> 4]) - torch.stack(
                [other.int() & 15, other.int() >> 4]
            )
            assert numbers.abs().max() <= 1 and (numbers != 0).float().mean() < 0.001
    return kernels.counters()


def _parts(view: KVView) -> tuple[torch.Tensor, ...]:
    return view.key, view.value, view.key_scale, view.value_scale


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    counted = compare(FORMS[form], rope=rope(32, 16), softcap=5.0)
    assert not any(count["fallbacks"] for count in counted.values())
    assert ("attend_qkv" in counted) == ("groups" not in form), "pages with more scales are read by another kernel"


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_pages_that_lie_far_apart(form, monkeypatch):
    """Counted in 64 bits: here all that there are."""
    pages = torch.empty((1 << 25, 1, 8, 64), dtype=torch.int16, device="meta")
    assert decode._units(pages[:-1], pages[:100]) == (8, tl.int32)
    assert decode._units(pages[:100], pages) == (8, tl.int64)
    assert decode._units(pages[:100].view(100, 1, 128, 4), pages[:100]) == (4, tl.int32)
    monkeypatch.setattr(decode, "MOST_UNITS", 0)
    compare(FORMS[form], steps=STEPS[:3])


def test_small_programs(monkeypatch):
    """Which few sequences may be read by, too: many splits of few keys."""
    monkeypatch.setattr(decode, "SMALL_FROM", 0)
    spec = AttentionSpec(0, 0, 32, KVSpec("full", 8, 128, 128), 1.0)
    assert decode.decode_config(128, 16000, spec, narrow=True)[:3] == (8, 32, 1)
    compare(FORMS["int4"], steps=[[("a", 130), ("b", 40)], [("a", 1), ("b", 1)]])


CASES = {
    "heads of 96": {"dim": 96, "rope": rope(48), "steps": STEPS[:3]},
    "heads of 128": {"dim": 128, "heads": 8, "kv_heads": 1, "steps": STEPS[:3]},
    "heads of 256": {"dim": 256, "heads": 3, "kv_heads": 3, "rope": rope(64), "steps": STEPS[:3]},
    "odd sizes": {"heads": 6, "dim": 24, "value_dim": 40, "sinks": torch.linspace(-1, 1, 6)},
    "norms": {
        "touches": Touches(NormSpec(torch.linspace(0.5, 1.5, 64), 1e-6), NormSpec(torch.ones(64), 1e-6, offset=1.0))
    },
    "window": {"window": 20, "sinks": torch.linspace(-1, 1, 4)},
    "chunks": {"window": -24},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.1, 0.05])},
}


@pytest.mark.parametrize(("case", "form"), covering(CASES, ["int4", "int4-fp8k"]))
def test_four_bits(case, form):
    counted = compare(FORMS[form], **CASES[case])
    assert not any(count["fallbacks"] for count in counted.values())


@pytest.mark.parametrize(("form", "dim"), covering(["int8", "int4", "int4-fp8k"], [64, 24]))
def test_a_shared_prefix_is_read_once(form, dim):
    kv, kernels = KVSpec("full", 2, dim, dim), TritonKernels()
    spec = AttentionSpec(0, 0, 4, kv, dim**-0.5, softcap=8.0, sinks=torch.randn(4))
    ours, theirs = (PagedBatch((kv,), k, stored=FORMS[form]) for k in (kernels, REFERENCE))
    before, x = torch.randn(290, 8 * dim), torch.randn(2, 8 * dim)
    stored, _ = (batch.step([("a", 145), ("b", 145)]) for batch in (theirs, ours))
    REFERENCE.prepare_qkv(before, spec, stored)
    ours.copy_pages(theirs)
    found = []
    for batch, backend in ((ours, kernels), (theirs, REFERENCE)):
        ctx = batch.step([("a", 1), ("b", 1)])
        ctx.groups[0].tables[1, :8] = ctx.groups[0].tables[0, :8]
        ctx.groups[0].shared = True
        found.append(backend.attention(backend.prepare_qkv(x, spec, ctx), spec, ctx))
    assert int(kernels._stepping._common[1]) == 8
    assert (found[0] - found[1]).norm() < (0.12 if form == "int4-fp8k" else 0.002) * found[1].norm()


@pytest.mark.parametrize("form", ["int4", "int8 in groups"])
def test_four_bits_without_company(form):
    assert not any(count["fallbacks"] for count in compare(FORMS[form], kernels=TritonKernels(steady=True)).values())


@pytest.mark.parametrize("size", [0.0, 1e-7, 1.0, 1e4])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_values_of_any_size(form, size):
    """Scales of values go into exponents: zeros, tiny and huge ones beside ordinary ones must come out right."""
    kv = KVSpec("full", 1, 16, 16)
    spec = AttentionSpec(0, 0, 2, kv, 0.25)
    kernels = TritonKernels()
    ours, theirs = (PagedBatch((kv,), k, stored=FORMS[form]) for k in (kernels, REFERENCE))
    for grants in ([("a", 37)], [("a", 1)], [("a", 1)]):
        x = torch.randn(sum(n for _, n in grants), 64)
        x[::2, 48:] *= size
        a, b = ours.step(grants), theirs.step(grants)
        expected = REFERENCE.attention(REFERENCE.prepare_qkv(x, spec, b), spec, b)
        found = kernels.attention(kernels.prepare_qkv(x, spec, a), spec, a)
        assert (found - expected).norm() < 0.003 * expected.norm()
        if a.max_query == 1:
            assert (kernels.attend(x, spec, a) - expected).norm() < 0.003 * expected.norm()


@pytest.mark.parametrize(("block", "dim", "whole"), [(16, 16, True), (15, 16, False), (16, 17, False)])
def test_what_cannot_be_read_in_pairs_is_read_number_by_number(block, dim, whole):
    key, scale = torch.zeros(2, 1, block, dim, dtype=torch.int8), torch.ones(2, 1, block, 1, dtype=torch.bfloat16)
    assert can_pair(KVView(key, key, scale, scale)) is whole and can_store(KVView(key, key, scale, scale))
    assert can_pair(KVView(key, key))


@pytest.mark.parametrize(
    ("form", "size", "dim"), [("int4", 2, 32), ("int4", 16, 18), ("int8", 3, 16), ("int8", 16, 17)]
)
def test_odd_blocks_and_heads(form, size, dim):
    counted = compare(FORMS[form], steps=[[("a", 7)], [("a", 1)]], size=size, dim=dim)
    assert "attend_qkv" not in counted and not any(count["fallbacks"] for count in counted.values())


@pytest.mark.parametrize(("form", "group"), [("int8", 8), ("int4", 24)])
def test_groups_that_no_kernel_has_are_left_to_the_reference(form, group):
    counted = compare(KVFormat(form, group), steps=[[("a", 5)], [("a", 1)]], dim=24)
    assert counted["attention"]["fallbacks"] == counted["prepare_qkv"]["fallbacks"] == 3
