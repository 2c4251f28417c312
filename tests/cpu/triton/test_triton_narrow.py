"""Triton products with 8 and 4 bit weights, in the interpreter, against the widened matrix."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.triton.triton_narrow_helpers import REFERENCE, exact, met, relative

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.common import Scratch
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.quantised.narrow import NarrowMatrix, pack4, pack8, unpack4
from tokenmill.kernels.triton.quantised.narrow_gemv import KINDS as STORED
from tokenmill.kernels.triton.quantised.narrow_gemv import SpreadRows, narrow_gemv, spread_rows
from tokenmill.kernels.triton.quantised.narrow_linear import default_stream, narrow_operation
from tokenmill.kernels.triton.quantised.narrow_round import round_rows, widened
from tokenmill.kernels.triton.quantised.narrow_thin import narrow_thin
from tokenmill.kernels.triton.quantised.narrow_wide import narrow_wide

FP8 = torch.float8_e4m3fn


def matrix(kind: str, rows: int, columns: int, bias: bool = False) -> NarrowMatrix:
    """fp8, int8, fp8 blocks, int8/32, int4/64, int4z/32, ... with random numbers."""
    name, _, group = kind.partition("/")
    b = torch.randn(rows) if bias else None
    if name == "fp8":
        data = torch.randn(rows, columns).to(FP8)
        if group == "blocks":
            return pack8(data, torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5, b, blocks=True)
        return pack8(data, torch.rand(rows, 1) + 0.5, b)
    groups = columns // int(group) if group else 1
    scales = torch.rand(rows, groups) + 0.5
    if name == "int8":
        return pack8(torch.randint(-127, 128, (rows, columns), dtype=torch.int8), scales / 64, b)
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (rows, groups), dtype=torch.int8) if name == "int4z" else None
    return pack4(q, scales / 4, zeros, b)


def test_four_bits_pack_and_unpack():
    q = torch.randint(-8, 8, (5, 256), dtype=torch.int8)
    packed = pack4(q, torch.ones(5, 2), None, None)
    assert packed.data.dtype == torch.int16 and torch.equal(unpack4(packed.data), q)
    assert torch.equal(packed.rows(torch.tensor([3, 0]), torch.float32), q[[3, 0]].float())
    word = int(packed.data[1, 32 + 7]) & 0xFFFF
    assert [((word >> 4 * i) & 15) - 8 for i in range(4)] == q[1, [128 + 7, 160 + 7, 192 + 7, 224 + 7]].tolist()


KINDS = [
    "fp8", "int8", "fp8/blocks", "int8/32", "int8/128",
    "int4/32", "int4/64", "int4/128", "int4/256", "int4z/64", "int4z/128",
]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "int4", "int4z/32"])
@pytest.mark.parametrize(("act", "fused"), [(None, False), ("silu_mul", True)])
def test_one_row(kind, act, fused):
    inner, width = (256, 256) if "blocks" in kind else (200, 10) if kind in ("fp8", "int8", "int4") else (256, 10)
    weight = matrix(kind, width, inner, bias=fused)
    x = torch.randn(1, inner)
    norm = NormSpec(torch.rand(inner) + 0.5, 1e-5, offset=0.25) if fused else None
    residual = torch.randn(1, width // 2 if act else width) if fused else None
    config = (64 if "blocks" in kind else 2, 64, 1, 0) if fused else (64 if "blocks" in kind else 4, 16, 2, 0)
    found = narrow_gemv(x, weight, norm, act, residual, pdl=False, config=config)
    # How far rounding moves a result depends on how much its parts cancel: it is checked before they are added up.
    stored = STORED[weight.data.dtype]
    words = spread_rows(x, weight.data.shape[1] * weight.data.element_size() // 4, stored, norm, pdl=False)
    rounded, errors = met(words, stored, inner)
    assert ((rounded - (x if norm is None else REFERENCE.norm(x, norm))[0]).abs() <= errors * 1.001 + 1e-9).all()
    assert relative(found, exact(rounded[None], weight, None, act, residual)) < 1e-4
    rows = torch.cat((torch.randn(2, inner), x))
    beside = None if residual is None else residual.expand(3, -1).contiguous()
    assert torch.equal(narrow_gemv(rows, weight, norm, act, beside, pdl=False, config=config)[2:], found)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("width", [32, 40])
def test_a_gated_row_is_spread_for_the_next_matrix(kind, width):
    up, down = matrix(kind, 2 * width, 64), matrix(kind, 12, width)
    x = torch.randn(2, 64)
    inner = narrow_gemv(x, up, None, "silu_mul", None, pdl=False, config=(16, 16, 1, 0))
    assert isinstance(inner, SpreadRows) and inner.words.shape == (2, 3 * width // 4)
    want = narrow_gemv(inner.clone(), down, None, None, None, pdl=False, config=(4, 16, 1, 0))
    found = narrow_gemv(inner, down, None, None, None, pdl=False, config=(4, 16, 1, 0))
    assert type(found) is torch.Tensor and torch.equal(found, want)
    inner.words.zero_()  # they are what is multiplied
    assert not narrow_gemv(inner, down, None, None, None, pdl=False, config=(4, 16, 1, 0)).any()


def test_only_the_row_itself_counts_as_spread():
    kernels, up, down = TritonKernels(), matrix("fp8", 64, 32), matrix("fp8", 16, 32)
    kernels.launch.narrow_ways = {narrow_operation(1, up, "silu_mul"): ("gemv", 4, 16, 1, 0)}
    x = torch.randn(1, 32)
    inner = kernels.product(x, up, act="silu_mul")
    assert isinstance(inner, SpreadRows)
    first = kernels.product(inner, down)
    assert torch.equal(first, kernels.product(inner.clone(), down))
    assert type(inner * 2) is type(inner.view(32)) is torch.Tensor
    inner.words.zero_()
    other = inner + 0  # another row, which has no words
    assert relative(kernels.product(other, down), exact(other, down, None, None, None)) < 2e-3
    norm = NormSpec(torch.rand(32) + 0.5, 1e-5)  # nor has a norm of it
    assert relative(kernels.product(inner, down, norm=norm), exact(inner, down, norm, None, None)) < 2e-3
    integers = matrix("int8", 16, 32)
    assert relative(kernels.product(inner, integers), exact(inner, integers, None, None, None)) < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "fused"), [(None, True), ("silu_mul", False)])
def test_few_rows(kind, act, fused):
    rows = 20 if fused else 3
    width, inner = 256 if "blocks" in kind else 76, 512
    weight = matrix(kind, width, inner, bias=fused)
    x = torch.randn(rows, inner)
    residual = torch.randn(rows, width // 2 if act else width) if fused else None
    scratch = Scratch(1 << 18, 64)
    config = (32, 128, 1, 1, 4, 0) if fused else (32, 64, 2, 1, 4, 0)
    found = narrow_thin(x, weight, act, residual, x.dtype, scratch=scratch, pdl=False, config=config)
    assert relative(found, exact(x, weight, None, act, residual)) < 1e-5
    assert not scratch.counters(x.device).any(), "counters are left as they were found"


@pytest.mark.parametrize(
    ("kind", "inner"), [("int4/96", 96), ("int4", 200), ("int4/32", 160), ("int4z/64", 320), ("fp8", 200)]
)
def test_columns_that_fill_no_block(kind, inner):
    if kind == "int4/96":
        kind = "int4"
    weight, x = matrix(kind, 40, inner), torch.randn(3, inner)
    found = narrow_thin(x, weight, None, None, x.dtype, scratch=Scratch(1 << 18, 64), pdl=False,
                        config=(32, 128, 2, 1, 4, 0))  # fmt: skip
    assert relative(found, exact(x, weight, None, None, None)) < 1e-5
    one = narrow_gemv(x[:1], weight, None, None, None, pdl=False, config=(4, 16, 1, 0))
    assert relative(one, exact(x[:1], weight, None, None, None)) < 0.03
    assert torch.allclose(widened(weight, torch.float32, pdl=False), weight.rows(torch.arange(40), torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_widened(kind):
    weight = matrix(kind, 256, 384 if kind != "int4/256" else 512)
    dense = weight.rows(torch.arange(256), torch.float32)
    assert torch.allclose(widened(weight, torch.float32, pdl=False), dense, rtol=1e-6)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_rounded_rows(dtype):
    x, norm = torch.randn(5, 140), NormSpec(torch.rand(140) + 0.5, 1e-5, offset=1.0)
    x[3] = 0
    q, steps = round_rows(x, dtype, norm, pdl=False)
    want = REFERENCE.norm(x, norm)
    top = 448.0 if dtype == FP8 else 127.0
    assert torch.allclose(steps, want.abs().amax(-1) / top, rtol=1e-5)
    assert q.dtype == dtype and relative(q.float() * steps[:, None], want) < (0.08 if dtype == FP8 else 0.01)
    if dtype == torch.int8:
        assert (q[:3].float() - want[:3] / steps[:3, None]).abs().max() < 0.501


def test_numbers_below_a_power_of_two_are_rounded_up_to_it():
    x = torch.tensor([[448.0, 127.9, 63.9, 31.95, -15.98, -0.4999, 0.0156, 2**-9]])
    q, steps = round_rows(x, FP8, pdl=False)
    assert steps.item() == 1.0 and torch.equal(q.float(), x.to(FP8).float())


@pytest.mark.parametrize("kind", ["fp8", "int8", "fp8/blocks"])
@pytest.mark.parametrize(("act", "fused"), [(None, True), ("silu_mul", False)])
@pytest.mark.parametrize("rows", [3, 70])
def test_rounded_activations(kind, act, fused, rows):
    width, inner = (256, 384) if "blocks" in kind else (76, 200)
    weight = matrix(kind, width, inner, bias=fused)
    residual = torch.randn(rows, width // 2 if act else width) if fused else None
    q, steps = round_rows(torch.randn(rows, inner), weight.data.dtype, pdl=False)
    want = exact(q.float() * steps[:, None], weight, None, act, residual)
    found = narrow_wide(q, steps, weight, act, residual, torch.float32, pdl=False, config=(32, 64, 64, 1, 4))
    assert relative(found, want) < 1e-5
    found = narrow_thin((q, steps), weight, act, residual, torch.float32, scratch=Scratch(1 << 18, 64), pdl=False,
                        config=(32, 64, 2, 1, 4, 0))  # fmt: skip
    assert relative(found, want) < 1e-5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [2, 32, 64, 128, 512])
def test_streams_of_any_size_have_room_and_work(rows, gated):
    """No more stages than a part of K has blocks, never none; no part without a block."""
    for inner in (32, 128, 160, 256, 384, 640, 768, 1024, 2880, 4096, 14336):
        for width in (8, 64, 1000, 4096, 28672, 151936):
            name, _, most, split, stages, *_ = default_stream(rows, width, inner, gated=gated)
            blocks = -(-inner // 128)
            assert name == "stream" and most >= 64 and 1 <= split <= max(1, blocks // 4)
            assert stages >= 1 and (rows > 64 or stages <= -(-blocks // split))


@pytest.mark.parametrize("table", [False, True], ids=["integers", "a table"])
def test_weights_kept_in_16_bits_too_serve_many_rows(table):
    """Those with a scale per group, if they fit; few rows and other types read the packed form."""
    rows, columns = 48, 64
    q, scales = torch.randint(0, 16, (rows, columns), dtype=torch.uint8), torch.rand(rows, 2) / 8
    kernels = TritonKernels()
    made = [pack4(q.to(torch.int8) - 8, scales, None, torch.randn(rows).half())]
    kernels.packed.update(dict.fromkeys(made))
    weight, x = made[0], torch.randn(70, columns).half()
    if table:
        weight.table = 1
    need = 2 * rows * columns
    assert kernels.keep_widened(torch.float16, need - 1) == kernels.keep_widened(torch.float32, 9 * need) == 0
    assert weight.widened is None
    assert kernels.keep_widened(torch.float16, need) == need
    assert torch.allclose(weight.widened.float(), weight.rows(torch.arange(rows), torch.float16).float(), atol=1e-3)
    few = kernels.product(x[:5], weight)
    weight.widened.zero_()  # who reads it finds nothing but the bias
    assert torch.equal(kernels.product(x, weight), weight.bias.expand(70, rows))
    assert torch.equal(kernels.product(x[:5], weight), few)
    off = TritonKernels(without=("widened",))
    off.packed.update(dict.fromkeys(made))
    assert off.keep_widened(torch.float16, need) == 0
