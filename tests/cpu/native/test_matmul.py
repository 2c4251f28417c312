"""Native matmuls against float64, and their bytes against their own in other company."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.cpu.packed import PackedMatrix, group_size, pack_dense, pack_quantised, quantise
from tokenmill.kernels.grid import FP4
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.fp8 import Fp8Weight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.table import TableWeight

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
FEW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DIMS = st.tuples(st.integers(1, 40), st.integers(1, 200), st.integers(1, 300))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the dtype, relative to the size of the whole (terms of size 1 may cancel)."""
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=10.0)
    assert error < ROUNDING[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(dims=DIMS, with_bias=st.booleans(), seed=st.integers(0, 99))
def test_dense_linear(kernels, dtype, dims, with_bias, seed):
    rows, outputs, inputs = dims
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    wanted = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    got = kernels.product(x, weight, bias)
    assert got.dtype == dtype
    close(got, wanted, dtype)


@pytest.mark.parametrize("mixed", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_rows_and_weight_of_different_types(kernels, mixed):
    x, weight, bias = random(9, 75, dtype=mixed[0]), random(70, 75, dtype=mixed[1], seed=1), random(70, dtype=mixed[1])
    close(kernels.product(x, weight, bias), x.double() @ weight.double().t() + bias.double(), mixed[0])


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(dims=DIMS, with_bias=st.booleans(), seed=st.integers(0, 99))
def test_weights_in_float16_are_widened_exactly(kernels, dtype, dims, with_bias, seed):
    rows, outputs, inputs = dims
    x, half = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, seed=seed + 1).half()
    half.view(-1)[:6] = torch.tensor([6e-8, -6e-8, 65504.0, -65504.0, -0.0, 6.1e-5])[: half.numel()]  # its ends
    bias = random(outputs, seed=seed + 2) if with_bias else None
    held, wide = pack_dense(half, bias), pack_dense(half.float(), bias)
    assert torch.equal(kernels.product(x, held), kernels.product(x, wide))
    every = torch.arange(outputs)
    assert torch.equal(held.rows(every, torch.float32), half.float())
    assert wide.bytes() - held.bytes() == inputs // 2 * 256 * -(-outputs // 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [None, "silu", "gelu_tanh_mul", "silu_mul"])
@pytest.mark.parametrize("outputs", [128, 140, 256])
def test_norm_act_and_residual_fused(kernels, dtype, act, outputs):
    x, weight = random(11, 96, dtype=dtype), random(outputs, 96, dtype=dtype, seed=1) * 0.1
    bias = random(outputs, dtype=dtype, seed=2)
    norm = NormSpec(random(96, dtype=dtype, seed=3), 1e-5, offset=1.0)
    width = outputs // 2 if act and act.endswith("_mul") else outputs
    residual = random(11, width, dtype=dtype, seed=4)
    got = kernels.product(x, weight, bias, norm=norm, act=act, residual=residual)
    y = REFERENCE.norm(x, norm).float() @ weight.float().t() + bias.float()
    wanted = residual.float() + (y if act is None else REFERENCE.activate(y, act))
    error = (got.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(dims=DIMS, group=st.sampled_from([32, 64, 96, 128]), seed=st.integers(0, 99))
def test_quantised_linear(kernels, fmt, dtype, dims, group, seed):
    """Exact up to the rounding of activations to int8, which is repeated here."""
    rows, outputs, inputs = dims
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, seed=seed + 1)
    q, scales = quantise(weight, fmt, group)
    bias = random(outputs, dtype=dtype, seed=seed + 2)
    got = kernels.product(x, pack_quantised(q, scales, fmt, bias, group))
    dense = dequantise(q, scales, group)
    wanted = rounded_activations(x) @ dense.double().t() + bias.double()
    close(got, wanted, dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@settings(FEW, max_examples=6)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 4),
    points=st.sampled_from(["none", "whole", "fractions"]),
    seed=st.integers(0, 99),
)
def test_integers_of_few_bits(kernels, bits, rows, outputs, groups, points, seed):
    """Sums within a group stay exact, so zero points far from the middle cost nothing."""
    generator, dtype = torch.Generator().manual_seed(seed), DTYPES[seed % 2]
    group, low = (32, 64, 128)[seed % 3], -(1 << (bits - 1))
    q = torch.randint(low, -low, (outputs, groups * group), generator=generator).to(torch.int8)
    if bits == 8 and points == "none":
        q = q.clamp(min=-127)
    zeros = None
    if points != "none":
        zeros = torch.randint(low, -low, (outputs, groups), generator=generator, dtype=torch.int16)
        zeros = zeros if points == "whole" else zeros + 0.25
    scales = torch.rand(outputs, groups, generator=generator).half()
    x, bias = random(rows, groups * group, dtype=dtype, seed=seed), random(outputs, dtype=dtype, seed=seed + 2)
    packed = kernels.pack(GridWeight(q, scales, bits=bits, group=group, dtype=dtype, bias=bias, zeros=zeros).stored())
    head = 2 if zeros is None and bits in (2, 3, 4, 8) else 4
    assert packed.bytes() <= -(-outputs // 64) * 64 * groups * (group * bits // 8 + head) + outputs * 4
    less = torch.zeros(outputs, groups) if zeros is None else zeros
    wide = (q.double() - less.double().repeat_interleave(group, 1)) * scales.double().repeat_interleave(group, 1)
    assert torch.equal(packed.rows(torch.arange(outputs), torch.float32), wide.float())
    got = kernels.product(x, packed)
    close(got, rounded_activations(x) @ wide.T + bias.double(), dtype)
    assert torch.equal(kernels.product(x[:1], packed), got[:1])


def table_weight(kind: str, outputs: int, inputs: int, generator: torch.Generator, dtype: torch.dtype) -> TableWeight:
    """Random codes: of NVFP4, of the 4 bit floats in groups of 64, or of a table that is no whole numbers."""
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    factors = torch.rand(outputs, generator=generator) * 1e-6 + 1e-6  # scales beyond the range of half precision
    group = 16 if kind == "nvfp4" else 64
    scales = torch.randn(outputs, inputs // group, generator=generator) * 20
    scales = scales.to(torch.float8_e4m3fn).float() if kind == "nvfp4" else scales
    table = torch.randn(16, generator=generator) if kind == "own" else torch.tensor(FP4)
    return TableWeight(codes, table, scales, dtype, None, kind, factors)


@pytest.mark.parametrize("kind", ["nvfp4", "fp4", "own"])
@settings(FEW, max_examples=6)
@given(rows=st.integers(1, 20), outputs=st.integers(1, 150), groups=st.integers(1, 4), seed=st.integers(0, 99))
def test_codes_of_a_table(kernels, kind, rows, outputs, groups, seed):
    """Entries are rounded to whole numbers below 128 unless they are such, scales to halves of a row's largest."""
    generator, dtype = torch.Generator().manual_seed(seed), DTYPES[seed % 2]
    weight = table_weight(kind, outputs, groups * 64, generator, dtype)
    wide, packed = weight.rows(torch.arange(outputs)).double(), kernels.pack(weight.stored())
    assert packed is not None
    assert packed.bytes() <= -(-outputs // 64) * (64 * groups * (36 if kind == "nvfp4" else 34) + 320)
    held = packed.rows(torch.arange(outputs), torch.float32).double()
    most = {"nvfp4": 2e-7, "fp4": 5e-4, "own": 8e-3}[kind]  # of a table's largest entry, and of bfloat16
    assert (held - wide).abs().max() <= (most + (0.0 if dtype == torch.float32 else 4e-3)) * wide.abs().max() + 1e-12
    x = random(rows, groups * 64, dtype=dtype, seed=seed)
    got, wanted = kernels.product(x, packed), rounded_activations(x) @ held.T
    terms = rounded_activations(x).abs() @ held.abs().T  # they may cancel
    assert bool(((got.double() - wanted).abs() <= ROUNDING[dtype] * terms).all())
    assert torch.equal(kernels.product(x[:1], packed), got[:1])


@pytest.mark.parametrize("blocks", [False, True])
@settings(FEW, max_examples=8)
@given(dims=DIMS, seed=st.integers(0, 99))
def test_float8(kernels, blocks, dims, seed):
    """Exact: weights are widened, activations are as they are; every number that e4m3 has is tried."""
    (rows, outputs, inputs), dtype = dims, DTYPES[seed % 2]
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    data = torch.where(bytes_ & 127 == 127, 0, bytes_).to(torch.uint8).view(torch.float8_e4m3fn)
    shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs, 1)
    scales = torch.rand(shape, generator=generator) * 1e-3
    bias = random(outputs, dtype=dtype, seed=seed + 2)
    weight = Fp8Weight(data, scales, torch.float32, bias, blocks=blocks)
    wide, packed = weight.rows(torch.arange(outputs)), kernels.pack(weight.stored())
    assert torch.equal(packed.rows(torch.arange(outputs), torch.float32), wide)
    x = random(rows, inputs, dtype=dtype, seed=seed)
    got = kernels.product(x, packed)
    close(got, x.double() @ wide.double().T + bias.double(), dtype)
    assert torch.equal(kernels.product(x[:1], packed), got[:1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_what_is_not_finite_stays_so(kernels, bits, bad):
    """A row with one such number among its 8 bit activations, wherever it is; other rows are as ever."""
    weight = GridWeight(
        torch.ones(70, 96, dtype=torch.int8), torch.ones(70, 3).half(), bits=bits, group=32, dtype=torch.float32
    )
    packed, x = kernels.pack(weight.stored()), random(5, 96)
    wanted = kernels.product(x, packed)
    for row, column in ((0, 3), (2, 20), (3, 95)):
        x[row, column] = bad
    got = kernels.product(x, packed)
    assert got[[0, 2, 3]].isnan().all() and torch.equal(got[[1, 4]], wanted[[1, 4]])


def test_tables_that_have_no_form(kernels):
    generator = torch.Generator().manual_seed(0)
    weight = table_weight("own", 5, 64, generator, torch.float32)
    uneven = TableWeight(weight.numbers(), weight.table, torch.rand(5, 4), torch.float32, None, "groups of 16")
    assert kernels.pack(uneven.stored()) is None
    wide = TableWeight(weight.numbers(), torch.rand(17), weight.scales, torch.float32, None, "17 entries")
    assert kernels.pack(wide.stored()) is None


def dequantise(q: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    return q.float() * scales.float().repeat_interleave(group, 1)[:, : q.shape[1]]


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    top = padded.abs().amax(-1, keepdim=True)
    # A tensor divided, because a number divided by a tensor is its reciprocal times the number: ties would differ.
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, torch.zeros_like(top))
    back = (padded * inverse).round().double() * (top / 127.0).double()
    return back.flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_quantising_rounds_to_nearest_and_rows_come_back(fmt, group):
    weight = random(70, 200)
    q, scales = quantise(weight, fmt, group)
    low, high = (-127, 127) if fmt == "int8" else (-8, 7)
    assert int(q.min()) >= low
    assert int(q.max()) <= high
    dense = dequantise(q, scales, group)
    step = scales.float().abs().repeat_interleave(group, 1)[:, :200]
    clipped = q == high
    assert bool(((weight - dense).abs() <= 0.51 * step)[~clipped].all())
    packed = pack_quantised(q, scales, fmt, group=group)
    ids = torch.tensor([69, 0, 33, 33])
    assert torch.equal(packed.rows(ids, torch.float32), dense[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 33), (128, 64), (1, 1)])
def test_packed_rows_are_the_matrix(dtype, shape):
    weight = random(*shape, dtype=dtype)
    ids = torch.arange(shape[0]).flip(0)
    assert torch.equal(pack_dense(weight).rows(ids, dtype), weight[ids])
    assert torch.equal(pack_dense(random(shape[1], shape[0], dtype=dtype).t()).rows(ids, dtype),
                       random(shape[1], shape[0], dtype=dtype).t()[ids])  # fmt: skip


def formats(outputs: int, inputs: int, dtype: torch.dtype) -> list[PackedMatrix]:
    weight = random(outputs, inputs, dtype=dtype, seed=1)
    packed = [pack_dense(weight, random(outputs, dtype=dtype, seed=2))]
    return packed + [pack_quantised(*quantise(weight, fmt, 64), fmt, group=64) for fmt in ("int8", "int4")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (200, 333), (65, 1300)])
def test_a_row_has_the_same_bytes_in_any_company(kernels, threads, dtype, outputs, inputs):
    x = random(230, inputs, dtype=dtype)
    for packed in formats(outputs, inputs, dtype):
        threads(1)
        alone = torch.cat([kernels.product(row[None], packed) for row in x])
        for count in (2, 3, 5, 6, 7, 8, 13, 97, 230):
            threads(1 + count % 3)
            index = torch.randperm(230, generator=torch.Generator().manual_seed(count))[:count]
            assert torch.equal(kernels.product(x[index], packed), alone[index]), (packed.format, count)


@pytest.mark.parametrize("act", ["silu_mul", "clipped_silu_mul"])
def test_fused_rows_have_the_same_bytes_in_any_company(kernels, act):
    x, residual = random(50, 160, dtype=torch.bfloat16), random(50, 64, dtype=torch.bfloat16, seed=4)
    norm = NormSpec(random(160, dtype=torch.bfloat16, seed=3), 1e-5)
    for packed in formats(128, 160, torch.bfloat16):
        whole = kernels.product(x, packed, norm=norm, act=act, residual=residual)
        apart = kernels.add(residual, kernels.activate(kernels.product(x, packed, norm=norm), act))
        assert (whole - apart).abs().max() <= 2e-2 * apart.abs().max(), "rounded once, not three times"
        for i in (0, 17, 49):
            one = kernels.product(x[i : i + 1], packed, norm=norm, act=act, residual=residual[i : i + 1])
            assert torch.equal(one, whole[i : i + 1])


def test_a_changed_or_replaced_weight_is_packed_again(kernels):
    weight, x = random(64, 32), random(3, 32)
    before = kernels.product(x, weight)
    weight.mul_(2)
    assert torch.equal(kernels.product(x, weight), before * 2)
    for seed in range(20):  # addresses are reused by the allocator
        fresh = random(64, 32, seed=seed)
        close(kernels.product(x, fresh), x.double() @ fresh.double().t(), torch.float32)
        del fresh
    assert len(kernels._packed) == 1


def test_weights_made_in_inference_mode(kernels):
    with torch.inference_mode():
        weight, x = random(64, 32), random(3, 32)
        close(kernels.product(x, weight), x.double() @ weight.double().t(), torch.float32)
        assert torch.equal(kernels.product(x, weight), kernels.product(x, weight))


def test_strided_rows_and_no_rows(kernels):
    wide, weight = random(8, 100), random(20, 40)
    close(kernels.product(wide[:, 10:50], weight), wide[:, 10:50].double() @ weight.double().t(), torch.float32)
    close(kernels.product(wide.t()[:40].t(), weight), wide[:, :40].double() @ weight.double().t(), torch.float32)
    assert kernels.product(random(0, 40), weight).shape == (0, 20)


def test_half_precision_falls_back_and_is_counted(kernels):
    x, weight = random(4, 40, dtype=torch.float16), random(20, 40, dtype=torch.float16)
    assert torch.equal(kernels.product(x, weight), REFERENCE.product(x, weight))
    assert kernels.counters()["linear"]["fallbacks"] == 1


def test_a_matrix_refuses_rows_of_another_width(kernels):
    with pytest.raises(ValueError, match="40 columns"):
        kernels.product(random(2, 30), random(20, 40))
    assert [group_size(300, groups) for groups in (10, 5, 4, 1)] == [32, 64, 96, 320]
    with pytest.raises(ValueError, match="scales a row"):
        group_size(100, 99)
