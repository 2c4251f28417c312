"""What test_triton_narrow.py and other tests share."""

from __future__ import annotations

import torch

from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()


def relative(found, expected):
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def exact(x, weight, norm, act, residual):
    dense = weight.rows(torch.arange(weight.shape[0]), torch.float32)
    return REFERENCE.product(x, dense, weight.bias, norm=norm, act=act, residual=residual)


def met(words: torch.Tensor, kind: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a weight of this kind meets of a row that was spread, and the largest error of each number, both [K]."""
    first, second, last = words.view(3, -1)
    last = last.view(torch.float32)[:, None]
    if kind == 0:
        halves = torch.stack((first, second), 1).view(torch.float16).float() * last
        return halves.flatten()[:columns], (last.expand(-1, 4) * 2**-11).flatten()[:columns]
    if kind == 1:
        numbers = first.contiguous().view(torch.int8).view(-1, 4) * last
        return numbers.flatten()[:columns], (last.expand(-1, 4) / 2).flatten()[:columns]
    # A word has two neighbours of four planes of 32 columns; bytes of the first half are those of planes 0 2 0 2.
    even, odd = (half.contiguous().view(torch.int8).view(-1, 16, 2, 2) for half in (first, second))
    planes = torch.stack((even[..., 0], odd[..., 0], even[..., 1], odd[..., 1]), 1)
    steps = last.view(-1, 1, 16, 1).expand(-1, 4, -1, 2)
    return (planes * steps).flatten()[:columns], (steps / 2).flatten()[:columns]
