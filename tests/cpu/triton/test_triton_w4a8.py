"""4 bit weights whose activations may be rounded: in steps of many rows both become 8 bits."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.triton.triton_narrow_helpers import REFERENCE, relative

from tokenmill.compute.forward import NormSpec
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.quantised import narrow, narrow_linear
from tokenmill.kernels.triton.quantised.narrow_round import as_float8
from tokenmill.quant.compressed import rounds_inputs
from tokenmill.quant.detect import from_dense
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.schemes import head_scheme


@pytest.fixture(autouse=True)
def _float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that multiplies float8, from five rows on."""
    monkeypatch.setattr(narrow, "has_fp8", lambda: True)
    monkeypatch.setattr(narrow_linear, "_SOME_ROUNDED", 4)


def grid(rows: int, columns: int, *, group: int = 64, zeros: bool = False, rounds: bool = True) -> GridWeight:
    """A random weight; the scales of its rows lie far apart, and one row has none."""
    scales = (torch.rand(rows, columns // group) + 0.5) * 2.0 ** torch.randint(-8, 3, (rows, 1))
    scales[1] = 0.0
    points = torch.randint(-8, 8, scales.shape, dtype=torch.int8) if zeros else None
    q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
    made = GridWeight(q, scales.half(), bits=4, group=group, dtype=torch.float32, bias=torch.randn(rows), zeros=points)
    made.rounds_inputs = rounds
    return made


@pytest.mark.parametrize("zeros", [False, True])
def test_in_float8_each_number_keeps_three_digits_of_its_own(zeros: bool) -> None:
    weight = grid(40, 256, zeros=zeros)
    packed = TritonKernels().pack(weight.stored())
    assert packed is not None and packed.row_steps is not None
    dense, eight = weight.dense(), as_float8(packed, pdl=False)
    found = eight.rows(torch.arange(40), torch.float32)
    assert bool(torch.isfinite(found).all()) and not bool(found[1].any())
    smallest = packed.row_steps[:, None] * 2.0**-10  # below that float8 has no digits
    assert bool(((found - dense).abs() <= dense.abs() / 16 + smallest).all())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("act", "fused"), [(None, True), ("silu_mul", False)])
def test_many_rows_meet_it_in_8_bits_and_few_in_4(zeros: bool, act: str | None, fused: bool) -> None:
    kernels, weight = TritonKernels(), grid(64, 256, zeros=zeros)
    packed, dense = kernels.pack(weight.stored()), weight.dense()
    norm = NormSpec(torch.rand(256) + 0.5, 1e-5) if fused else None
    for rows, limit in ((1, 0.02), (3, 0.02), (9, 0.06)):
        x = torch.randn(rows, 256)
        residual = torch.randn(rows, 64) if fused else None
        exact = REFERENCE.product(x, dense, weight.bias, norm=norm, act=act, residual=residual)
        lost = relative(kernels.product(x, packed, norm=norm, act=act, residual=residual), exact)
        assert lost < limit * (2 if act else 1) and (rows < 9 or lost > 1e-3)


def test_other_weights_keep_their_activations() -> None:
    kernels, x = TritonKernels(), torch.randn(9, 256)
    weight = grid(64, 256, rounds=False)
    assert kernels.pack(weight.stored()).row_steps is None
    assert relative(kernels.product(x, kernels.pack(weight.stored())), x @ weight.dense().T + weight.bias) < 1e-2


def test_a_device_without_float8_does_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "has_fp8", lambda: False)
    assert TritonKernels().pack(grid(8, 128).stored()).row_steps is None


def test_parts_stay_so() -> None:
    one, plain = grid(8, 256), grid(8, 256, rounds=False)
    parts = (
        one.join([one]),
        one.split(0, 1, 2),
        one.split(1, 1, 4),
        one.take(torch.tensor([3, 1])),
        one.to(torch.device("cpu")),
    )
    assert all(part is not None and part.rounds_inputs for part in parts)
    assert one.join([plain]) is None


def test_the_scheme() -> None:
    kernels = TritonKernels()
    made = from_dense(torch.randn(64, 256), None, "w4a8")
    joined = made.join([from_dense(torch.randn(64, 256), None, "w4a8")])
    assert joined is not None and joined.settle(kernels).packed.row_steps.shape == (128,)
    assert made.join([from_dense(torch.randn(64, 256), None, "int4-g128")]) is None
    assert head_scheme("w4a8") == "int8"


@pytest.mark.parametrize(
    ("inputs", "rounds"),
    [
        ([{"num_bits": 8, "type": "int", "dynamic": True}], True),
        ([{"num_bits": 8, "type": "float", "dynamic": False}], True),
        ([None], False),
        ([{"num_bits": 16}], False),
        ([{"num_bits": 8}, None], False),
        ([], False),
    ],
)
def test_files_say_so(inputs: list[object], rounds: bool) -> None:
    groups = {f"group_{n}": {"weights": {"num_bits": 4}, "input_activations": each} for n, each in enumerate(inputs)}
    assert rounds_inputs({"config_groups": groups}) is rounds
    assert not rounds_inputs({}) and not rounds_inputs({"config_groups": None})
