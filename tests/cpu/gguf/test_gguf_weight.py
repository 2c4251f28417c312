"""Weights made of blocks: what they settle into, joining, splitting, reordering."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor
from writing import blocks_of

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.kernels.grid import affine_linear, widen_affine
from tokenmill.quant.base import MixedWeight
from tokenmill.quant.gguf_weight import AffineWeight, BlockWeight
from tokenmill.quant.grid import GridWeight

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


@pytest.mark.parametrize(
    ("kind", "bits", "bound"),
    [("Q4_0", 4, 0), ("Q8_0", 8, 0), ("Q5_0", 8, 0), ("IQ4_NL", 8, 0), ("MXFP4", 8, 0), ("IQ4_XS", 8, 3e-4),
     ("Q4_1", 8, 6e-3), ("Q5_1", 8, 6e-3), ("Q2_K", 8, 8e-3), ("Q3_K", 8, 8e-3), ("Q4_K", 8, 6e-3), ("Q5_K", 8, 6e-3),
     ("Q6_K", 8, 8e-3), ("IQ2_S", 8, 8e-3)],
)  # fmt: skip
def test_packed_forms(kind: str, bits: int, bound: float) -> None:
    """bound: relative to the matrix; 0 means bit for bit, and then nobody is told."""
    kernels = make_kernels("cpu")
    if isinstance(kernels, ReferenceKernels) and type(kernels) is ReferenceKernels:
        pytest.skip("no native module")
    made = weight(kind)
    want = said(made)
    settled = made.settle(kernels)
    assert isinstance(settled, GridWeight) and settled.bits == bits and settled.packed is not None
    error = (settled.dense() - want).norm() / want.norm()
    assert error <= bound
    assert (settled.changed == ()) == (bound == 0)


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
    want = rounded.double() @ said(made).double().T + torch.arange(24) / 8
    got = ReferenceKernels().affine_linear(x, settled.q, settled.scale, settled.offset, settled.bias)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def _rounded(part: Tensor) -> Tensor:
    top = part.abs().amax(-1, keepdim=True)
    return (part * (127.0 / top)).round() * (top / 127.0)


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
    assert isinstance(a.concat([four]), MixedWeight)  # joining would make 8 bits of 4


def test_mixture_settles_and_multiplies() -> None:
    both = weight("Q4_K", 16).concat([weight("Q6_K", 8, seed=1)])
    whole = both.dense()
    for kernels in (ReferenceKernels(), make_kernels("cpu")):
        settled = both.settle(kernels)
        assert (settled.dense() - whole).norm() / whole.norm() < 8e-3
