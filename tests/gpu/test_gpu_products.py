"""Products of many rows through the copy engine (Hopper) against float64: every fusion, full tiles and tails."""

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
