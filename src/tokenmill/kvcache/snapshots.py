"""Kept states of rows. Owns: snapshot slots, which node of the prefix cache each belongs to, and where one is wanted.

Must not know: tensors, policies, requests. A recurrent layer has one state per row, which every token overwrites. So a
prefix can be taken up again only where its state was kept. Devices keep and restore states as plans say.

    where a state is kept:  where an earlier request with the same beginning went another way
                            at the last block border of what is known when a row starts (a prompt, a turn)
                            every `every` tokens of a long prompt, and every `turn` tokens of an answer

When prompts with the same beginning arrive together, the first one that parts from another keeps the state there. Those
behind it wait for that instead of computing the beginning, too.
A restore comes before its plan's forward and a save after it, and devices run in order. So a slot may be given away
while plans that read it are in flight, and what a plan saves can be found from the next plan on.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.sequence import NEVER, Sequence
from tokenmill.core.step import StateSave, StepPlan
from tokenmill.kvcache.radix import Node

PROTECTED = 0.8
"""The share of slots that is protected for states which were used again."""


@dataclass(slots=True)
class Kept:
    """A state that a planned step keeps for `node`."""

    seq: Sequence
    node: Node
    slot: int
    position: int


class Snapshots:
    """Slots 0 .. num_slots - 1, lent to nodes of the prefix cache."""

    def __init__(self, num_slots: int, block_size: int, every: int = 1024, turn: int = 64) -> None:
        """every, turn: how many tokens apart prompts' and answers' states are kept; rounded up to whole blocks."""
        self.num_slots = num_slots
        self.block_size = block_size
        self.every = -(-every // block_size) * block_size
        self.turn = -(-turn // block_size) * block_size
        self.free = list(range(num_slots - 1, -1, -1))
        self.fresh: dict[int, Node] = {}
        self.proven: dict[int, Node] = {}
        self.readers: dict[int, int] = {}
        self.coming: dict[Node, Sequence] = {}
        """Nodes where other sequences diverged, and the rows that are on their way to keep the states there."""
        self.saved = self.hits = self.evicted = 0

    # ------------------------------------------------------------ slots

    def take(self) -> int:
        """A slot to write to: a free one, or else the slot of the state whose loss costs least; -1: all are being
        read."""
        if self.free:
            return self.free.pop()
        for order in (self.fresh, self.proven):
            for slot, node in order.items():
                if slot not in self.readers:
                    self.evicted += 1
                    self.drop(node)
                    return self.free.pop()
        return -1

    def attach(self, node: Node, slot: int) -> None:
        """Give this slot's state to `node`. If the node has a state already, or is gone, free the slot."""
        if node.snapshot >= 0 or not node.alive:
            self.free.append(slot)
            return
        node.snapshot = slot
        self.fresh[slot] = node
        self.saved += 1

    def drop(self, node: Node) -> None:
        """Forget a node's state."""
        slot, node.snapshot = node.snapshot, -1
        if slot < 0:
            return
        self.fresh.pop(slot, None)
        self.proven.pop(slot, None)
        if slot not in self.readers:
            self.free.append(slot)

    def _let_go(self, slot: int) -> None:
        self.readers[slot] -= 1
        if not self.readers[slot]:
            del self.readers[slot]
            if slot not in self.fresh and slot not in self.proven:
                self.free.append(slot)

    def _used(self, slot: int) -> None:
        """Protect a state that was used again. If too many are protected, the oldest of them loses its protection."""
        node = self.fresh.pop(slot, None) or self.proven.pop(slot)
        self.proven[slot] = node
        self.hits += 1
        if len(self.proven) > PROTECTED * self.num_slots:
            oldest = next(iter(self.proven))
            self.fresh[oldest] = self.proven.pop(oldest)

    # ------------------------------------------------------------ reading

    def matched(self, seq: Sequence, position: int, parting: Node) -> None:
        """The prefix cache takes `seq` to `position`, so it does not pass states that were to be kept before that.
        parting: the last node that it shares with other sequences, at `seq.diverges`."""
        if seq.save_slot >= 0:
            self.free.append(seq.save_slot)
            seq.save_slot = -1
        self.look_ahead(seq, position)
        self._give_up(seq)
        if position < seq.diverges and parting.snapshot < 0 and parting not in self.coming:
            self.coming[parting], seq.parting = seq, parting

    def comes(self, node: Node, seq: Sequence) -> bool:
        """Is a row that is no less urgent than `seq` about to keep the state behind `node`? (A beam that waits for its
        siblings is not.)"""
        keeper = self.coming.get(node)
        if keeper is None or keeper is seq or keeper.id in keeper.group.candidates:
            return False
        return keeper.rank <= seq.rank

    def _give_up(self, seq: Sequence) -> None:
        """Nobody needs to wait for this row's states any longer."""
        parting, seq.parting = seq.parting, None
        if isinstance(parting, Node) and self.coming.get(parting) is seq:
            del self.coming[parting]

    def restore(self, seq: Sequence, node: Node) -> None:
        """`seq` continues behind `node`, whose state keeps its slot until the devices have been told."""
        if seq.restore >= 0:
            self._let_go(seq.restore)
        seq.restore = node.snapshot
        self.readers[seq.restore] = self.readers.get(seq.restore, 0) + 1
        self._used(seq.restore)

    def tell(self, seq: Sequence, plan: StepPlan) -> None:
        """Put the restore that `seq` waits for into the plan."""
        plan.restores.append((seq.row, seq.restore))
        self._let_go(seq.restore)
        seq.restore = -1

    def close(self, seq: Sequence) -> None:
        """`seq` gives its row back. None of its plans is in flight."""
        if seq.restore >= 0:
            self._let_go(seq.restore)
        if seq.save_slot >= 0:
            self.free.append(seq.save_slot)
        seq.restore = seq.save_slot = -1
        seq.save_at = NEVER
        self._give_up(seq)

    # ------------------------------------------------------------ keeping

    def look_ahead(self, seq: Sequence, position: int) -> None:
        """Set the next position at which the state of a row that has reached `position` is kept."""
        size = self.block_size
        last = (len(seq.tokens) - 1) // size * size
        if position < last:
            seq.save_at = min(last, (position // self.every + 1) * self.every)
            if position < seq.diverges < seq.save_at:
                seq.save_at = seq.diverges
        else:
            seq.save_at = (position // self.turn + 1) * self.turn

    def save(self, seq: Sequence, position: int, end: int, plan: StepPlan) -> Kept | None:
        """Let this grant, of positions [position, end) at most, keep the row's state at `seq.save_at`.

        A state behind known tokens is returned; it is attached once the plan is complete. An answer's tokens are not
        known yet, so its state waits in `seq.save_slot` for the commit. Every plan that may reach it asks for it,
        because only the devices know how many drafts stand.
        """
        at = seq.save_at
        if seq.published == at and position < at and seq.save_slot < 0:
            node = seq.node
            self.look_ahead(seq, end)
            slot = -1 if not isinstance(node, Node) or node.snapshot >= 0 else self.take()
            if slot < 0:
                self._give_up(seq)
                return None
            plan.saves.append(StateSave(seq.row, slot, at))
            assert isinstance(node, Node)
            return Kept(seq, node, slot, at)
        self._give_up(seq)  # its place in the tree is gone, or its prompt is done
        least = seq.computed + seq.inflight if seq.pending and seq.most_guesses else position
        if least < at and seq.node is not None:
            if seq.save_slot < 0:
                seq.save_slot = self.take()
            if seq.save_slot >= 0:
                plan.saves.append(StateSave(seq.row, seq.save_slot, at))
            else:
                self.look_ahead(seq, end)  # a later plan may find a slot, but the row may have passed
        return None

    def planned(self, kept: list[Kept]) -> None:
        """The plan is complete: the next plan can find its states."""
        for one in kept:
            self._keep(one.seq, one.node, one.slot, one.position)
            if one.node is one.seq.parting:
                self._give_up(one.seq)

    def confirm(self, seq: Sequence) -> None:
        """A commit took `seq` to `save_at` or beyond and published its tokens up to there: attach the state."""
        at, slot, node = seq.save_at, seq.save_slot, seq.node
        seq.save_slot = -1
        self.look_ahead(seq, max(at, seq.computed + seq.ahead))
        if slot < 0:
            return
        for _ in range((seq.published - at) // self.block_size):
            node = node.parent if isinstance(node, Node) else None
        if isinstance(node, Node) and seq.published >= at:
            self._keep(seq, node, slot, at)
        else:
            self.free.append(slot)

    def failed(self, kept: list[Kept]) -> None:
        """The plan failed, so the states that it should have kept do not exist."""
        for one in kept:
            if one.node.snapshot == one.slot:
                self.drop(one.node)

    def _keep(self, seq: Sequence, node: Node, slot: int, position: int) -> None:
        """Attach a state. An answer's newest state replaces the one before it, if nobody has used that one."""
        self.attach(node, slot)
        if position <= seq.num_prompt or node.snapshot != slot:
            return
        before, seq.rolled = seq.rolled, node
        if isinstance(before, Node) and before is not node and before.snapshot in self.fresh:
            self.drop(before)
