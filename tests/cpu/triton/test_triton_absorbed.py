"""Latent attention of few tokens, from queries as heads have them, in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, NormSpec, RopeSpec, Touches
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.attention.heads import multiply_heads
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
STEPS = [[("a", 20), ("b", 3)], [("a", 1), ("b", 1), ("c", 1)], [("b", 1), ("a", 5)]]


def spec_of(heads, latent, rest, *, rotates, interleaved):
    kv = KVSpec("latent", 1, latent + rest, latent)
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, rest // 2))
    rope = RopeSpec(angle.cos(), angle.sin(), rest, interleaved=interleaved, start=latent) if rotates else None
    touches = Touches(temper=torch.linspace(1, 3, 256) if interleaved else None)
    return AttentionSpec(layer=0, group=0, heads=heads, kv=kv, scale=0.2, rope=rope, touches=touches)


@pytest.mark.parametrize(
    ("sizes", "rotates", "interleaved", "normed", "dtype"),
    covering(
        [(4, 32, 16, 8, 16), (20, 24, 12, 16, 20), (3, 70, 40, 4, 10)], [True, False], [True, False], [True, False],
        [torch.float32, torch.bfloat16],
    ),
)  # fmt: skip
def test_like_the_reference(sizes, rotates, interleaved, normed, dtype):
    """sizes: heads, the latent part, a head's own part of keys, the shared part, values. normed: the latent part is to
    be normed first."""
    torch.manual_seed(1)
    heads, latent, plain, rest, wide = sizes
    spec, kernels = spec_of(heads, latent, rest, rotates=rotates, interleaved=interleaved), TritonKernels()
    kernels._unfolds = False
    norm = NormSpec(1 + 0.1 * torch.randn(latent).to(dtype), 1e-6)
    fresh = replace(spec, touches=replace(spec.touches, k_norm=norm)) if normed else spec
    up, down = (torch.randn(heads, *shape).to(dtype) / latent**0.5 for shape in ((latent, plain), (wide, latent)))
    ours, theirs = PagedBatch((spec.kv,), kernels, dtype=dtype), PagedBatch((spec.kv,), REFERENCE, dtype=dtype)
    for grants in STEPS:
        tokens = sum(n for _, n in grants)
        q, both = torch.randn(tokens, heads, plain + rest).to(dtype), torch.randn(tokens, latent + rest).to(dtype)
        vector = torch.split(both, [latent, rest], dim=1)
        found = kernels.attend_latent(q, vector, (up, down), fresh, ours.step(grants))
        if normed:
            both = torch.cat((REFERENCE.norm(vector[0], norm), vector[1]), dim=1)
        queries = torch.cat((REFERENCE.product(q[..., :plain], up), q[..., plain:]), dim=2).flatten(1)
        mixed = REFERENCE.attend(torch.cat((queries, both), dim=1), spec, theirs.step(grants))
        expected = REFERENCE.product(mixed.view(tokens, heads, latent), down)
        assert found.shape == expected.shape == (tokens, heads, wide)
        assert (found - expected).norm() < (1e-4 if dtype == torch.float32 else 2e-2) * expected.norm()
    assert torch.allclose(ours.kv[0].key.float(), theirs.kv[0].key.float(), atol=1e-5, rtol=1e-2, equal_nan=True)
    assert kernels.counters()["attend_absorbed"]["calls"] == len(STEPS)
    assert not any(count["fallbacks"] for count in kernels.counters().values())


def test_what_it_leaves_to_others():
    """Vectors that are rounded when stored, and whoever asks for the same bytes in any company."""
    spec = spec_of(4, 32, 8, rotates=True, interleaved=True)
    q, vector = torch.randn(3, 4, 24), (torch.randn(3, 32), torch.randn(3, 8))
    parts = torch.randn(4, 32, 16), torch.randn(4, 16, 32)
    for kernels, stored in ((TritonKernels(steady=True), None), (TritonKernels(), KVFormat("int8"))):
        batch = PagedBatch((spec.kv,), kernels, stored=stored)
        assert kernels.attend_latent(q, vector, parts, spec, batch.step([("a", 3)])) is None


@pytest.mark.parametrize(("tokens", "heads", "inner", "width"), [(1, 3, 70, 40), (19, 2, 300, 33), (40, 1, 128, 16)])
def test_products_of_heads(tokens, heads, inner, width):
    x, weight = torch.randn(tokens, heads + 1, inner + 2)[:, 1:, 2:], torch.randn(heads, width, inner)
    found = multiply_heads(x, weight, pdl=False)
    assert torch.allclose(found, torch.einsum("thk,hnk->thn", x, weight), atol=1e-3)
