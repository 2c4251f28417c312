"""Products with adapters by csrc: against plain torch, and each token alone."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels import make_kernels
from tokenmill.kernels.cpu.adapters import BoundSites
from tokenmill.kernels.reference import ReferenceKernels


def site_of(inputs: int, widths: list[int], dtype: torch.dtype) -> AdapterSite:
    """Five slots; the third is empty, as is the first."""
    made = torch.Generator().manual_seed(inputs)
    site, ranks = AdapterSite(inputs, (0, *accumulate(widths))), [0, 16, 0, 3, 8]
    site.down = (torch.randn(5, inputs, -(-len(widths) * 16 // 16) * 16, generator=made) * 0.1).to(dtype)
    site.up = (torch.randn(5, 16, sum(widths), generator=made) * 0.1).to(dtype)
    site.host_ranks, site.ranks = ranks, torch.tensor(ranks, dtype=torch.int32)
    return site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [[136], [64, 40, 40], [75, 75]], ids=str)
@pytest.mark.parametrize("inputs", [96, 33])
def test_like_plain_torch_and_alone(inputs, widths, dtype):
    """Neighbours of one adapter are multiplied together, which must not show."""
    kernels, plain, site = make_kernels("cpu"), ReferenceKernels(), site_of(inputs, widths, dtype)
    slots = torch.tensor([1, 1, 1, 3, 3, 0, 4, 1, 1, 2, 2, 4, 4, 4, 0], dtype=torch.int32)
    x, nothing = torch.randn(len(slots), inputs).to(dtype), torch.zeros(sum(widths), inputs, dtype=dtype)

    def added(rows: slice) -> torch.Tensor:
        low = kernels.adapt(x[rows], site, slots[rows])
        return kernels.product(x[rows], nothing, delta=Delta(site, x[rows], low, slots[rows])).float()

    every = added(slice(None))
    wide = Delta(site, x.float(), plain.adapt(x.float(), site, slots), slots)
    expected = plain.add_delta(torch.zeros(len(slots), sum(widths)), wide)
    assert torch.allclose(every, expected, rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)
    assert kernels.counters()["adapt"]["fallbacks"] == kernels.counters()["add_delta"]["fallbacks"] == 0
    for at in range(len(slots)):
        assert torch.equal(added(slice(at, at + 1))[0], every[at])
    assert torch.equal(added(slice(1, 9)), every[1:9])


def test_large_addends_share_a_room_but_not_at_once():
    site, bound, tokens = site_of(8, [16384], torch.float32), BoundSites(), 300
    slots = torch.full((tokens,), 1, dtype=torch.int32)
    low = torch.ones(tokens, 16)
    found = bound.expand(Delta(site, low, low, slots))
    assert found is not None and torch.allclose(found[1][7], site.up[1].sum(0), atol=1e-4)
    first, place = found[1].clone(), found[1].data_ptr()
    second = bound.expand(Delta(site, low, 2 * low, slots))
    assert second is not None and second[1].data_ptr() != place and torch.equal(found[1], first)
    del found
    third = bound.expand(Delta(site, low, low, slots))
    assert third is not None and third[1].data_ptr() == place and torch.equal(third[1], first)
