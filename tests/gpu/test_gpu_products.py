"""Products through the copy engine (Hopper) against float64, of many rows and of few: every fusion, tails, parts."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
SHAPES = [
    (512, 256, "none"),
    (768, 4096, "residual"),
    (1024, 1024, "gated"),
    (640, 4096, "residual"),
    (384, 192, "gated"),
    (4096, 14336, "none"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 100, 128, 200, 512, 1111, 2500])
def test_wide(rows, shape):
    from tokenmill.kernels.triton.products.wide import wide

    out, inner, what = shape
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(out, inner, device="cuda") * inner**-0.5).bfloat16()
    residual = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16) if what == "residual" else None
    wanted = x.double() @ weight.double().t()
    if what == "gated":
        gate, up = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
    if residual is not None:
        wanted = wanted + residual.double()
    y = wide(x, weight, residual, gated=what == "gated")
    assert ((y.double() - wanted).norm() / wanted.norm()).item() < 5e-3


def test_rows_are_what_they_are_alone():
    """K is never cut, so a row's bytes do not depend on the rows beside it."""
    from tokenmill.kernels.triton.products.wide import wide

    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
    together = wide(x, weight, None, gated=False)
    assert torch.equal(together[170:], wide(x[170:], weight, None, gated=False))


def few(rows, out, inner, dtype=torch.bfloat16, seed=0):
    """x, weight, bias and what they make in float64, before an activation."""
    make = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, inner, device="cuda", generator=make).to(dtype)
    weight = (torch.randn(out, inner, device="cuda", generator=make) * inner**-0.5).to(dtype)
    bias = torch.randn(out, device="cuda", generator=make).to(dtype)
    return x, weight, bias, x.double() @ weight.double().t()


def off(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "cut",
    [(64, 64, 1, 12), (64, 48, 1, 2), (64, 16, 1, 13), (128, 128, 1, 8), (128, 80, 1, 3), (128, 128, 4, 8),
     (128, 112, 7, 4), (64, 64, 3, 5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 1448), (1000, 4096), (72, 64), (9000, 200)], ids=str)
def test_stream(shape, cut, dtype):
    from tokenmill.kernels.triton.products.stream import stream

    for rows in (1, 2, 5, 16, 17, 32, 40, 64):
        x, weight, bias, wanted = few(rows, *shape, dtype, seed=rows)
        residual = torch.randn_like(wanted).to(dtype)
        if cut[2] > 1:
            for each in (None, bias):
                parts = stream(x, weight, each, None, None, pdl=True, cut=cut)
                assert parts.shape == (cut[2], *wanted.shape) and parts.dtype == torch.float32
                assert off(parts.sum(0), wanted if each is None else wanted + bias.double()) < 1e-5
            continue
        for act, each, beside in ((None, None, None), (None, bias, residual), ("gelu_tanh", bias, None)):
            exact = wanted if each is None else wanted + each.double()
            exact = exact if act is None else torch.nn.functional.gelu(exact, approximate="tanh")
            exact = exact if beside is None else exact + beside.double()
            found = stream(x, weight, each, act, beside, pdl=True, cut=cut)
            assert off(found, exact) < 4e-3
            assert torch.equal(found, stream(x, weight, each, act, beside, pdl=False, cut=cut))


@pytest.mark.parametrize("act", ["silu_mul", "gelu_tanh_mul", "oai_swiglu"])
@pytest.mark.parametrize(
    "cut", [(64, 32, 1, 12), (64, 16, 1, 9), (128, 64, 1, 8), (128, 48, 1, 3), (256, 112, 1, 5)], ids=str
)
@pytest.mark.parametrize("shape", [(28672, 4096), (2 * 4864, 896), (2 * 88, 4096), (2 * 1000, 200)], ids=str)
def test_gated_stream(shape, cut, act):
    from tokenmill.kernels.reference import ReferenceKernels
    from tokenmill.kernels.triton.products.stream import stream

    for rows in (2, 16, 31, 64):
        x, weight, bias, wanted = few(rows, *shape, seed=rows)
        for each in (None, bias):
            exact = ReferenceKernels().activate((wanted if each is None else wanted + each.double()).float(), act)
            assert off(stream(x, weight, each, act, None, pdl=True, cut=cut), exact.double()) < 5e-3


def test_stream_takes_rows_that_are_no_whole_lines():
    from tokenmill.kernels.triton.products.stream import stream

    x, weight, _, wanted = few(8, 512, 256)
    for wide, at in ((260, 0), (272, 1)):
        rows = torch.zeros(8, wide, device="cuda", dtype=x.dtype)[:, at : at + 256].copy_(x)
        assert off(stream(rows, weight, None, None, None, pdl=True, cut=(64, 64, 1, 4)), wanted) < 4e-3


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65])
def test_products_leave_parts_that_the_next_norm_adds_up(rows):
    from tokenmill.compute.forward import NormSpec
    from tokenmill.kernels.triton.kernels import TritonKernels

    kernels, plain = TritonKernels(), TritonKernels(without=("few-rows",))
    x, weight, bias, wanted = few(rows, 4096, 4096)
    residual = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    norm = NormSpec(torch.randn(4096, device="cuda", dtype=torch.bfloat16), 1e-5)
    parts = kernels.open_product(x, weight, bias, None)
    assert plain.open_product(x, weight, bias, None) is None
    if not 1 < rows <= 64:
        assert parts is None
        return
    whole = residual.double() + wanted + bias.double()
    total, normed = kernels.add_norm(residual, parts, norm)
    assert off(total, whole) < 3e-3 and torch.equal(normed, kernels.norm(total, norm))
    assert torch.equal(kernels.add(residual, parts), total)
    assert off(plain.product(x, weight, bias, residual=residual), whole) < 3e-3
    assert off(kernels.product(x, weight, bias, residual=residual), whole) < 3e-3
