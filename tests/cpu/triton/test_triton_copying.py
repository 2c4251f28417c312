"""Rows of many tensors copied in one launch, in the interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmill.compute.descriptors import StateSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kvcache.states import StatePool

SPECS = {
    "delta": StateSpec((("bfloat16", (3, 40)), ("float32", (2, 8, 16)))),
    "odd": StateSpec((("float16", (1, 7)), ("float32", (5, 3)))),
    "wide": StateSpec((("float32", (70, 64)),)),
}


def random_pool(kind: str, kernels: ReferenceKernels, slots: int) -> StatePool:
    """Three layers of that kind and one of another, filled from the same seed each time."""
    generator = torch.Generator().manual_seed(7)
    pool = StatePool((SPECS[kind], SPECS["delta"], SPECS[kind]), 6, slots, "cpu", kernels.copy_rows_, trail=4)
    for part in parts(pool):
        part.copy_(torch.randn(part.shape, generator=generator))
    return pool


def parts(pool: StatePool) -> list[Tensor]:
    """All tensors."""
    return [part for layer in (*pool.views, *pool.kept) for part in layer]


@pytest.mark.parametrize("kind", SPECS)
def test_states_are_kept_restored_and_moved(kind: str) -> None:
    kernels = TritonKernels()
    found, wanted = (random_pool(kind, each, 5) for each in (kernels, ReferenceKernels()))
    for pool in (found, wanted):
        pool.keep(torch.tensor([2, 0]), torch.tensor([4, 1]))
        pool.restore(torch.tensor([4, 0, 1]), torch.tensor([3, 5, 1]))
        pool.move(torch.tensor([8, 0, 10]), torch.tensor([4, 0, 2]))  # row 0 stays where it is
        pool.keep(torch.tensor([7, 3]), torch.tensor([2, pool.nowhere]))
        pool.keep(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
        pool.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(parts(found), parts(wanted), strict=True))
    assert kernels.counters()["copy_rows_"] == {"calls": 6, "fallbacks": 0}, "what is empty counts, too"


def test_pools_do_not_share_addresses() -> None:
    """A second pool may get the lists' places in memory of one that is gone."""
    kernels = TritonKernels()
    for _ in range(4):
        pool = random_pool("odd", kernels, 2)
        pool.keep(torch.tensor([1]), torch.tensor([0]))
        for kept, own in zip(pool.kept, pool.views, strict=True):
            assert all(torch.equal(a[0], b[1]) for a, b in zip(kept, own, strict=True))
        del pool
