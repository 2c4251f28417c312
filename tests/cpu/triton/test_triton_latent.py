"""Triton attention over latent vectors, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, RopeSpec, Touches
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
STEPS = [[("a", 37), ("b", 5)], [("a", 1), ("b", 1), ("c", 20)], [("a", 1), ("b", 1), ("c", 1)], [("b", 18), ("c", 3)]]


def latent_spec(heads, latent, rotated, *, interleaved=True, sinks=False):
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, rotated // 2))
    rope = RopeSpec(angle.cos(), angle.sin(), rotated, interleaved=interleaved, start=latent)
    kv = KVSpec("latent", 1, latent + rotated, latent)
    touches = Touches(temper=None if interleaved else torch.linspace(1, 3, 256))
    own = torch.linspace(-2, 3, heads) if sinks else None
    return AttentionSpec(layer=0, group=0, heads=heads, kv=kv, scale=0.2, rope=rope, touches=touches, sinks=own)


@pytest.mark.parametrize(("heads", "latent", "rotated", "interleaved"), [(4, 32, 8, True), (20, 24, 16, False)])
@pytest.mark.parametrize("split", [0, 16])
@pytest.mark.parametrize("sinks", [False, True])
def test_like_the_reference(heads, latent, rotated, interleaved, split, sinks):
    spec = latent_spec(heads, latent, rotated, interleaved=interleaved, sinks=sinks)
    kernels = TritonKernels(steady=split > 0)
    ours, theirs = PagedBatch((spec.kv,), kernels), PagedBatch((spec.kv,), REFERENCE)
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), (heads + 1) * (latent + rotated))
        a, b = ours.step(grants), theirs.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x, spec, b)
        assert torch.allclose(q, expected_q, atol=1e-5)
        found, expected = kernels.attention(q, spec, a), REFERENCE.attention(expected_q, spec, b)
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()
    assert torch.allclose(ours.kv[0].key, theirs.kv[0].key, atol=1e-5, equal_nan=True)
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(q.device).any()
    assert not any(count["fallbacks"] for count in kernels.counters().values())


NARROW = {
    "int8": KVFormat("int8"), "fp8": KVFormat("float8_e4m3fn"), "int4": KVFormat("int4"),
    "int8 in groups": KVFormat("int8", 10), "int4 in groups": KVFormat("int4", 10),
}  # fmt: skip


@pytest.mark.parametrize(("form", "steady"), covering(NARROW, [False, True]))
def test_narrow_vectors(form, steady):
    """Groups may lie across the border of the rotated part."""
    torch.manual_seed(0)
    spec, kernels = latent_spec(4, 32, 8), TritonKernels(steady=steady)
    ours, theirs = (PagedBatch((spec.kv,), k, stored=NARROW[form]) for k in (kernels, REFERENCE))
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), 5 * 40)
        a, b = ours.step(grants), theirs.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x, spec, b)
        assert torch.allclose(q, expected_q, atol=1e-5)
        found, expected = kernels.attention(q, spec, a), REFERENCE.attention(expected_q, spec, b)
        assert (found - expected).norm() < (0.12 if form == "fp8" else 1e-3) * expected.norm()
    mine, other = ours.kv[0], theirs.kv[0]
    assert torch.isclose(mine.key_scale.float(), other.key_scale.float(), rtol=0.01, equal_nan=True).all()
    assert form == "fp8" or (mine.key != other.key).float().mean() < 0.001
    assert not any(count["fallbacks"] for count in kernels.counters().values())


def test_what_it_cannot_do_falls_back_and_says_so():
    spec = latent_spec(2, 8, 4)
    spec.softcap = 5.0
    kernels = TritonKernels()
    batch = PagedBatch((spec.kv,), kernels)
    ctx = batch.step([("a", 20)])
    kernels.attention(kernels.prepare_qkv(torch.randn(20, 36), spec, ctx), spec, ctx)
    assert kernels.counters()["attention"]["fallbacks"] == 1
