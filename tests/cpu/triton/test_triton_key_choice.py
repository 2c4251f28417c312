"""Keys that an index chooses, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.thinned import covering

from tokenmill.compute.forward import AttentionSpec, KVFormat, KVSpec, RopeSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.attention import key_choice
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
STEPS = [[("a", 37), ("b", 5)], [("a", 1), ("b", 1), ("c", 90)], [("a", 1), ("b", 1), ("c", 1)], [("b", 18), ("c", 3)]]


def whole_numbers(*shape: int) -> torch.Tensor:
    """With these every order of additions gives the same sum, and many scores are equal."""
    return torch.randint(-3, 4, shape).float()


@pytest.mark.parametrize(("sizes", "top"), covering([(3, 6), (5, 32), (20, 16)], [1, 16, 21, 70, 128]))
def test_the_same_keys_as_the_reference(sizes, top, monkeypatch):
    """sizes: how many heads, and how long they are."""
    heads, dim = sizes
    monkeypatch.setattr(key_choice, "_SCORES", 7 * 256)  # tokens take turns
    torch.manual_seed(top)
    kv, kernels = KVSpec("latent", 1, dim, dim), TritonKernels()
    spec = AttentionSpec(layer=0, group=0, heads=heads, kv=kv, scale=0.5)
    ours, theirs = PagedBatch((kv,), kernels), PagedBatch((kv,), REFERENCE)
    for grants in STEPS:
        tokens = sum(n for _, n in grants)
        x, gains = whole_numbers(tokens, (heads + 1) * dim), whole_numbers(tokens, heads)
        a, b = ours.step(grants), theirs.step(grants)
        found, expected = (k.choose_keys(x, gains, spec, top, c) for k, c in ((kernels, a), (REFERENCE, b)))
        if found is None:
            assert a.max_query > 1 and int(b.kv_len.max()) <= top
            continue
        assert found.shape == (tokens, top) and (found[:, expected.shape[1] :] == -1).all()
        assert torch.equal(found[:, : expected.shape[1]], expected)
    assert torch.allclose(ours.kv[0].key, theirs.kv[0].key, equal_nan=True)
    assert kernels.waits == 0 and not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize("stored", [None, KVFormat("int8"), KVFormat("float8_e4m3fn"), KVFormat("int4", 8)], ids=str)
def test_keys_that_are_rotated_and_stored_in_few_bits(stored):
    """The best by the reference's scores: rounding may turn round those that are nearly equal."""
    torch.manual_seed(0)
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, 4))
    kv, kernels, top = KVSpec("latent", 1, 32, 32), TritonKernels(), 12
    rope = RopeSpec(angle.cos(), angle.sin(), 8, interleaved=False, start=0)
    spec = AttentionSpec(layer=0, group=0, heads=4, kv=kv, scale=0.2, rope=rope)
    ours, theirs = (PagedBatch((kv,), each, stored=stored) for each in (kernels, REFERENCE))
    wrong = total = 0
    for grants in ([("a", 37), ("b", 5)], [("a", 1), ("b", 1), ("c", 20)], *STEPS[2:]):
        x, gains = torch.randn(sum(n for _, n in grants), 5 * 32), torch.randn(sum(n for _, n in grants), 4)
        found = kernels.choose_keys(x, gains, spec, top, ours.step(grants))
        expected = REFERENCE.choose_keys(x, gains, spec, top, theirs.step(grants))
        wrong += int((found != expected).any(1).sum())
        total += len(found)
        assert (found.diff(dim=1)[found[:, 1:] >= 0] > 0).all()
    assert wrong <= (0.2 if stored else 0.02) * total
    assert not any(count["fallbacks"] for count in kernels.counters().values())


@pytest.mark.parametrize("steady", [False, True])
def test_chosen_keys_are_the_only_ones_that_are_seen(steady):
    torch.manual_seed(1)
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, 4))
    kv, kernels, top = KVSpec("latent", 1, 40, 32), TritonKernels(steady=steady), 20
    spec = AttentionSpec(
        layer=0, group=0, heads=6, kv=kv, scale=0.2, rope=RopeSpec(angle.cos(), angle.sin(), 8, start=32)
    )
    ours, theirs = PagedBatch((kv,), kernels), PagedBatch((kv,), REFERENCE)
    for grants in STEPS:
        x = torch.randn(sum(n for _, n in grants), 7 * 40)
        a, b = ours.step(grants), theirs.step(grants)
        keys = torch.full((len(x), top), -1)
        for token, position in enumerate(b.positions.tolist()):  # fewer than there are, too
            some = torch.randperm(position + 1)[: max(1, min(top, position // 2))].sort().values
            keys[token, : len(some)] = some
        found, expected = kernels.attend(x, spec, a, keys), REFERENCE.attend(x, spec, b, keys)
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()
    assert not any(count["fallbacks"] for count in kernels.counters().values())


def test_trees_are_left_to_plain_torch():
    kv, kernels = KVSpec("latent", 1, 8, 8), TritonKernels()
    spec = AttentionSpec(layer=0, group=0, heads=2, kv=kv, scale=0.5, softcap=0.0)
    ctx = PagedBatch((kv,), kernels).step([("a", 20)])
    assert key_choice.can_choose(spec, ctx)
    ctx.groups[0].paths = object()
    assert not key_choice.can_choose(spec, ctx)
