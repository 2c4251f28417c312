"""Experts of 8 and 4 bit numbers, in the interpreter, against their exact values, and against what was rounded."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.triton.bounds import Bounds
from tests.cpu.triton.triton_codes_helpers import stored
from tests.cpu.triton.triton_narrow_helpers import met
from tests.thinned import covering

from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.experts.grouped import Stack
from tokenmill.kernels.triton.experts.mixture import stack
from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack
from tokenmill.kernels.triton.experts.narrow_one import narrow_one, spread_one
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.quantised.narrow import NarrowMatrix, pack4, pack8
from tokenmill.kernels.triton.quantised.narrow_gemv import spread_rows
from tokenmill.kernels.triton.quantised.narrow_round import round_rows
from tokenmill.quant.base import WeightBase
from tokenmill.quant.dense import DenseWeight

REFERENCE = ReferenceKernels()


class Packed(WeightBase):
    """A settled weight that only shows its pieces."""

    def __init__(self, matrix: NarrowMatrix) -> None:
        self.matrix, self.shape = matrix, matrix.shape

    def pieces(self):
        return self.matrix.pieces()

    def dense(self):
        return self.matrix.rows(torch.arange(self.shape[0]), torch.float32)


def packed(kind, rows, columns, *, bias):
    add = torch.randn(rows) if bias else None
    if kind == "fp8":
        data = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        return pack8(data, torch.rand(rows, 1) * 0.1 + 0.1, add)
    if kind == "blocks":
        data = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        return pack8(data, torch.rand(-(-rows // 128), -(-columns // 128)) * 0.1 + 0.1, add, blocks=True)
    if kind == "int8":
        return pack8(torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.rand(rows, 1) * 2e-3, add)
    if kind.startswith(("fp4", "nf4")):
        found = TritonKernels().pack(stored(kind, rows, columns, bias=bias, scale=0.02))
        assert found is not None and found.table
        return found
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    group = int(kind.split("/")[1])
    zeros = torch.randint(-3, 4, (rows, columns // group), dtype=torch.int8) if kind.startswith("int4z") else None
    return pack4(q, torch.rand(rows, columns // group).half() * 0.02 + 0.01, zeros, add)


EIGHT = {"fp8": torch.float8_e4m3fn, "blocks": torch.float8_e4m3fn, "int8": torch.int8}


def as_met(x, dtype):
    """Rows rounded to a weight's own type, one scale each; None: as they are."""
    if dtype is None or not len(x):
        return x
    q, steps = round_rows(x, dtype, pdl=False)
    return q.float() * steps[:, None]


ONE = [(1, kind) for kind in ("fp8", "blocks", "int8", "int4/32", "int4z/64", "int4/128", "fp4/16", "fp4/32", "nf4/64")]


@pytest.mark.parametrize(("tokens", "kind", "act"), [
    *((*each, "silu_mul") for each in (*ONE, *((20, k) for k in ("fp8", "blocks", "int4z/64", "fp4/32", "nf4/64")))),
    *((*each, "relu2") for each in covering((1, 20), ("fp8", "int8", "int4/128", "fp4/32"))),
])  # fmt: skip
def test_a_whole_layer(kind, tokens, act):
    eight = kind in EIGHT
    experts, hidden, inner, top = 8, 160 if kind in (*EIGHT, "fp4/16", "fp4/32") else 128, 128, 6
    bias = kind in ("int8", "int4z/64", "fp4/32")
    ups = [Packed(packed(kind, (2 if act == "silu_mul" else 1) * inner, hidden, bias=bias)) for _ in range(experts)]
    downs = [Packed(packed(kind, hidden, inner, bias=bias)) for _ in range(experts)]
    wide = [(u.dense(), u.matrix.bias, d.dense(), d.matrix.bias) for u, d in zip(ups, downs, strict=True)]
    router, spec = DenseWeight(torch.randn(experts, hidden)), RouteSpec(experts, top)
    kernels, norm = TritonKernels(), NormSpec(torch.rand(hidden) + 0.5, 1e-6)
    fused = kernels.pack_mixture(Mixture(router, spec, ups, downs, act))
    assert fused is not None and isinstance(fused.ups, Stack if eight else NarrowStack) and not ups and not downs
    x = torch.randn(tokens, hidden)
    found = fused(x, ForwardContext(kernels, x, x, x, 1, [], []), norm=norm, residual=x)
    h = REFERENCE.norm(x, norm)
    ids, gates = REFERENCE.route(REFERENCE.product(h, router.table), spec)
    expected = x.clone()
    for e, (up, up_bias, down, down_bias) in enumerate(wide):
        token, place = torch.where(ids == e)
        met_by = EIGHT[kind] if eight and tokens > 1 else None
        y = as_met(h[token], met_by) @ up.T
        y = as_met(REFERENCE.activate(y if up_bias is None else y + up_bias, act), met_by) @ down.T
        y = y if down_bias is None else y + down_bias
        expected.index_add_(0, token, gates[token, place, None] * y)
    rounded = tokens == 1 and kind.startswith(("int4", "fp4", "nf4"))  # as one row times such a matrix is
    limit = 0.03 if rounded else 3e-3 if eight and tokens > 1 else 1e-5  # 3e-3: a number between two may go either way
    assert float((found - expected).norm() / expected.norm()) < limit
    assert kernels.waits == 0


ROUNDED = ["int4/32", "int4z/64", "int4/128", "fp4/16", "nf4/64", "fp4/32"]


@pytest.mark.parametrize(("kind", "act", "top"), covering(ROUNDED, ["silu_mul", "oai_swiglu", "relu2"], [3, 4]))
def test_one_token_meets_what_was_rounded(kind, act, top):
    hidden, inner = 160 if kind.endswith(("/16", "/32")) else 128, 288 if kind.endswith(("/16", "/32")) else 256
    ups = [Packed(packed(kind, (1 if act == "relu2" else 2) * inner, hidden, bias=True)) for _ in range(5)]
    downs = [Packed(packed(kind, hidden, inner, bias=True)) for _ in range(5)]
    wide = [(u.dense(), u.matrix.bias, d.dense(), d.matrix.bias) for u, d in zip(ups, downs, strict=True)]
    stacks = stack(ups), stack(downs)
    x, norm, residual = torch.randn(1, hidden), NormSpec(torch.rand(hidden) + 0.5, 1e-6), torch.randn(1, hidden)
    ids, gates = torch.randperm(5)[None, :top].int(), torch.rand(1, top)
    spread = spread_one(x, stacks[0], norm, pdl=False)
    with Bounds().watching() as bounds:
        found = narrow_one(x, stacks, (ids, gates), spread, act, residual, pdl=False)
    assert bounds.launches == {"_up_kernel": 1, "_spread_kernel": 1, "_down_kernel": 1}
    expected, (h, _) = residual.clone(), met(spread[0], 2, hidden)
    for e, gate in zip(ids[0].tolist(), gates[0], strict=True):
        up, up_bias, down, down_bias = wide[e]
        between = REFERENCE.activate((h @ up.T + up_bias)[None], act)
        between, _ = met(spread_rows(between, -(-inner // 128) * 16, 2, None, pdl=False)[0], 2, inner)
        expected += gate * (between @ down.T + down_bias)
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_groups_of_8_bits_are_left_to_the_other_way():
    ups = [Packed(pack8(torch.randint(-9, 9, (64, 64), dtype=torch.int8), torch.rand(64, 2), None)) for _ in range(2)]
    mixture = Mixture(DenseWeight(torch.randn(2, 64)), RouteSpec(2, 1), ups, list(ups), "silu_mul")
    assert TritonKernels().pack_mixture(mixture) is None and len(ups) == 2
