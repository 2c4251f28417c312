"""Rows in bfloat16 times a float32 matrix, in the interpreter: as exact as float32."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.triton.products.parted import multiplies_parted, multiply_parted


@pytest.mark.parametrize(("tokens", "inner", "width"), [(64, 200, 40), (130, 96, 64), (65, 256, 100)])
def test_as_exact_as_float32(tokens, inner, width):
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, inner + 3).bfloat16()[:, :inner], torch.randn(width, inner)
    weight[0] *= 1e4
    found, exact = multiply_parted(x, weight, pdl=False), x.double() @ weight.double().T
    assert multiplies_parted(x, weight) and found.dtype == torch.float32
    error, plain = ((y - exact).norm(dim=0) / exact.norm(dim=0) for y in (found, x.float() @ weight.T))
    assert bool((error < 2e-6).all()) and bool((error < 4 * plain + 1e-7).all())


def test_what_others_multiply():
    """Few rows, and numbers of which three in bfloat16 are not the sum."""
    x, weight = torch.randn(80, 32).bfloat16(), torch.randn(16, 32)
    assert not multiplies_parted(x[:8], weight)
    assert not multiplies_parted(x.half(), weight) and not multiplies_parted(x, weight.bfloat16())
