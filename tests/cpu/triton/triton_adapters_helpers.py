"""What test_triton_adapters.py and other tests share."""

from __future__ import annotations

from itertools import accumulate

import torch

from tokenmill.compute.adapters import AdapterSite


def make_site(widths: list[int], inputs: int, ranks: list[int], *, gains: bool, seed: int = 0) -> AdapterSite:
    """A product of these parts, with adapters of these ranks in slots 1, 2, ..."""
    made, most, columns = torch.Generator().manual_seed(seed), max(ranks), sum(widths)
    site = AdapterSite(inputs, (0, *accumulate(widths)))
    lanes = -(-len(widths) * most // 16) * 16
    site.down = torch.randn(len(ranks) + 1, inputs, lanes, generator=made)
    site.up = torch.randn(len(ranks) + 1, most, columns, generator=made)
    site.host_ranks = [0, *ranks]
    site.ranks = torch.tensor(site.host_ranks, dtype=torch.int32)
    if gains:
        site.gains = torch.rand(len(ranks) + 1, columns, generator=made)
        site.shifts = torch.randn(len(ranks) + 1, columns, generator=made)
    return site
