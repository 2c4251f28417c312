"""Scales near the ends of their range: each backend's numbers are the file's, or the file is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.quant.stored_forms_helpers import read, tensors_config
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.kernels.grid import FP4
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.detect import from_dense
from tokenmill.quant.grid import Unrounded
from tokenmill.quant.schemes import AT_LOAD, FP8

ROWS, COLUMNS = 70, 64


def codes() -> tuple[Tensor, Tensor]:
    raw = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return raw, torch.tensor(FP4, dtype=torch.float64)[torch.stack([raw & 15, raw >> 4], -1).flatten(1).int()]


def powers(*bytes_: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """MXFP4 with these scale bytes in turn."""
    raw, values = codes()
    found = torch.tensor(bytes_, dtype=torch.uint8).repeat(ROWS * COLUMNS // 32)[: ROWS * COLUMNS // 32].view(ROWS, -1)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    dense = values * (2.0 ** (found.double() - 127)).repeat_interleave(32, 1)
    return {"weight_packed": raw, "weight_scale": found}, dense, tensors_config("mxfp4-pack-quantized", weights)


def floats(byte: int, whole: float) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """NVFP4 with this scale everywhere, divided by `whole`."""
    raw, values = codes()
    scales = torch.full((ROWS, COLUMNS // 16), byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"weight_packed": raw, "weight_scale": scales, "weight_global_scale": torch.tensor([whole])}
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    dense = values * scales.double().repeat_interleave(16, 1) / whole
    return tensors, dense, tensors_config("nvfp4-pack-quantized", weights)


GOOD = {
    **{f"2^{byte - 127}": powers(byte) for byte in (0, 1, 37, 100, 127, 140, 217, 252)},
    "all of them": powers(*range(40, 215, 7)),
    **{f"{byte:#x} / {whole}": floats(byte, whole) for byte, whole in
       ((1, 1.0), (0x7E, 1.0), (0xB8, 1.0), (0, 1.0), (0x38, 1e-30), (0x38, 1e30), (0x38, 3e38), (1, 1e30))},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("reference", [True, False])
def test_numbers_are_those_of_the_file(name: str, reference: bool) -> None:
    tensors, dense, config = GOOD[name]
    kernels: Any = ReferenceKernels() if reference else make_kernels("cpu")
    most = dense.abs().max().clamp(min=1e-300)
    weight = read(tensors, config, (ROWS, COLUMNS))
    assert (weight.dense() - dense).abs().max() <= 1e-6 * most
    settled = weight.settle(kernels)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1)) * min(1.0, 1e30 / float(most))
    y = settled.matmul(x, SimpleNamespace(kernels=kernels)).double()
    wanted = x.double() @ dense.T
    assert (settled.rows(torch.arange(ROWS)) - dense).abs().max() <= 0.005 * most
    assert (y - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (powers(127, 255), "are not numbers"), (powers(100, 253), "exceed float32's range"),
        (floats(0x7F, 1.0), "are not numbers"), (floats(0x38, 1e-38), "exceed float32's range"),
        (floats(0x38, 1e-40), "exceed float32's range"), (floats(0x38, 0.0), "must be one positive number"),
        (floats(0x38, float("inf")), "must be one positive number"),
    ],
)  # fmt: skip
def test_what_float32_cannot_hold_is_refused(made: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(made[0], made[2], (ROWS, COLUMNS))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e9])
def test_a_matrix_rounded_at_load_is_kept_where_half_precision_cannot_hold_its_scales(bits: int, size: float) -> None:
    dense = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) * size
    for kernels in (ReferenceKernels(), make_kernels("cpu")):
        settled = Unrounded(dense, None, bits, 32).settle(kernels)
        assert isinstance(settled, DenseWeight) == (size != 1e-3)
        found = settled.rows(torch.arange(ROWS))
        assert (found - dense).abs().max() <= dense.abs().max() / (120 if bits == 8 else 7)


@pytest.mark.parametrize("scheme", [FP8, *AT_LOAD])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_integers_do_not_hide_numbers_that_are_not_finite(scheme: str, bad: float) -> None:
    """A damaged weight shows in what a model says, rounded at load or not."""
    dense = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    dense[3, 5] = bad
    for kernels in (ReferenceKernels(), make_kernels("cpu")):
        settled = from_dense(dense.clone(), None, scheme, torch.float32).settle(kernels)
        found = settled.rows(torch.arange(64))
        assert not bool(found[3].isfinite().all()) and bool(found[4:].isfinite().all())
