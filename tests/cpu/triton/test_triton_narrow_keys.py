"""Keys and values in 8 bits: every number is unpacked exactly, and scales of any size leave the result right."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from paged_batch import PagedBatch  # noqa: E402

from tokenmill.core.forward import AttentionSpec, KVSpec, KVView  # noqa: E402
from tokenmill.kernels.reference import ReferenceKernels  # noqa: E402
from tokenmill.kernels.triton.attention.narrow_keys import halves_of, in_pairs  # noqa: E402
from tokenmill.kernels.triton.attention.prepare import whole_scales  # noqa: E402
from tokenmill.kernels.triton.kernels import TritonKernels  # noqa: E402

REFERENCE = ReferenceKernels()
FP8 = torch.float8_e4m3fn


@triton.jit
def _unpack_kernel(pairs_ptr, low_ptr, high_ptr, N: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, N)
    low, high = halves_of(tl.load(pairs_ptr + at), KIND, True)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, tl.int8), (FP8, tl.float8e4nv)])
def test_every_pair_is_exact(dtype, kind):
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers[[0x7F, 0xFF]] = 0  # NaN is never stored
    pairs = torch.stack([numbers, numbers.roll(77)], 1).contiguous().view(dtype)
    low, high = (torch.full((256,), float("nan"), dtype=torch.float16) for _ in range(2))
    _unpack_kernel[(1,)](in_pairs(pairs).flatten(), low, high, N=256, KIND=kind)
    assert torch.equal(low.float(), pairs[:, 0].float())
    assert torch.equal(high.float(), pairs[:, 1].float())


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # 0 / 0, which is not taken
@pytest.mark.parametrize("size", [0.0, 1e-7, 1.0, 1e4])
def test_values_of_any_size(size):
    """Scales of values go into exponents: zeros, tiny and huge ones beside ordinary ones must come out right."""
    kv = KVSpec("full", 1, 16, 16)
    spec = AttentionSpec(0, 0, 2, kv, 0.25)
    kernels = TritonKernels()
    ours, theirs = (PagedBatch((kv,), k, dtype=torch.int8) for k in (kernels, REFERENCE))
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
def test_what_cannot_be_read_in_pairs_is_left_to_the_reference(block, dim, whole):
    key, scale = torch.zeros(2, 1, block, dim, dtype=torch.int8), torch.ones(2, 1, block, 1, dtype=torch.bfloat16)
    assert whole_scales(KVView(key, key, scale, scale)) is whole
    assert whole_scales(KVView(key, key))
