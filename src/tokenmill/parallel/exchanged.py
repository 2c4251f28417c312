"""Long parts of two GPUs that see each other's memory, exchanged by their copy engines. Owns: the room that the other
one copies into, and in which order it is used.

A sum of NCCL's takes multiprocessors from products that run beside it; a copy takes none. Parts are sent in pieces of
rows, each while the next is computed or the one before is read. A piece has arrived when its number has been written
behind it. A room is used again SLOTS pieces later: by then this rank has received pieces that the other sent after it
had read what lay there. (A stream of pieces has at most MOST_PIECES, and whoever reads a piece has sent none of the
next stream before.) Must not know: layers, NCCL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Addition
from tokenmill.device.beside import Beside, is_recording, wait_for
from tokenmill.kernels.triton.arrived import add_arrived

MOST_PIECES = 4
SLOTS = 2 * MOST_PIECES
LEAST = 24 << 20
"""Bytes of a piece. The host launches each piece's products: on an H200, 4096 rows of an 8B take 73 ms at once, 100 in
two pieces and 190 in four."""
ROOM = 32 << 20
WIDEST = 1 << 14
"""Entries of a row that one program adds and norms."""


class Exchanges:
    """What this rank and the other copy into each other's memory."""

    def __init__(self, rank: int, group: Any, device: torch.device | str, *, pdl: bool) -> None:
        shared: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.pdl = pdl
        buffer = shared.empty(SLOTS * ROOM + 4 * SLOTS, dtype=torch.uint8, device=device)
        self.handle = shared.rendezvous(buffer, group)
        buffer.zero_()
        theirs = self.handle.get_buffer(1 - rank, buffer.shape, buffer.dtype)
        self.inbox, self.outbox = (each[: SLOTS * ROOM].view(SLOTS, ROOM) for each in (buffer, theirs))
        self.arrived = buffer[SLOTS * ROOM :].view(torch.int32)
        self.told = theirs[SLOTS * ROOM :].view(torch.uint32)
        self.copies = Beside(device)
        self.sent = 0
        self._tell(0, 0)  # a torch that has not this operation must say so now

    def pieces(self, x: Tensor) -> int:
        """In how many pieces of rows a part like this is sent; 1: it is better added up at once."""
        if x.ndim != 2 or x.element_size() != 2 or x.shape[1] > WIDEST:
            return 1
        count = min(MOST_PIECES, x.nbytes // LEAST)
        fits = count > 1 and -(-len(x) // count) * x.shape[1] * 2 <= ROOM
        return count if fits and not is_recording() else 1

    def send(self, part: Tensor) -> Sent:
        """Begin to send a piece."""
        part = part.contiguous()
        slot = self.sent % SLOTS
        self.sent += 1
        number = self.sent

        def copy() -> None:
            self.outbox[slot, : part.nbytes].view(part.dtype).copy_(part.view(-1))
            self._tell(slot, number)

        return Sent(self, part, slot, number, self.copies.enqueue(copy))

    def _tell(self, slot: int, number: int) -> None:
        """Write the number of what lies in a room, behind the copies that the current stream was asked for."""
        torch.ops.symm_mem.stream_write_value32_(self.told, slot, number % (1 << 32))


@dataclass(slots=True)
class Sent:
    """A piece on its way to the other rank, whose piece is on its way here."""

    all: Exchanges
    part: Tensor
    slot: int
    number: int
    gone: Any

    def end(self, residual: Tensor, addition: Addition, out: Tensor, normed: Tensor | None) -> None:
        """out = residual + scale * within(both parts), and normed its norm."""
        theirs = self.all.inbox[self.slot, : self.part.nbytes].view(self.part.dtype)
        turn = (self.number + (1 << 31)) % (1 << 32) - (1 << 31)
        at = self.all.arrived[self.slot :]
        add_arrived(self.part, theirs, at, turn, residual, addition, out, normed, pdl=self.all.pdl)
        wait_for(self.gone)  # before other work gets the part's memory
