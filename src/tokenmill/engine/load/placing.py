"""A rank's part in moving experts. Owns: which tensors lie in a slot, the exchange of slots between ranks, and answers
to whoever decides (engine/steps/balance.py).

Weights are copied in place, whatever their format, so that recorded steps stay valid. All ranks get the same moves
after the same plan and make them in the same order. A rank that cannot do so ends its engine, and another life takes
over. Must not know: why experts move, formats, requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Group
from tokenmill.core.errors import ModelError
from tokenmill.core.experts import NoMovers
from tokenmill.engine.load.inplace import held
from tokenmill.layers.experts import Chosen
from tokenmill.layers.movable_experts import Placed
from tokenmill.parallel.experts import Move, apply_move, rounds
from tokenmill.runner.runner import Runner

_LINE = 1 << 18
"""Bytes that ranks exchange as one row."""
_ALIGNED = 64


class Movers:
    """One rank's mixtures whose experts may move."""

    def __init__(self, mixtures: list[Chosen], group: Group, spare_row: int) -> None:
        self.group = group
        self.layers = [PlacedMixture(chosen) for chosen in mixtures]
        for layer in self.layers:
            layer.placed.spare = spare_row
        said = [zlib.crc32(repr(layer.form).encode()) for layer in self.layers]
        if group.agree([*said, *(-each for each in said)]) != [*said, *(-each for each in said)]:
            raise ModelError("--enable-eplb: ranks hold their experts in different formats, so none can move.")

    @torch.inference_mode()
    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """state: how many experts each mixture has, and the bytes of one; counts: tokens of each since the last time;
        move: moves by mixture, in order."""
        if message["op"] == "state":
            return {"experts": [layer.placed.experts for layer in self.layers],
                    "bytes": [layer.size for layer in self.layers]}  # fmt: skip
        if message["op"] == "counts":
            found = [layer.placed.counts.tolist() for layer in self.layers]
            for layer in self.layers:
                layer.placed.counts.zero_()
            return {"counts": found}
        self.group.begin(message["epoch"])
        for number, moves in message["moves"]:
            self.layers[number].make([Move(to, source, swap) for to, source, swap in moves], self.group)
        return {}


class PlacedMixture:
    """One mixture: the tensors of its slots."""

    def __init__(self, chosen: Chosen) -> None:
        assert chosen.placed is not None
        self.placed: Placed = chosen.placed
        self.slots = [list(_slot(chosen, slot)) for slot in range(self.placed.slots)]
        forms = [[(tuple(t.shape), str(t.dtype)) for t in tensors] for tensors in self.slots]
        kept = [_numbers(chosen, slot) for slot in range(self.placed.slots)]
        if any(form != forms[0] for form in forms) or any(numbers != kept[0] for numbers in kept):
            raise ModelError("--enable-eplb: the experts of a layer are held in different formats, so none can move.")
        self.form = forms[0], kept[0]
        self.size = sum(_padded(t.nbytes) for t in self.slots[0])

    def make(self, moves: list[Move], group: Group) -> None:
        """Make these moves, as many at a time as the ranks allow, and then update the tables."""
        placement = list(self.placed.placement)
        for each in rounds(moves, self.placed.slots):
            self._exchange(each, group)
        for move in moves:
            apply_move(placement, move)
        self.placed.follow(placement)

    def _exchange(self, moves: list[Move], group: Group) -> None:
        """Each rank sends one slot to all ranks, and these take what they need."""
        first, count = self.placed.first, self.placed.slots
        here = range(first, first + count)
        gives: dict[int, int] = {}
        takes: list[tuple[int, int]] = []
        within: list[Move] = []
        for move in moves:
            if move.to // count == move.source // count:
                within += [move] if move.to in here else []
                continue
            for to, source in ((move.to, move.source), (move.source, move.to))[: 1 + move.swap]:
                gives[source // count] = source
                takes += [(to, source)] if to in here else []
        for move in within:
            self._within(move.to - first, move.source - first, swap=move.swap)
        if not gives:
            return
        own = gives.get(group.rank)
        mine = self._read(own - first if own is not None else 0)
        parts = group.all_gather(mine.view(-1, _width(self.size)))
        for to, source in takes:
            width = _width(self.size)
            rank = source // count
            self._write(to - first, parts[:, rank * width : (rank + 1) * width].reshape(-1))

    def _within(self, to: int, source: int, *, swap: bool) -> None:
        came, went = self._read(source), self._read(to)
        self._write(to, came)
        if swap:
            self._write(source, went)

    def _read(self, slot: int) -> Tensor:
        """The bytes of a slot, in whole rows."""
        tensors = self.slots[slot]
        rows = -(-self.size // _width(self.size))
        out = torch.zeros(rows * _width(self.size), dtype=torch.uint8, device=tensors[0].device)
        at = 0
        for tensor in tensors:
            out[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            at += _padded(tensor.nbytes)
        return out

    def _write(self, slot: int, bytes_: Tensor) -> None:
        at = 0
        for tensor in self.slots[slot]:
            tensor.copy_(bytes_[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += _padded(tensor.nbytes)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _width(size: int) -> int:
    return min(_LINE, size)


def _slot(chosen: Chosen, slot: int) -> Iterator[Tensor]:
    """The tensors of a slot's matrices: a part of each stacked tensor, or separate tensors."""
    if chosen.stacked is not None:
        for part in (chosen.stacked.ups, chosen.stacked.downs):
            yield from (t[slot] for t in held(part, set()) if t.ndim)
        return
    seen: set[int] = set()
    for part in chosen.weights:
        yield from (t for t in held(part[slot], seen) if t.numel())


def _numbers(chosen: Chosen, slot: int) -> list[object]:
    """Other attributes of a slot's matrices. They must be the same for all slots, because they do not move."""
    if chosen.stacked is not None:
        return []
    seen: set[int] = set()
    return [said for part in chosen.weights for said in _said(part[slot], seen)]


def _said(thing: object, seen: set[int]) -> Iterator[object]:
    if isinstance(thing, (bool, int, float, str, torch.dtype, type(None))):
        yield thing
    elif id(thing) not in seen and not isinstance(thing, Tensor):
        seen.add(id(thing))
        yield type(thing).__name__
        values = thing if isinstance(thing, (list, tuple)) else _attributes(thing)
        for value in values:
            yield from _said(value, seen)


def _attributes(thing: object) -> list[object]:
    """Of things of ours: functions and native ones say nothing."""
    if not type(thing).__module__.startswith("tokenmill."):
        return []
    names = [*getattr(thing, "__dict__", ())]
    names += [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)]
    return [getattr(thing, name) for name in names]


def movers_of(runner: Runner, group: Group) -> Movers | NoMovers:
    """The Movers of this runner's experts, or NoMovers if these stay."""
    mixtures = runner.model.spec.extras.get("placed")
    if not mixtures:
        return NoMovers()
    assert isinstance(mixtures, list)
    return Movers(mixtures, group, runner.rows.spare)
