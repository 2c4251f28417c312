"""Block tables of sequences. Owns: growing, sharing, copy-on-write, window eviction and release of a sequence's blocks.

Must not know: tensors, policies, requests. The scheduler calls it; it talks to the block pools and the prefix cache.
Each table remembers its changes (`sent`, `dropped`); they leave as TableEdits with the next grant.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.sequence import NEVER, Sequence, Table
from tokenmill.core.step import BlockCopy, StepPlan, TableEdit
from tokenmill.kvcache.blocks import BlockPool
from tokenmill.kvcache.cache_events import salt_of
from tokenmill.kvcache.radix import Node, RadixCache
from tokenmill.kvcache.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV group: the pool that its blocks come from, and its window (0: every position is kept)."""

    pool: int
    window: int = 0


@dataclass(slots=True)
class Looking:
    """How many tokens of waiting sequences may still be looked up in one plan; the first sequence is free."""

    left: int
    begun: bool = False


class BlockTables:
    """Allocation for all sequences of one engine."""

    def __init__(
        self,
        layouts: list[GroupLayout],
        num_blocks: list[int],
        block_size: int,
        *,
        prefix_cache: bool = True,
        snapshots: Snapshots | None = None,
        step_tokens: int = NEVER,
    ) -> None:
        """snapshots: given for a model whose rows have states besides their blocks. step_tokens: the most tokens that
        one step computes; a group with a window holds no more than these beyond it."""
        self.layouts = layouts
        self.block_size = block_size
        self.most_held = [
            -(-(layout.window + step_tokens) // block_size) + 1 if layout.window else NEVER for layout in layouts
        ]
        """By group, the most blocks that a sequence needs at one time, however long it is."""
        self.most_new = -(-step_tokens // block_size)
        self.pools = [BlockPool(n) for n in num_blocks]
        self.by_group = [self.pools[layout.pool] for layout in layouts]
        self.caching = prefix_cache
        self.cache = RadixCache(self.by_group, [layout.window for layout in layouts], block_size)
        self.windowed = [g for g, layout in enumerate(layouts) if layout.window]
        self.stateful = snapshots is not None
        """Have rows states besides their blocks? If not, there are no snapshots to ask for."""
        self.snapshots = snapshots or Snapshots(0, block_size)
        self.cache.drop_snapshot = self.snapshots.drop
        self.shares_followed = True
        """If a drafter has seen a block's tokens, does that hold for other sequences that find the block?"""
        self.draft_window = 0
        """The smallest window of a drafter's layers; 0: none of them has one."""

    # ------------------------------------------------------------ capacity

    def max_length(self) -> int:
        """The length of the longest sequence that the cache can hold alone."""
        return min(self._fitting(number) for number in range(len(self.pools))) * self.block_size

    def _fitting(self, number: int) -> int:
        """How many blocks of text this pool can hold for one sequence."""
        most = sorted(held for held, layout in zip(self.most_held, self.layouts, strict=True) if layout.pool == number)
        left, found = self.pools[number].num_blocks, 0
        for place, held in enumerate(most):  # all groups grow together, until those with the smallest windows are full
            count = min(held - found, left // (len(most) - place))
            found, left = found + count, left - count * (len(most) - place)
            if found < held:
                return found
        return NEVER

    def has_room(self, seq: Sequence, length: int) -> bool:
        """Are there enough blocks for `length` tokens of `seq` now?"""
        return not any(self._lacking(seq, length))

    def is_full(self, seq: Sequence) -> bool:
        """Is it known without a look that `seq` finds too few blocks? Whatever it can share, as many blocks as it
        lacked must have been given back since."""
        return any(pool.freed < least for pool, least in zip(self.pools, seq.starts_at, strict=False))

    def turn_away(self, seq: Sequence, length: int) -> None:
        """A waiting sequence finds too few blocks for `length` tokens: it gives back those that it would have
        shared."""
        lacking = self._lacking(seq, length)
        self.close(seq)
        seq.starts_at = [pool.freed + n if n else 0 for pool, n in zip(self.pools, lacking, strict=True)]

    def _lacking(self, seq: Sequence, length: int) -> list[int]:
        """How many blocks of each pool are missing for `length` tokens of `seq`."""
        need = [0] * len(self.pools)
        for group, layout in enumerate(self.layouts):
            end, held = (seq.tables[group].end, len(seq.tables[group].blocks)) if seq.tables else (0, 0)
            count = max(0, -(-(length - end) // self.block_size))
            need[layout.pool] += min(count, max(self.most_held[group] - held, self.most_new))
        return [max(0, n - pool.available) for n, pool in zip(need, self.pools, strict=True)]

    def usage(self) -> float:
        """The share of blocks that have a holder."""
        return sum(p.held for p in self.pools) / max(1, sum(p.num_blocks for p in self.pools))

    # ------------------------------------------------------------ life of a table

    def open(self, seq: Sequence) -> None:
        """Give a sequence empty tables."""
        seq.tables = [Table() for _ in self.layouts]
        seq.capacity = seq.published = seq.followed = 0
        seq.node = self.cache.root(self._salt(seq)) if self.caching else None
        if self.stateful and self.caching:
            self.snapshots.look_ahead(seq, 0)

    def match(self, seq: Sequence, position: int, limit: int) -> int:
        """Extend `seq`, planned up to block-aligned `position`, by cached blocks; returns the tokens gained."""
        if not self.caching or seq.published < position or position % self.block_size:
            return 0
        if any(table.end > position for table in seq.tables):
            return 0  # drafts that did not stand have left blocks here already
        cache, start = self.cache, seq.node
        assert isinstance(start, Node)
        if not start.alive:
            return 0  # the sequence's own place in the tree was evicted or retracted
        path = cache.walk(start, seq.keys, position, limit)
        if not path:
            return 0
        before = _ancestors(start)
        count = cache.usable(before, path)
        if self.stateful and count:
            seq.diverges, parting = position + count * self.block_size, path[count - 1]
            count = cache.usable(before, path, states=True)
            self.snapshots.matched(seq, position + count * self.block_size, parting)
        if not count:
            return 0
        nodes = before + path[:count]
        end = len(nodes) * self.block_size
        for group, layout in enumerate(self.layouts):
            self._adopt(seq, group, layout.window, nodes, end, position)
        seq.node = path[count - 1]
        if self.stateful:
            self.snapshots.restore(seq, path[count - 1])
        seq.published = end
        seq.capacity = min(t.end for t in seq.tables)
        for n, node in enumerate(path[:count]):
            if seq.followed != position + n * self.block_size or not node.followed:
                break
            seq.followed += self.block_size
        return count * self.block_size

    def comes(self, seq: Sequence, looking: Looking) -> bool:
        """Will a running row soon keep a state that saves this waiting sequence from computing the same tokens? It is
        looked up once until that row has kept it, and only while there is work `left`."""
        snapshots = self.snapshots
        if not snapshots.coming or not seq.group.reads_cache:
            return False
        if isinstance(seq.awaits, Node) and _may_be_kept(seq.awaits) and snapshots.comes(seq.awaits, seq):
            return True
        if looking.begun:
            looking.left -= len(seq.tokens)
        looking.begun, seq.awaits = True, None
        if looking.left < 0:
            return False
        path = self.cache.walk(self.cache.root(self._salt(seq)), seq.keys, 0, len(seq.tokens) - 1)
        found = self.cache.usable([], path, states=True)
        coming = (node for node in path[found : self.cache.usable([], path)] if snapshots.comes(node, seq))
        seq.awaits = next(coming, None)
        return seq.awaits is not None

    def _adopt(self, seq: Sequence, group: int, window: int, nodes: list[Node], end: int, position: int) -> None:
        table, pool, size = seq.tables[group], self.by_group[group], self.block_size
        first = position // size
        if window:
            kept = max(0, (end - window + 1) // size)
            if kept > first:  # everything the sequence holds so far lies before the window of the hit
                self._drop_head(table, pool, len(table.blocks))
                first = kept
        for i in range(first, len(nodes)):
            block = nodes[i].blocks[group]
            pool.share(block)
            table.blocks.append(block)
            table.first.append(i * size)
        table.end = end

    def grow(self, seq: Sequence, position: int, length: int, plan: StepPlan) -> bool:
        """Make sure that positions [position, length) have blocks that `seq` may write; False: too few blocks are
        free."""
        size = self.block_size
        need = [0] * len(self.pools)
        todo: list[tuple[int, int, bool]] = []
        for group, layout in enumerate(self.layouts):
            table = seq.tables[group]
            more = max(0, -(-(length - table.end) // size))
            split = position < table.end and self.by_group[group].refs[table.blocks[self._entry(table, position)]] > 1
            need[layout.pool] += more + split
            if more or split:
                todo.append((group, more, split))
        for n, pool in zip(need, self.pools, strict=True):
            if n > pool.available:
                return False
        for group, more, split in todo:
            table, pool = seq.tables[group], self.by_group[group]
            if split:
                self._copy_on_write(table, group, position, plan)
            if more:
                table.blocks += pool.take(more)
                table.first += range(table.end, table.end + more * size, size)
                table.end += more * size
        seq.capacity = min(t.end for t in seq.tables)
        return True

    def _entry(self, table: Table, position: int) -> int:
        return (position - table.first[0]) // self.block_size

    def _copy_on_write(self, table: Table, group: int, position: int, plan: StepPlan) -> None:
        index = self._entry(table, position)
        pool, old = self.by_group[group], table.blocks[index]
        (new,) = pool.take(1)
        if position % self.block_size:
            plan.copies.append(BlockCopy(group, old, new))
        pool.release([old])
        table.blocks[index] = new
        table.sent = min(table.sent, index)

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Let `child` share the parent's blocks of positions [0, length); whichever writes first copies the block."""
        child.tables = []
        for group, table in enumerate(parent.tables):
            count = sum(1 for f in table.first if f < length)
            copy = Table(table.blocks[:count], table.first[:count], 0, 0, 0)
            copy.end = copy.first[-1] + self.block_size if count else -(-length // self.block_size) * self.block_size
            for block in copy.blocks:
                self.by_group[group].share(block)
            child.tables.append(copy)
        child.node, child.published = parent.node, parent.published
        while child.published > length and isinstance(child.node, Node):
            child.node, child.published = child.node.parent, child.published - self.block_size
        child.capacity = parent.capacity = 0

    def trim(self, seq: Sequence) -> None:
        """Give back blocks that have fallen out of their window."""
        for group in self.windowed:
            table = seq.tables[group]
            dead = seq.computed - self.layouts[group].window + 1 - self.block_size
            count = 0
            while count < len(table.first) - 1 and table.first[count] <= dead:
                count += 1
            if count:
                self._drop_head(table, self.by_group[group], count)

    def first_followed(self, seq: Sequence) -> int:
        """The first position for which every layer of a drafter still has a place."""
        for group in self.windowed if self.draft_window else ():
            if self.layouts[group].window == self.draft_window and seq.tables[group].first:
                return seq.tables[group].first[0]
        return 0

    def _drop_head(self, table: Table, pool: BlockPool, count: int) -> None:
        pool.release(reversed(table.blocks[:count]))
        del table.blocks[:count], table.first[:count]
        known = min(count, table.sent)
        table.dropped += known
        table.sent -= known

    def close(self, seq: Sequence) -> None:
        """Release everything a sequence holds."""
        for group, table in enumerate(seq.tables):
            self.by_group[group].release(reversed(table.blocks))
        seq.tables = []
        seq.capacity = seq.published = 0
        seq.node = None
        self.snapshots.close(seq)

    # ------------------------------------------------------------ prefix cache

    def publish(self, seq: Sequence, upto: int) -> list[Node]:
        """Let the prefix cache find full blocks of known tokens in positions [published, upto); returns the new
        nodes."""
        size = self.block_size
        new: list[Node] = []
        if seq.published + size > upto or seq.node is None:
            return new
        keys = seq.keys
        while seq.published + size <= upto and seq.node is not None:
            node = seq.node
            assert isinstance(node, Node)
            if not node.alive:
                seq.node = None  # its place in the tree is gone: publish no more
                break
            start = seq.published
            blocks = [self._block_at(table, start) for table in seq.tables]
            seq.node, fresh = self.cache.add(node, tuple(keys[start : start + size]), blocks)
            if fresh:
                new.append(seq.node)
            seq.published += size
        if self.shares_followed and (seq.in_step or seq.followed):
            self._mark_followed(seq)
        return new

    def _mark_followed(self, seq: Sequence) -> None:
        """Mark blocks that the cache can find as seen by the drafter, if it has seen their tokens."""
        node, end = seq.node, seq.published
        while isinstance(node, Node) and node.parent is not None and not node.followed:
            if seq.in_step or end <= seq.followed:  # only this sequence's own blocks: another may have published first
                own = [self._block_at(table, end - self.block_size) for table in seq.tables]
                node.followed = own == node.blocks
            node, end = node.parent, end - self.block_size

    def _block_at(self, table: Table, position: int) -> int:
        if not table.first or position < table.first[0]:
            return -1
        index = (position - table.first[0]) // self.block_size
        return table.blocks[index] if index < len(table.blocks) else -1

    def forget(self, seq: Sequence) -> None:
        """Forget every block that this sequence wrote, so that none is reused (for example because it produced NaN)."""
        for group, table in enumerate(seq.tables):
            for block in table.blocks:
                self.cache.forget_block(group, block)
        seq.node = None

    def edits(self, seq: Sequence, plan: StepPlan) -> None:
        """Append to the plan what the devices do not know yet about this sequence's tables."""
        for group, table in enumerate(seq.tables):
            if table.dropped or table.sent < len(table.blocks):
                plan.edits.append(
                    TableEdit(
                        seq.row, group, table.dropped, table.sent, table.blocks[table.sent :], table.first[table.sent :]
                    )
                )
                table.dropped, table.sent = 0, len(table.blocks)

    def _salt(self, seq: Sequence) -> str:
        request = seq.group.request
        return salt_of(request.adapter, request.salt)


def _may_be_kept(node: Node) -> bool:
    """Can a sequence still find this node, and not yet a state behind it?"""
    return node.alive and node.snapshot < 0 <= min(node.blocks)


def _ancestors(node: Node) -> list[Node]:
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path
