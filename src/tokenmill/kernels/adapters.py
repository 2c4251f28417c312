"""What adapters do to products, in plain torch: the specification (compute/adapters.py has the formula).

Tokens are processed adapter by adapter. A row's sums are those of row_stable.py, so its bytes do not depend on the
adapters of the rows beside it. Must not know: how adapters got into their slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels import row_stable


def adapt(x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor:
    """x [T, in], slots [T] -> [T, lanes] float32; zeros behind an adapter's own lanes."""
    assert site.down is not None
    low = x.new_zeros(x.shape[0], site.down.shape[2], dtype=torch.float32)
    for slot, at, rank in _adapted(site, slots):
        lanes = site.parts * rank
        low[at, :lanes] = row_stable.linear(x[at].float(), site.down[slot, :, :lanes].t().float().contiguous())
    return low


def add_delta(y: Tensor, delta: Delta) -> Tensor:
    """y [T, N] with what the adapters add, in y's type."""
    site, slots = delta.site, delta.slots
    out = y.clone()
    for slot, at in _slots(slots):
        wide = y[at].float()
        if site.gains is not None and site.shifts is not None:
            wide = wide * site.gains[slot] + site.shifts[slot]
        rank = site.host_ranks[slot]
        if rank:
            assert delta.low is not None
            up = carry_up(delta.low[at], site, slot, rank)
            wide = wide + (up if delta.scale == 1.0 else delta.scale * up)
        elif site.gains is None:
            continue
        out[at] = wide.to(y.dtype)
    return out


def addends(delta: Delta) -> tuple[Tensor | None, Tensor]:
    """What a product is multiplied by (None: by nothing) and what is added to it [T, N] in float32; where a row has no
    adapter that is 1 and -0, which change no number."""
    site, slots = delta.site, delta.slots
    add = torch.full((len(slots), site.columns), -0.0, device=slots.device)
    gain = None if site.gains is None else torch.ones_like(add)
    for slot, at in _slots(slots):
        rank = site.host_ranks[slot]
        if rank:
            assert delta.low is not None
            add[at] = carry_up(delta.low[at], site, slot, rank)
        if gain is not None and site.gains is not None and site.shifts is not None:
            add[at] += site.shifts[slot]
            gain[at] = site.gains[slot]
    return gain, add


def carry_up(low: Tensor, site: AdapterSite, slot: int, rank: int) -> Tensor:
    """up @ low of one adapter: low [n, lanes] -> [n, N] float32."""
    assert site.up is not None
    parts = []
    for part, (start, stop) in enumerate(zip(site.borders, site.borders[1:], strict=False)):
        own = low[:, part * rank : (part + 1) * rank].contiguous()
        parts.append(row_stable.linear(own, site.up[slot, :rank, start:stop].t().float().contiguous()))
    return torch.cat(parts, dim=1)


def take_rows(ids: Tensor, site: AdapterSite, slots: Tensor) -> Tensor:
    """ids [T] of a table of embeddings, slots [T] -> rows of `down` [T, lanes] float32, as `adapt` gives them."""
    assert site.down is not None
    low = torch.zeros(len(ids), site.down.shape[2], device=ids.device)
    for slot, at, rank in _adapted(site, slots):
        low[at, :rank] = site.down[slot, ids[at], :rank].float()
    return low


def _slots(slots: Tensor) -> Iterator[tuple[int, Tensor]]:
    for slot in torch.unique(slots).tolist():
        if slot > 0:
            yield slot, torch.where(slots == slot)[0]


def _adapted(site: AdapterSite, slots: Tensor) -> Iterator[tuple[int, Tensor, int]]:
    for slot, at in _slots(slots):
        if site.host_ranks[slot]:
            yield slot, at, site.host_ranks[slot]
