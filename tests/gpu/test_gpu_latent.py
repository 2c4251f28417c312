"""Latent attention on the device against the reference in float32 on the same inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.cpu.kernels.paged_batch import PagedBatch
from tests.gpu.gpu_helpers import relative

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, RopeSpec
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
STEPS = [
    [("a", 700), ("b", 37), ("c", 300)],
    [("a", 1), ("b", 1), ("c", 1)],
    [("a", 1), ("b", 200), ("c", 1), ("d", 64)],
    [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
]


@pytest.mark.parametrize(("heads", "latent", "rotated"), [(16, 512, 64), (128, 512, 64), (20, 96, 32)])
@pytest.mark.parametrize("split", [0, 128])
def test_latent_attention(heads, latent, rotated, split):
    from tokenmill.kernels.triton import TritonKernels

    angle = torch.arange(2048.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, rotated // 2))
    rope = RopeSpec(angle.cos().cuda(), angle.sin().cuda(), rotated, interleaved=True, start=latent)
    kv = KVSpec("latent", 1, latent + rotated, latent)
    spec = AttentionSpec(0, 0, heads, kv, (latent + rotated) ** -0.5, rope=rope)
    kernels = TritonKernels(steady=split > 0)
    ours = PagedBatch((kv,), kernels, dtype=torch.bfloat16, blocks=128, device="cuda")
    exact = PagedBatch((kv,), REFERENCE, dtype=torch.bfloat16, blocks=128, device="cuda")
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), (heads + 1) * kv.key_dim, device="cuda").bfloat16()
        a, b = ours.step(grants), exact.step(grants)
        q = kernels.prepare_qkv(x, spec, a)
        assert relative(q, REFERENCE.prepare_qkv(x.float(), spec, b)) < 1e-2
        for _ in range(2):
            assert relative(kernels.attention(q, spec, a), REFERENCE.attention(q.float(), spec, b)) < 1e-2
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()


NARROW = {
    "int8": KVFormat("int8"), "fp8": KVFormat("float8_e4m3fn"), "int4": KVFormat("int4"),
    "int8 in groups": KVFormat("int8", 144),
}  # fmt: skip


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("heads", [16, 128])
def test_narrow_vectors(form, heads):
    """Read as the reference reads the same pages; stored as it stores, but for what rounds apart."""
    from tokenmill.kernels.triton import TritonKernels

    angle = torch.arange(2048.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, 32))
    rope = RopeSpec(angle.cos().cuda(), angle.sin().cuda(), 64, interleaved=True, start=512)
    kv = KVSpec("latent", 1, 576, 512)
    spec, kernels = AttentionSpec(0, 0, heads, kv, 576**-0.5, rope=rope), TritonKernels()
    ours, exact = (PagedBatch((kv,), k, stored=NARROW[form], blocks=128, device="cuda") for k in (kernels, REFERENCE))
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), (heads + 1) * 576, device="cuda").bfloat16()
        a, b = ours.step(grants), exact.step(grants)
        q = kernels.prepare_qkv(x, spec, a)
        REFERENCE.prepare_qkv(x, spec, b)
        assert relative(kernels.attention(q, spec, a), REFERENCE.attention(q, spec, a)) < 1e-2
    same = ours.kv[0].key.view(torch.uint8) == exact.kv[0].key.view(torch.uint8)
    assert same.float().mean() > 0.97
    assert not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize(("heads", "dim", "top"), [(64, 128, 256), (32, 128, 64), (12, 16, 100)])
def test_keys_that_an_index_chooses(heads, dim, top):
    """Whole numbers, so that every order of additions gives the same scores, many of which are equal."""
    from tokenmill.kernels.triton import TritonKernels

    torch.manual_seed(top)
    kv, kernels = KVSpec("latent", 1, dim, dim), TritonKernels()
    spec = AttentionSpec(0, 0, heads, kv, 0.5)
    ours = PagedBatch((kv,), kernels, dtype=torch.bfloat16, blocks=128, device="cuda")
    exact = PagedBatch((kv,), REFERENCE, dtype=torch.bfloat16, blocks=128, device="cuda")
    for grants in STEPS:
        tokens = sum(n for _, n in grants)
        x = torch.randint(-2, 3, (tokens, (heads + 1) * dim), device="cuda").bfloat16()
        gains = torch.randint(-2, 3, (tokens, heads), device="cuda").float()
        found = kernels.choose_keys(x, gains, spec, top, ours.step(grants))
        expected = REFERENCE.choose_keys(x, gains, spec, top, exact.step(grants))
        assert found is not None, "tables are longer than that"
        assert torch.equal(found[:, : expected.shape[1]], expected) and (found[:, expected.shape[1] :] == -1).all()
    assert kernels.waits == 0 and not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize(("heads", "top"), [(16, 256), (128, 100)])
def test_attention_to_chosen_keys(heads, top):
    from tokenmill.kernels.triton import TritonKernels

    torch.manual_seed(heads)
    angle = torch.arange(2048.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, 32))
    rope = RopeSpec(angle.cos().cuda(), angle.sin().cuda(), 64, interleaved=True, start=512)
    kv, kernels = KVSpec("latent", 1, 576, 512), TritonKernels()
    spec = AttentionSpec(0, 0, heads, kv, 576**-0.5, rope=rope)
    ours = PagedBatch((kv,), kernels, dtype=torch.bfloat16, blocks=128, device="cuda")
    exact = PagedBatch((kv,), REFERENCE, dtype=torch.bfloat16, blocks=128, device="cuda")
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), (heads + 1) * 576, device="cuda").bfloat16()
        a, b = ours.step(grants), exact.step(grants)
        keys = torch.full((len(x), top), -1)
        for token, position in enumerate(b.positions.tolist()):
            some = torch.randperm(position + 1)[: max(1, min(top, position // 2))].sort().values
            keys[token, : len(some)] = some
        q, keys = kernels.prepare_qkv(x, spec, a), keys.cuda()
        REFERENCE.prepare_qkv(x, spec, b)
        assert relative(kernels.attention(q, spec, a, keys), REFERENCE.attention(q.float(), spec, b, keys)) < 1e-2
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("stored", [None, KVFormat("float8_e4m3fn")], ids=str)
@pytest.mark.parametrize("sizes", [(512, 128, 64, 128), (512, 64, 64, 128), (256, 64, 32, 64), (512, 192, 64, 256)])
def test_long_prompts_through_keys_and_values_of_heads(sizes, stored, monkeypatch):
    """sizes: of the latent part, a head's own part of keys, the shared part, and values. Heads take turns."""
    from tokenmill.kernels.triton import TritonKernels
    from tokenmill.kernels.triton.attention import unfolded

    latent, plain, rest, wide = sizes
    monkeypatch.setattr(unfolded, "_ROOM", 2 * 2048 * (plain + wide) * 5)
    monkeypatch.setattr(unfolded, "_WORK", 0)
    angle = torch.arange(4096.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, rest // 2))
    rope = RopeSpec(angle.cos().cuda(), angle.sin().cuda(), rest, interleaved=True, start=latent)
    kv = KVSpec("latent", 1, latent + rest, latent)
    spec, kernels = AttentionSpec(0, 0, 16, kv, (plain + rest) ** -0.5, rope=rope), TritonKernels()
    parts = [torch.randn(16, *shape, device="cuda") / latent**0.5 for shape in ((latent, plain), (wide, latent))]
    parts = [part.bfloat16() for part in parts]
    ours, exact = (
        PagedBatch((kv,), k, dtype=torch.bfloat16, blocks=256, device="cuda", stored=stored)
        for k in (kernels, REFERENCE)
    )
    for grants in [[("a", 1700), ("b", 300), ("c", 1)], [("a", 1), ("b", 257), ("c", 1)], [("c", 900), ("a", 3)]]:
        tokens = sum(n for _, n in grants)
        q = torch.randn(tokens, 16, plain + rest, device="cuda").bfloat16()
        vector = [torch.randn(tokens, n, device="cuda").bfloat16() for n in (latent, rest)]
        found = kernels.attend_latent(q, vector, parts, spec, ours.step(grants))
        absorbed = torch.einsum("thd,hld->thl", q[..., :plain].float(), parts[0].float())
        queries = torch.cat((absorbed, q[..., plain:].float()), dim=2).flatten(1)
        b = exact.step(grants)
        mixed = REFERENCE.attend(torch.cat((queries, *vector), dim=1), spec, b).view(tokens, 16, latent)
        expected = torch.einsum("thl,hvl->thv", mixed, parts[1].float())
        assert relative(found, expected) < (3e-2 if stored else 1e-2)
    assert kernels.waits == 0 and not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize("tokens", [1, 3, 17, 40, 300])
@pytest.mark.parametrize("sizes", [(16, 512, 128, 64, 128), (20, 512, 192, 64, 256), (128, 512, 128, 64, 128)])
def test_few_tokens_take_three_launches(sizes, tokens):
    """sizes: heads, the latent part, a head's own part of keys, the shared part, values."""
    from tokenmill.kernels.triton import TritonKernels

    heads, latent, plain, rest, wide = sizes
    angle = torch.arange(4096.0)[:, None] * (10000.0 ** -torch.linspace(0, 1, rest // 2))
    rope = RopeSpec(angle.cos().cuda(), angle.sin().cuda(), rest, interleaved=True, start=latent)
    kv = KVSpec("latent", 1, latent + rest, latent)
    spec, kernels = AttentionSpec(0, 0, heads, kv, (plain + rest) ** -0.5, rope=rope), TritonKernels()
    parts = [torch.randn(heads, *shape, device="cuda") / latent**0.5 for shape in ((latent, plain), (wide, latent))]
    parts = [part.bfloat16() for part in parts]
    ours, exact = (PagedBatch((kv,), k, dtype=torch.bfloat16, blocks=400, device="cuda") for k in (kernels, REFERENCE))
    for each in (3 if tokens < 100 else 1, 1):
        grants = [(str(n), each) for n in range(tokens)]
        count = sum(n for _, n in grants)
        q = torch.randn(count, heads, plain + rest, device="cuda").bfloat16()
        both = torch.randn(count, latent + rest, device="cuda").bfloat16()
        vector = both.split([latent, rest], dim=1)
        found = kernels.attend_latent(q, vector, parts, spec, ours.step(grants))
        absorbed = torch.einsum("thd,hld->thl", q[..., :plain].float(), parts[0].float())
        queries = torch.cat((absorbed, q[..., plain:].float()), dim=2).flatten(1)
        mixed = REFERENCE.attend(torch.cat((queries, both), dim=1), spec, exact.step(grants)).view(count, heads, latent)
        assert relative(found, torch.einsum("thl,hvl->thv", mixed, parts[1].float())) < 1e-2
