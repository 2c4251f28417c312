"""Weights as files have them whose codes are entries of a table: what they become for a GPU, in the interpreter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("compressed_tensors")


from tests.cpu.quant.stored_forms_helpers import FORMS, read
from tests.thinned import WHOLE

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.quant.base import MixedWeight
from tokenmill.quant.gguf_weight import BlockWeight

CODED = {"mxfp4": True, "nvfp4": True, "modelopt nvfp4": True, "nf4": False, "nf4 nested": False}
"""Forms, and whether their numbers stay what they are (NVFP4's do where the factor of a matrix is a power of two)."""


def relative(found, expected):
    assert found.shape == expected.shape
    return float((found.float() - expected).norm() / expected.norm())


def check(weight, dense, kernels, several):
    """Half a byte a weight, and products of every kernel."""
    assert weight.packed.bits == 4 and weight.packed.data.nbytes == dense.shape[0] * -(-dense.shape[1] // 128) * 64
    assert relative(weight.rows(torch.tensor([3, 1, 3])), dense[[3, 1, 3]]) < 6e-3
    for rows in several:
        x = torch.randn(rows, dense.shape[1])
        found = weight.matmul(x, SimpleNamespace(kernels=kernels))
        assert relative(found, x @ dense.T) < (0.02 if rows == 1 else 6e-3), rows
    assert not any(counted["fallbacks"] for counted in kernels.counters().values())


@pytest.mark.parametrize("name", CODED)
def test_files_with_tables_keep_four_bits(name):
    tensors, dense, config = FORMS[name][0]()
    shape, kernels = tuple(dense.shape), TritonKernels()

    def again():
        return read(tensors, config, shape)

    whole = again().settle(kernels)
    turn = list(CODED).index(name) % 2
    many = 33 if turn else 100  # how many rows meet which kernel; the table meets all alike
    check(whole, dense, kernels, (1, 5, 33, 100) if WHOLE else (1, 5, many))
    assert bool(whole.changed) is not CODED[name], "what changes is told"
    if CODED[name]:
        assert torch.equal(whole.rows(torch.arange(shape[0])), dense)
    few = (1, 5, 33, 100) if WHOLE else (1, 5)
    check(again().concat([again()]).settle(kernels), torch.cat([dense, dense]), kernels, few)
    for dim, part in itertools.product(range(2), range(2)) if WHOLE else ((0, turn), (1, 1 - turn)):
        check(again().split(dim, part, 2).settle(kernels), dense.chunk(2, dim)[part], kernels, few)


def blocks(name: str, rows: int, columns: int, scale: float = 1.0) -> Blocks:
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    raw = torch.randint(0, 256, (rows * columns // kind.elements, kind.size), dtype=torch.uint8)
    if name == "MXFP4":
        raw[:, 0] = torch.randint(120, 130, (len(raw),))
    else:
        raw[:, :2] = ((torch.rand(len(raw)) + 0.5) * scale).half().view(torch.uint8).view(-1, 2)
    return Blocks(kind, raw.view(rows, -1))


@pytest.mark.parametrize("name", ["MXFP4", "IQ4_NL", "IQ4_XS"])
def test_blocks_with_tables_keep_four_bits(name):
    kernels, columns = TritonKernels(), 512 if name == "IQ4_XS" else 288
    parts = [blocks(name, 24, columns), blocks(name, 8, columns)]
    weight = BlockWeight(parts, torch.float32, torch.randn(32)).settle(kernels)
    dense = torch.cat([part.dense() for part in parts])
    assert relative(weight.rows(torch.arange(32)), dense) < (6e-4 if name == "IQ4_XS" else 1e-7)
    assert bool(weight.changed) is (name == "IQ4_XS"), "its scales are products, which half precision rounds"
    x = torch.randn(5, columns)
    assert relative(weight.matmul(x, SimpleNamespace(kernels=kernels)), x @ dense.T + weight.packed.bias) < 1e-3


def test_blocks_of_two_types_are_packed_apart():
    parts = [blocks("MXFP4", 16, 256), blocks("Q4_0", 16, 256)]
    weight = BlockWeight(parts, torch.float32).settle(TritonKernels())
    assert isinstance(weight, MixedWeight) and [part.packed.bits for part in weight.parts] == [4, 4]
    assert [bool(part.packed.table) for part in weight.parts] == [True, False]


def test_scales_of_every_power_of_two_stay_exact():
    """MXFP4's scales go from 2^-127 to 2^127: half precision has not their range, bfloat16 has."""
    part = blocks("MXFP4", 2, 8128)
    part.raw.view(-1, 17)[:, 0] = torch.arange(254, dtype=torch.uint8).repeat(2)
    weight = BlockWeight([part], torch.float32).settle(TritonKernels())
    assert not weight.changed and torch.equal(weight.rows(torch.arange(2)), part.dense())
