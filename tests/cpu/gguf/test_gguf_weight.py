"""Weights made of blocks: what they settle into, joining, splitting, reordering."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cpu.gguf.writing import blocks_of
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.kernels.grid import affine_linear, widen_affine
from tokenmill.quant.affine import AffineWeight
from tokenmill.quant.base import MixedWeight
from tokenmill.quant.gguf_weight import BlockWeight, SettledBlocks
from tokenmill.quant.grid import GridWeight

try:
    from tokenmill import _native as native
except ImportError:
    native = None

BY_NAME = {block.name: block for block in TYPES.values()}


def weight(kind: str, rows: int = 24, columns: int = 512, seed: int = 0, *, bias: bool = False) -> BlockWeight:
    rng = np.random.default_rng(seed)
    raw = blocks_of(rng.normal(0, 0.1, (rows, columns)).astype(np.float32), kind, rng)
    values = torch.arange(rows) / 8 if bias else None
    return BlockWeight([Blocks(BY_NAME[kind], torch.from_numpy(raw))], torch.float32, values)


def said(made: BlockWeight) -> Tensor:
    """What the format's own library reads."""
    return torch.cat(
        [torch.from_numpy(quants.dequantize(p.raw.numpy(), GGMLQuantizationType[p.type.name])) for p in made.parts]
    )


NATIVE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
ALL_ISAS = [] if native is None else native.isas()


@pytest.fixture(params=ALL_ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """One instruction set; the machine's best one afterwards."""
    assert native is not None
    native.set_isa(request.param)
    yield request.param
    native.set_isa(ALL_ISAS[-1])


@pytest.mark.skipif(native is None, reason="no native module")
@pytest.mark.parametrize("kind", NATIVE)
def test_native_form_keeps_the_files_numbers_and_bits(kind: str) -> None:
    made = weight(kind, 200, 768, bias=True)
    want, stored = said(made), made.bytes()
    settled = made.settle(make_kernels("cpu"))
    assert isinstance(settled, SettledBlocks) and settled.changed == ()
    assert torch.equal(settled.dense(), want)
    rows = torch.tensor([199, 0, 64, 64])
    assert torch.equal(settled.rows(rows), want[rows])
    # Rows are padded to tiles of 64; scales of 6 bits take a byte.
    assert settled.bytes() <= stored * 256 / 200 * 1.04


@pytest.mark.skipif(native is None, reason="no native module")
def test_other_types_become_int8_and_it_is_said() -> None:
    made = weight("IQ2_S")
    settled, want = made.settle(make_kernels("cpu")), said(weight("IQ2_S"))
    assert isinstance(settled, GridWeight) and settled.bits == 8 and settled.changed == ("IQ2_S",)
    assert (settled.dense() - want).norm() / want.norm() < 8e-3


@pytest.mark.skipif(native is None, reason="no native module")
@pytest.mark.parametrize("kind", NATIVE)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(1, 40), rows=st.integers(1, 150), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_native_products(isa: str, kind: str, tokens: int, rows: int, blocks: int, seed: int) -> None:
    """Exact up to the rounding of activations, which is repeated here; and a row's bytes against its own alone."""
    made = weight(kind, rows, 256 * blocks, seed, bias=True)
    x = torch.randn(tokens, 256 * blocks, generator=torch.Generator().manual_seed(seed))
    rounded = torch.cat([_rounded(part) for part in x.split(32, 1)], 1)
    assert made.bias is not None
    want = rounded @ said(made).double().T + made.bias.double()
    kernels = make_kernels("cpu")
    settled = made.settle(kernels)
    got = kernels.product(x, settled.packed)
    assert (got.double() - want).abs().max() <= 3e-6 * want.abs().max().clamp(min=1.0)
    for i in {0, tokens // 2, tokens - 1}:
        assert torch.equal(kernels.product(x[i : i + 1], settled.packed), got[i : i + 1])


@pytest.mark.skipif(native is None, reason="no native module")
def test_parts_of_several_types_multiply_in_one_call(isa: str) -> None:
    kernels, x = make_kernels("cpu"), torch.randn(9, 512)
    parts = [weight("Q4_K", 128), weight("Q4_K", 64, seed=1), weight("Q6_K", 90, seed=2)]
    joined = weight("Q4_K", 128).concat([weight("Q4_K", 64, seed=1), weight("Q6_K", 90, seed=2)])
    settled = joined.settle(kernels)
    assert isinstance(settled, SettledBlocks)
    alone = [kernels.product(x, part.settle(kernels).packed) for part in parts]
    assert torch.equal(kernels.product(x, settled.packed), torch.cat(alone, 1))
    assert torch.equal(settled.dense(), torch.cat([said(part) for part in parts]))
    # A border within a tile of 64 rows: multiplied one after the other.
    uneven = weight("Q4_K", 100).concat([weight("Q6_K", 30, seed=2)])
    assert isinstance(uneven.settle(kernels), MixedWeight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "MXFP4"])
def test_reference_grids_are_exact(kind: str) -> None:
    settled = weight(kind, bias=True).settle(ReferenceKernels())
    assert isinstance(settled, GridWeight) and torch.equal(settled.dense(), said(weight(kind)))


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q6_K"])
def test_reference_keeps_the_files_numbers(kind: str) -> None:
    made = weight(kind, bias=True)
    settled = made.settle(ReferenceKernels())
    assert isinstance(settled, AffineWeight) and torch.equal(settled.dense(), said(made))
    x = torch.randn(5, 512)
    rounded = torch.cat([_rounded(x[:, i : i + 32]) for i in range(0, 512, 32)], 1)
    want = rounded @ said(made).double().T + torch.arange(24) / 8
    got = ReferenceKernels().product(x, settled.stored())
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def _rounded(part: Tensor) -> Tensor:
    top = part.abs().amax(-1, keepdim=True)
    # A tensor divided: a number divided by a tensor is its reciprocal times the number, and ties would differ.
    return (part * (torch.full_like(top, 127.0) / top)).round().double() * (top / 127.0).double()


def test_affine_rows_do_not_see_each_other() -> None:
    grid = weight("Q4_K").parts[0].grid()
    assert grid is not None
    x = torch.randn(20, 512)
    whole = affine_linear(x, grid.q, grid.scale, grid.offset)
    assert torch.equal(affine_linear(x[7:8], grid.q, grid.scale, grid.offset)[0], whole[7])
    assert torch.equal(widen_affine(grid.q, grid.scale, grid.offset), grid.dense())


def test_join_take_split() -> None:
    a, b, four = weight("Q4_K", 16), weight("Q6_K", 8, seed=1, bias=True), weight("Q4_0", 8)
    both = a.concat([b])
    assert isinstance(both, BlockWeight) and len(both.parts) == 2
    whole = torch.cat([said(a), said(b)])
    assert torch.equal(both.dense(), whole) and both.bias is not None and both.bias[:17].count_nonzero() == 0
    index = torch.tensor([20, 3, 3, 17, 0, 23])
    assert torch.equal(both.take(index).dense(), whole[index])
    assert torch.equal(both.rows(index), whole[index])
    assert torch.equal(both.split(0, 1, 2).dense(), whole[12:])
    assert torch.equal(both.split(1, 1, 2).dense(), whole[:, 256:])
    with pytest.raises(ModelError, match="split over 4"):
        both.split(1, 0, 4)
    assert isinstance(a.concat([four]).settle(ReferenceKernels()), MixedWeight)  # one grid would make 8 bits of 4


def test_mixture_settles_and_multiplies() -> None:
    both = weight("Q4_K", 16).concat([weight("Q6_K", 8, seed=1)])
    whole = both.dense()
    for kernels in (ReferenceKernels(), make_kernels("cpu")):
        settled = both.settle(kernels)
        assert (settled.dense() - whole).norm() / whole.norm() < 8e-3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_signs_settle_into_the_same_numbers(backend: str) -> None:
    """A type that the format's library cannot write, whose integers are exact in any form."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (24 * 4, BY_NAME["Q1_0"].size), dtype=np.uint8)
    raw[:, :2] = rng.uniform(0.01, 0.1, (24 * 4, 1)).astype(np.float16).view(np.uint8)
    made = BlockWeight([Blocks(BY_NAME["Q1_0"], torch.from_numpy(raw.reshape(24, -1)))], torch.float32)
    settled = made.settle(ReferenceKernels() if backend == "reference" else make_kernels("cpu"))
    assert torch.equal(settled.dense(), made.dense())


@pytest.mark.parametrize("kind", sorted(set(BY_NAME) - {"F32", "F16", "BF16"}))
def test_damage_stays_visible(kind: str) -> None:
    """Whatever a type settles into: a row with a scale that is no number gives no numbers, and only that row."""
    rng, block = np.random.default_rng(1), BY_NAME[kind]
    size = block.size * (512 // block.elements)
    tried = torch.from_numpy(rng.integers(0, 256, (4096, size), dtype=np.uint8))
    with np.errstate(all="ignore"):
        whole = torch.isfinite(Blocks(block, tried).dense()).all(1)
    if bool(whole.all()):
        pytest.skip("all bytes mean numbers")
    raw = tried[whole][:1].repeat(24, 1)
    raw[3] = tried[~whole][0]
    for kernels in (make_kernels("cpu"), ReferenceKernels()):
        with np.errstate(all="ignore"):
            settled = BlockWeight([Blocks(block, raw)], torch.float32).settle(kernels)
        found = settled.rows(torch.arange(24)).isfinite().all(1)
        product = settled.matmul(torch.ones(2, 512), SimpleNamespace(kernels=kernels)).isfinite().all(0)
        assert found.tolist() == product.tolist() == [row != 3 for row in range(24)]
