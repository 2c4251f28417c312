"""2:4 matrices where they meet the rest: rows that recorded steps read, types that no kernel multiplies, other GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.experts import mixture
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.pruned import layout, library
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix, pack_pruned
from tokenmill.quant.dense import DenseWeight


class Copies(TorchDispatchMode):
    """Notes copies to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None:
            self.found.append(kwargs["device"])
        return func(*args, **(kwargs or {}))


def packed(dtype: torch.dtype, rows: int = 64, columns: int = 256) -> tuple[PrunedMatrix, torch.Tensor]:
    numbers = torch.randn(rows, columns // 4, 4)
    numbers = numbers.scatter(2, torch.rand(numbers.shape).topk(2, 2).indices, 0.0).flatten(1).to(dtype)
    parts = (("numbers", numbers),)
    if dtype.itemsize == 1:
        parts = (("codes", numbers), ("scales", torch.ones(rows, 1)))
    kind = "fp8" if dtype.itemsize == 1 else "dense"
    made = pack_pruned(StoredMatrix(kind, (rows, columns), parts, numbers.float))
    assert made is not None
    return made, numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_an_embedding_need_nothing_from_the_host(dtype: torch.dtype) -> None:
    """Steps that read rows are recorded: nothing is copied to the device then."""
    matrix, _ = packed(dtype)
    away = {name: getattr(matrix, name) for name in ("stored", "places", "scales")}
    away = {name: None if part is None else part.to("meta") for name, part in away.items()}
    distant, ids = replace(matrix, **away), torch.empty(3, dtype=torch.int64, device="meta")
    with Copies() as copies:
        assert distant.rows(ids, torch.bfloat16).shape == (3, 256)
    assert not copies.found


@pytest.mark.parametrize("small", [False, True])
def test_every_place_is_found(small: bool) -> None:
    """In the order of sparse tensor cores: each bit field of a block's words is of this row and this four."""
    place, field = torch.arange(64 if small else 32)[:, None], torch.arange(8)[None]
    row = place % 32 // 4 + 8 * (field // 4)
    four = (8 if small else 4) * (field % 4) + place // 32 * 4 + place % 4
    word, shift = layout._found(row, four, small=small)
    assert torch.equal(word, torch.arange(len(row))[:, None].expand(row.shape))
    assert torch.equal(shift, (4 * torch.arange(8))[None].expand(row.shape))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_of_another_type_meet_zeros_in_plain_torch(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Our kernels for few rows read weights while the launch that writes the zeros still runs."""
    matrix, numbers = packed(torch.float16)
    kernels = TritonKernels("cpu", pruned="packed")
    monkeypatch.setattr(kernels.ways, "of", lambda *given, **more: pytest.fail("a way was asked for"))
    x, norm = torch.randn(rows, 256), NormSpec(torch.rand(256) + 0.5, 1e-5)
    residual = torch.randn(rows, 64)
    found = kernels.product(x, matrix, norm=norm, residual=residual)
    wanted = ReferenceKernels().product(x, numbers.float(), norm=norm, residual=residual)
    assert found.dtype == torch.float32 and torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("around", [lambda w: w, lambda w: SimpleNamespace(parts=[SimpleNamespace(base=w)])])
def test_what_is_brought_near_is_what_is_read(monkeypatch: pytest.MonkeyPatch, around: Callable[[Any], Any]) -> None:
    """A mixture of one token has the next matrix brought near, at every step."""
    numbers = torch.eye(64).repeat(1, 4).bfloat16()
    pruned, full = (
        DenseWeight(table).settle(TritonKernels("cpu", pruned="packed")) for table in (numbers, numbers + 1)
    )
    assert mixture._read_next(full) is full.table  # type: ignore[attr-defined]
    monkeypatch.setattr(PrunedMatrix, "pieces", lambda self: pytest.fail("its zeros were put back"))
    assert mixture._read_next(around(pruned)) is pruned.packed.stored  # type: ignore[attr-defined]


def test_algorithms_are_named_where_they_were_measured() -> None:
    for dtype, steps in library.FASTEST.items():
        for rows, way in steps:
            assert library._way(dtype, max(1, rows), 801, (9, 0)) == way
            assert library._way(dtype, rows, 801, (8, 0)) == library._way(dtype, rows, 900, (9, 0)) == 0
