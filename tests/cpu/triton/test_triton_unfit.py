"""A device that can hold no kernel at all: plain torch computes everything, counted and said once."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.cpu.triton.triton_adapters_helpers import make_site
from tests.cpu.triton.triton_attention_helpers import STEPS, both, make_spec, rope
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.interpreter import InterpretedFunction

from tokenmill.compute.adapters import Delta
from tokenmill.compute.forward import NormSpec, RouteSpec, StoredMatrix
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.quant.grid import GridWeight

REFERENCE = ReferenceKernels()


def failing(kind: str) -> Exception:
    """What Triton raises where a device or a compiler cannot."""
    if kind == "resources":
        return OutOfResources(263168, 232448, "shared memory")
    if kind == "assembler":
        return PTXASError("ptxas failed with error code 255")
    if kind == "frontend":
        return CompilationError("def kernel(): ...", None, "unsupported type")
    return RuntimeError("PassManager::run failed")


@pytest.fixture(params=["resources", "assembler", "frontend", "lowering"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonKernels:
    def run(self: object, *args: object, **kwargs: object) -> None:
        raise failing(request.param)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return TritonKernels()


def seeded(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> list[str]:
    """Kernels whose names hold this cannot be compiled; -> which were tried."""
    tried: list[str] = []
    run = InterpretedFunction.run

    def watched(self: InterpretedFunction, *args: object, **kwargs: object) -> object:
        if name in self.fn.__name__:
            tried.append(self.fn.__name__)
            raise error
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    return tried


def test_one_kernel_falls_back_alone_and_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = seeded(monkeypatch, "_norm_kernel", failing("lowering"))
    kernels, spec = TritonKernels(), NormSpec(torch.rand(64), 1e-5)
    for rows in (4, 5, 7, 4):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(kernels.norm(x, spec), REFERENCE.norm(x, spec))
        kernels.activate(x, "silu_mul")
    assert len(tried) == 1, "a failure takes seconds: it is remembered for calls of the kind"
    kernels.norm(torch.randn(9, 64), spec)
    assert len(tried) == 2, "another kind of call may have another kernel"
    counted = kernels.counters()
    assert counted["norm"]["fallbacks"] == 5
    assert counted["activate"]["fallbacks"] == 0


def test_products_that_do_not_compile_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = seeded(monkeypatch, "_thin_kernel", failing("assembler"))
    kernels, weight = TritonKernels(), torch.randn(96, 64)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(kernels.product(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)
    assert len(tried) == 1
    assert kernels.counters()["linear"]["fallbacks"] == 3
    torch.testing.assert_close(kernels.product(x[:1], weight), x[:1] @ weight.T, atol=1e-4, rtol=1e-4)
    assert kernels.counters()["linear"]["fallbacks"] == 3, "one row has another kernel"


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError, NotImplementedError])
def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch, kind: type[RuntimeError]) -> None:
    for name in ("_norm_kernel", "_thin_kernel"):
        seeded(monkeypatch, name, kind("CUDA out of memory, or an illegal memory access"))
    kernels, x = TritonKernels(), torch.randn(4, 64)
    with pytest.raises(kind, match="CUDA out of memory"):
        kernels.norm(x, NormSpec(torch.rand(64), 1e-5))
    with pytest.raises(kind, match="CUDA out of memory"):
        kernels.product(x, torch.randn(96, 64))
    assert not kernels.unfit, "the next call finds memory, perhaps"


def test_a_matrix_without_a_form_here_is_counted() -> None:
    """As fp8 on a GPU that has no such numbers: they are made at every call."""
    kernels, x, dense = TritonKernels(), torch.randn(2, 64), torch.randn(32, 64)
    matrix = StoredMatrix("some kind", (32, 64), (), lambda: dense)
    torch.testing.assert_close(kernels.product(x, matrix), x @ dense.T, atol=1e-4, rtol=1e-4)
    assert kernels.counters()["unpacked_product"]["fallbacks"] == 1


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
    assert "(" in said[0] and "plain torch computes it" in said[0]
    assert kernels.counters()["greedy"]["fallbacks"] == 2


def test_adapters_within_a_product_go_apart_where_that_kernel_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = seeded(monkeypatch, "_adapted_kernel", failing("resources"))
    site, kernels = make_site([64], 200, [4, 16], gains=True), TritonKernels()
    slots = torch.tensor([1, 0, 2, 1, 2], dtype=torch.int32)
    x, weight = torch.randn(5, 200), torch.randn(64, 200)
    found = []
    for each in (REFERENCE, kernels, kernels):
        delta = Delta(site, x, each.adapt(x, site, slots), slots)
        found.append(each.product(x, weight, act="gelu", residual=x[:, :64], delta=delta))
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=1e-4, atol=1e-3)
    assert tried == ["_adapted_kernel"], "it is tried once"
