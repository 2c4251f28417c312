"""Ranks on GPUs that add tensors up themselves. Owns: buffers that all devices see, and which sums go that way.

NCCL does the rest. Torch's symmetric memory gives the addresses; multicast is not touched. Must not know: layers.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.parallel.distributed import TorchGroup, World
from tokenmill.parallel.exchanged import Exchanges, Sent

log = logging.getLogger("tokenmill.engine")
Made = TypeVar("Made")
MOST = 1 << 23
"""How many elements the parts of a sum may have together: 16 MB, so 4 MB a part of four ranks. Every rank sends its
part to all others, so NCCL, which sends pieces around, is as fast from there on. Two ranks send no more than NCCL
does: they add up sums of any length."""
SLOT_OF_TWO = 1 << 24
"""How many elements two ranks add up in one launch."""
MOST_RANKS = 8
WIDEST = 1 << 14
"""How many elements a row may have that one program sums and norms."""


class PushGroup(TorchGroup):
    """A TorchGroup with a faster sum of 16-bit tensors, if all devices see each other's memory. exchanges: two ranks
    send long ones in pieces (exchanged.py)."""

    def __init__(self, world: World, *, pdl: bool, exchanges: bool) -> None:
        super().__init__(world)
        self.pdl = pdl
        self.slot = 0
        self.buffers: Tensor | None = None
        self.exchanges: Exchanges | None = None
        self._push: Any = importlib.import_module("tokenmill.kernels.triton.all_reduce")
        made = self._by_all(self._meet) if self.size <= MOST_RANKS else None
        if made is not None:
            self.memory, self.buffers = made
            self.adds_parts = True
            self.turns = torch.zeros(self.slot // self._push.BLOCK, dtype=torch.int32, device=self.device)
            if exchanges and self.size == 2:
                self.exchanges = self._by_all(lambda: Exchanges(self.rank, self.group, self.device, pdl=pdl))
        self.agree([0])  # from here on every rank's buffer is empty

    def _by_all(self, make: Callable[[], Made]) -> Made | None:
        """What every rank has made; None if one could not."""
        made = None
        try:
            made = make()
        except Exception as error:  # torch's interface is not stable yet; or devices have no link
            log.warning("sums go through NCCL: %s", error)
        return made if self.agree([made is not None])[0] else None

    def _meet(self) -> tuple[Any, Tensor]:
        """This rank's buffer with its handle, and the addresses of all ranks' buffers."""
        self.slot = SLOT_OF_TWO if self.size == 2 else MOST // self.size // self._push.BLOCK * self._push.BLOCK
        shared: Any = importlib.import_module("torch.distributed._symmetric_memory")
        buffer = shared.empty(self._push.SLOTS * (self.size - 1) * self.slot, dtype=torch.int16, device=self.device)
        handle = shared.rendezvous(buffer, self.group)
        buffer.fill_(self._push.EMPTY)
        addresses = torch.tensor([int(at) for at in handle.buffer_ptrs], dtype=torch.int64, device=self.device)
        return (buffer, handle), addresses

    def pieces(self, x: Tensor) -> int:
        """Several where two ranks send each other long parts."""
        return 1 if self.exchanges is None else self.exchanges.pieces(x)

    def exchange(self, part: Tensor) -> Sent:
        """Send a piece, whose sum is made when it is read."""
        assert self.exchanges is not None
        self.calls += 1
        return self.exchanges.send(part)

    def _fits(self, count: int) -> bool:
        return self.size == 2 or count <= self.slot

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks (+ residual), in rank order and rounded once where this group adds up itself."""
        if self.buffers is None or x.element_size() != 2 or not self._fits(x.numel()):
            return super().all_reduce(x, residual)
        self.calls += 1
        if residual is not None:
            residual = residual.to(x.dtype).contiguous()
        sum_: Tensor = self._push.push_sum(
            x.contiguous(), residual, self.buffers, self.turns, self.rank, self.slot, pdl=self.pdl
        )
        return sum_

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: NormSpec, scale: float = 1.0, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """residual + scale * within(the sum over ranks), and its norm; None if this group cannot add them up."""
        rows, width = residual.shape
        typed = x.dtype == (residual.dtype if x.ndim == 2 else torch.float32)
        if self.buffers is None or residual.element_size() != 2 or not typed or not rows:
            return None
        if width > WIDEST or not self._fits(rows * -(-width // self._push.BLOCK) * self._push.BLOCK):
            return None
        self.calls += 1
        x, residual = x.contiguous(), residual.contiguous()
        both: tuple[Tensor, Tensor] = self._push.push_norm(
            x, residual, norm, scale, within, self.buffers, self.turns, self.rank, self.slot, pdl=self.pdl
        )
        return both
