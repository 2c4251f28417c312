"""What the tests of kernels on a GPU share."""

from __future__ import annotations

import torch


def triton_kernels(**options):
    from tokenmill.kernels.triton import TritonKernels

    return TritonKernels(**options)


def rand(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def relative(found, expected):
    assert found.shape == expected.shape
    assert torch.isfinite(found.float()).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())
