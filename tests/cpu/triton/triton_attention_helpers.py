"""What test_triton_attention.py and other tests share."""

from __future__ import annotations

import torch
from tests.cpu.kernels.paged_batch import PagedBatch

from tokenmill.compute.forward import AttentionSpec, KVSpec, RopeSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()


def rope(dim, interleaved=False, start=0):
    angle = torch.arange(256.0)[:, None] * (10.0 ** -torch.linspace(0, 3, dim // 2))
    return RopeSpec(angle.cos(), angle.sin(), dim, interleaved=interleaved, start=start)


def make_spec(heads=4, kv_heads=2, dim=16, value_dim=16, window=0, **options):
    kv = KVSpec("window" if window else "full", kv_heads, dim, value_dim, abs(window))
    return AttentionSpec(layer=0, group=0, heads=heads, kv=kv, scale=dim**-0.5, window=window, **options)


def width_of(spec):
    """Of a token's queries, keys and values together."""
    own = spec.touches.values == "own"
    return (spec.heads + spec.kv.heads) * spec.kv.key_dim + own * spec.kv.heads * spec.kv.value_dim


def both(spec, steps, *, kernels=None, drop=True):
    """The same steps through both backends -> pairs of outputs, and of the last step's q."""
    kernels = kernels or TritonKernels()
    kv = spec.kv
    width = width_of(spec)
    ours, theirs = PagedBatch((kv,), kernels, drop=drop), PagedBatch((kv,), REFERENCE, drop=drop)
    for grants in steps:
        x = torch.randn(sum(n for _, n in grants), width)
        a, b = ours.step(grants), theirs.step(grants)
        q, expected_q = kernels.prepare_qkv(x, spec, a), REFERENCE.prepare_qkv(x, spec, b)
        assert torch.allclose(q, expected_q, atol=1e-5)
        expected = REFERENCE.attention(expected_q, spec, b)
        yield kernels.attention(q, spec, a), expected
        if all(n == 1 for _, n in grants):
            for view, slots in ((a.kv[0], a.groups[0].slots),):  # fresh: the newest keys are not stored yet
                view.key[slots // 16, :, slots % 16] = float("nan")
                view.value[slots // 16, :, slots % 16] = float("nan")
            yield kernels.attend(x, spec, a), expected
    for mine, other in zip(ours.kv, theirs.kv, strict=True):
        assert torch.allclose(mine.key, other.key, atol=1e-5, equal_nan=True)
        assert torch.equal(mine.value.isnan(), other.value.isnan())


STEPS = [[("a", 37), ("b", 5)], [("a", 1), ("b", 1), ("c", 20)], [("a", 1), ("b", 1), ("c", 1)], [("b", 18), ("c", 3)]]
