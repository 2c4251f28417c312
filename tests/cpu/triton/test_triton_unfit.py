"""A device that can hold no kernel at all: plain torch computes everything, counted and said once."""

from __future__ import annotations

import logging

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.cpu.triton.test_triton_attention import STEPS, both, make_spec, rope  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from tokenmill.core.forward import NormSpec, RouteSpec  # noqa: E402
from tokenmill.kernels.reference import ReferenceKernels  # noqa: E402
from tokenmill.kernels.triton.kernels import TritonKernels  # noqa: E402
from tokenmill.quant.grid import GridWeight  # noqa: E402

REFERENCE = ReferenceKernels()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    def run(self: object, *args: object, **kwargs: object) -> None:
        raise OutOfResources(263168, 232448, "shared memory")

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return TritonKernels()


def test_attention_is_computed_all_the_same(kernels: TritonKernels) -> None:
    spec = make_spec(heads=4, kv_heads=2, rope=rope(16))
    for found, expected in both(spec, STEPS, kernels=kernels):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert kernels.counters()["attention"]["fallbacks"] >= len(STEPS)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_products_are_computed_all_the_same(kernels: TritonKernels, rows: int) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(96, 64)
    norm, residual = NormSpec(torch.rand(64), 1e-5), torch.randn(rows, 48)
    found = kernels.product(x, weight, norm=norm, act="silu_mul", residual=residual)
    expected = REFERENCE.product(x, weight, norm=norm, act="silu_mul", residual=residual)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_packed_weights_are_widened(kernels: TritonKernels, bits: int, rows: int) -> None:
    x = torch.randn(rows, 128)
    q = torch.randint(-8, 8, (32, 128), dtype=torch.int8)
    scales = torch.rand(32, 4).half()
    packed = kernels.pack(GridWeight(q, scales, bits=bits, group=32, dtype=torch.float32).stored())
    dense = q.float() * scales.float().repeat_interleave(32, 1)
    torch.testing.assert_close(kernels.product(x, packed), x @ dense.T, atol=1e-2, rtol=1e-3)


def test_rows_and_choices(kernels: TritonKernels, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tokenmill.kernels")
    logits = torch.randn(3, 50)
    for _ in range(2):
        assert torch.equal(kernels.greedy(logits)[0], logits.argmax(-1))
    spec = RouteSpec(experts=8, top_k=2)
    ids, gates = kernels.route(torch.randn(4, 8), spec)
    assert ids.shape == gates.shape == (4, 2)
    x = torch.randn(2, 32)
    torch.testing.assert_close(kernels.activate(x, "silu_mul"), REFERENCE.activate(x, "silu_mul"))
    said = [r.message for r in caplog.records if "greedy" in r.message]
    assert len(said) == 1, "once, not at every call"
    assert "263168" in said[0]
    assert kernels.counters()["greedy"]["fallbacks"] == 2
