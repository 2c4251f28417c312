"""Adapters on csrc. Owns: the addresses of each product's slots, bound once, and of what adapters add to a product.

A result of None means that csrc does not do it, and plain torch does. Must not know: models.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels.cpu.packed import TYPES

Addends = tuple[Tensor | None, Tensor]
"""What a product and its bias are multiplied by (None: nothing), and what is added: [T, N] float32."""


_LARGE = 4 << 20
"""Numbers from which on the system would give and take back the pages of a new tensor each time."""


class BoundSites:
    """The native form of every product that adapters change."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[weakref.ref[AdapterSite], tuple[int, ...], Any, list[Tensor]]] = {}
        self._room = torch.empty(0, dtype=torch.float32)
        self._lent: weakref.ref[Tensor] | None = None
        """The tensor that lies in the room, as long as somebody has it."""

    def values(self) -> list[object]:
        """What recordings must keep alive."""
        return list(self.made.values())

    def clear(self) -> None:
        """Forget all."""
        self.made.clear()
        self._room = torch.empty(0, dtype=torch.float32)

    def shrink(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor | None:
        """down @ x of each token's adapter [T, lanes]."""
        kind, native = TYPES.get(x.dtype), self._bind(site)
        if kind is None or native is None or x.ndim != 2 or slots.dtype != torch.int32 or not slots.is_contiguous():
            return None
        if x.stride(1) != 1:
            x = x.contiguous()
        assert site.down is not None
        low = torch.empty((x.shape[0], site.down.shape[2]), dtype=torch.float32)
        native.shrink(x.data_ptr(), x.stride(0), kind, (slots.data_ptr(), x.shape[0]), low.data_ptr())
        return low

    def expand(self, delta: Delta) -> Addends | None:
        """What adapters multiply by and add, for every token."""
        site, low = delta.site, delta.low
        assert low is not None
        native = self._bind(site)
        if native is None:
            return None
        add = self._floats(low.shape[0], site.columns)
        gain = None if site.gains is None else torch.empty_like(add)
        whose = delta.slots.data_ptr(), low.shape[0]
        native.expand(low.data_ptr(), whose, add.data_ptr(), 0 if gain is None else gain.data_ptr())
        return gain, add

    def _floats(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] float32, undefined. A large one lies in a room that is kept for the next."""
        size = rows * columns
        if size < _LARGE or (self._lent is not None and self._lent() is not None):
            return torch.empty((rows, columns), dtype=torch.float32)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.float32)
        found = self._room[:size].view(rows, columns)
        self._lent = weakref.ref(found)
        return found

    def _bind(self, site: AdapterSite) -> Any | None:
        down, up, ranks = site.down, site.up, site.ranks
        if down is None or up is None or ranks is None or down.dtype not in TYPES or down.device.type != "cpu":
            return None
        tensors = [down, up, ranks, *(t for t in (site.gains, site.shifts) if t is not None)]
        key = tuple(t.data_ptr() for t in tensors)
        found = self.made.get(id(site))
        if found is not None and found[0]() is site and found[1] == key:
            return found[2]
        addresses = (*key, *(0,) * (5 - len(key)))
        slots, _, lanes = down.shape
        kind = TYPES[down.dtype]
        native = _native.Site(addresses, list(site.borders), site.inputs, lanes, up.shape[1], slots, kind)
        self.made[id(site)] = (weakref.ref(site), key, native, tensors)
        return native
