"""Long prompts of latent attention through keys and values of heads, in the interpreter, against absorbed queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, NormSpec, RopeSpec, Touches
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.attention import unfolded
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
STEPS = [[("a", 37), ("b", 5)], [("a", 1), ("b", 40), ("c", 1)], [("c", 70)], [("a", 33), ("b", 18), ("c", 3)]]


def latent_spec(heads: int, latent: int, rest: int, *, rotates: bool = True) -> AttentionSpec:
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, rest // 2))
    rope = RopeSpec(angle.cos(), angle.sin(), rest, interleaved=True, start=latent) if rotates else None
    kv, touches = KVSpec("latent", 1, latent + rest, latent), Touches(temper=torch.linspace(1, 2, 256))
    return AttentionSpec(layer=0, group=0, heads=heads, kv=kv, scale=0.2, rope=rope, touches=touches)


def absorbed(kernels, q, vector, parts, spec, ctx):
    """What the layer does where nothing is unfolded."""
    plain = parts[0].shape[2]
    queries = torch.cat((kernels.product(q[..., :plain], parts[0]), q[..., plain:]), dim=2).flatten(1)
    mixed = kernels.attend(torch.cat((queries, *vector), dim=1), spec, ctx)
    return kernels.product(mixed.view(len(q), spec.heads, -1), parts[1])


SIZES = [((32, 16, 16, 32), True), ((24, 32, 16, 16), True), ((32, 16, 16, 16), False), ((32, 24, 8, 32), True)]
"""Of the latent part, a head's own part of keys, the shared part (in the last case they fill a tile only together), and
values; whether keys are rotated."""
FORMS = [None, KVFormat("int8"), KVFormat("float8_e4m3fn"), KVFormat("int4")]


@pytest.mark.parametrize(("case", "stored", "normed", "sinks"), covering(SIZES, FORMS, [True, False], [True, False]),
                         ids=str)  # fmt: skip
def test_like_absorbed_queries(case, stored, normed, sinks, monkeypatch):
    """Heads take turns. normed: the latent part is to be normed first."""
    sizes, rotates = case
    latent, plain, rest, wide = sizes
    torch.manual_seed(latent)
    monkeypatch.setattr(unfolded, "_ROOM", 4 * 200 * (plain + wide) * 2)
    spec, kernels = latent_spec(5, latent, rest, rotates=rotates), TritonKernels()
    spec = replace(spec, sinks=torch.linspace(-1, 4, 5)) if sinks else spec
    parts = torch.randn(5, latent, plain) / latent**0.5, torch.randn(5, wide, latent) / latent**0.5
    norm = NormSpec(1 + 0.1 * torch.randn(latent), 1e-6)
    fresh = replace(spec, touches=replace(spec.touches, k_norm=norm)) if normed else spec
    ours, theirs = (PagedBatch((spec.kv,), each, stored=stored) for each in (kernels, REFERENCE))
    for grants in STEPS:
        tokens = sum(n for _, n in grants)
        q = torch.randn(tokens, 5, plain + rest)
        vector = torch.randn(tokens, latent), torch.randn(tokens, rest)
        found = kernels.attend_latent(q, vector, parts, fresh, ours.step(grants))
        if normed:
            vector = REFERENCE.norm(vector[0], norm), vector[1]
        expected = absorbed(REFERENCE, q, vector, parts, spec, theirs.step(grants))
        assert found is not None and found.shape == (tokens, 5, wide)
        assert torch.allclose(found, expected, atol=2e-2 if stored else 5e-5), (found - expected).abs().max()
    assert torch.allclose(
        ours.kv[0].key.float(), theirs.kv[0].key.float(), atol=1.01 if stored else 1e-5, equal_nan=True
    )
    assert kernels.waits == 0 and not any(count["fallbacks"] for count in kernels.counters().values())


def test_what_stays_in_the_latent_space():
    """Short chunks, steps whose bytes must not depend on their size, sizes that fill no tile, the switch."""
    spec = latent_spec(2, 32, 16)
    parts = torch.randn(2, 32, 16), torch.randn(2, 16, 32)

    def unfolds(grants, kernels, parts=parts):
        tokens, plain = sum(n for _, n in grants), parts[0].shape[2]
        given = torch.randn(tokens, 2, plain + 16), (torch.randn(tokens, 32), torch.randn(tokens, 16))
        ctx = PagedBatch((spec.kv,), kernels).step(grants)
        kernels.attend_latent(*given, parts, spec, ctx)
        return "attend_unfolded" in kernels.counters()

    assert unfolds([("a", 40)], TritonKernels())
    assert not unfolds([("a", 20), ("b", 20)], TritonKernels())
    assert not unfolds([("a", 40)], TritonKernels(steady=True))
    assert not unfolds([("a", 40)], TritonKernels(without=("unfolded",)))
    assert not unfolds([("a", 40)], TritonKernels(), (torch.randn(2, 32, 8), parts[1]))
    assert not unfolds([("a", 40)], TritonKernels(), (parts[0], torch.randn(2, 24, 32)))
    assert not unfolds([("a", 40)], ReferenceKernels())
