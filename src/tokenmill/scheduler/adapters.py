"""Which adapters lie in which slots. Owns: slots, the rows that use them, and who gets one next.

A slot that rows use stays. Of the others, the least recently used one is taken. If rows use all of them and a sequence
waits for one, the slot with the fewest rows is drained: requests that have not begun may not join it. So everybody gets
a slot in time. A sequence that needs no slot, or has one, waits for nobody. Must not know: tensors, files, names.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """An adapter in a slot: how many rows use it, and which adapter waits for the slot (0: none)."""

    slot: int
    rows: int = 0
    drained_for: int = 0


class AdapterSlots:
    """Slots 1..count of all devices; adapter 0 needs none. `pending`: (slot, adapter) loads for the next plan."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.free = list(range(count, 0, -1))
        self.held: OrderedDict[int, Holding] = OrderedDict()
        """By adapter, the least recently used first."""
        self.pending: list[tuple[int, int]] = []
        self.loads = 0
        """How often an adapter was put into a slot."""

    def has_room(self, adapter: int, *, begun: bool) -> bool:
        """Can a row with this adapter start? begun: other rows of its request are running and must not wait for it."""
        held = self.held.get(adapter)
        if not adapter or held is not None:
            return held is None or begun or not held.drained_for
        if self.free or self._idle(adapter) is not None:
            return True
        if all(held.drained_for != adapter for held in self.held.values()):
            open_ = [held for held in self.held.values() if not held.drained_for]
            if open_:
                min(open_, key=lambda held: held.rows).drained_for = adapter
        return False

    def still_wait(self, adapters: set[int]) -> None:
        """Only these adapters are still waited for: reopen slots that are drained for others."""
        for held in self.held.values():
            if held.drained_for not in adapters:
                held.drained_for = 0

    @property
    def draining(self) -> bool:
        """Is any slot being drained for another adapter?"""
        return bool(self.held) and any(held.drained_for for held in self.held.values())

    def take(self, adapter: int) -> None:
        """A row starts: its adapter lies in a slot from the next plan on."""
        if not adapter:
            return
        held = self.held.get(adapter)
        if held is None:
            held = self.held[adapter] = Holding(self._slot(adapter))
            self.pending.append((held.slot, adapter))
            self.loads += 1
        self.held.move_to_end(adapter)
        held.rows += 1

    def hold(self, adapter: int) -> None:
        """A row joins another row of its request."""
        if adapter:
            self.held[adapter].rows += 1

    def release(self, adapter: int) -> None:
        """A row has ended or was preempted."""
        if adapter:
            self.held[adapter].rows -= 1

    def slot_of(self, adapter: int) -> int:
        """The slot of a running row's adapter."""
        return self.held[adapter].slot if adapter else 0

    def drop(self, adapter: int) -> None:
        """Forget an adapter that no row uses."""
        held = self.held.get(adapter)
        if held is not None and not held.rows:
            del self.held[adapter]
            self.free.append(self._emptied(held.slot))

    def forget(self) -> None:
        """Forget what lies in the slots: no row is running, and every adapter will be loaded again."""
        self.free = list(range(self.count, 0, -1))
        self.held.clear()
        self.pending.clear()

    def _idle(self, adapter: int) -> int | None:
        """An adapter that may give way to this one."""
        idle = [other for other, held in self.held.items() if not held.rows]
        mine = [other for other in idle if self.held[other].drained_for == adapter]
        spare = [other for other in idle if not self.held[other].drained_for]
        return next(iter([*mine, *spare]), None)

    def _slot(self, adapter: int) -> int:
        """A slot for an adapter that has none."""
        if self.free:
            return self.free.pop()
        victim = self._idle(adapter)
        assert victim is not None, "has_room comes first"
        slot = self._emptied(self.held.pop(victim).slot)
        for held in self.held.values():
            if held.drained_for == adapter:
                held.drained_for = 0
        return slot

    def _emptied(self, slot: int) -> int:
        """A slot whose adapter has gone. It may have gone before a plan could load it, and then it never will be."""
        self.pending = [load for load in self.pending if load[0] != slot]
        return slot
