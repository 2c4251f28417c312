"""Fixed K/V blocks by number. Owns: reference counts, the free list, and cached blocks that nobody holds.

Must not know: sequences, tokens, tensors. A block is free (on the stack), held (refs > 0) or idle: only the prefix
cache knows it. When the stack is empty, the idle block that was released longest ago is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.stack = list(range(num_blocks - 1, -1, -1))
        self.cached: dict[int, object] = {}
        self.idle: dict[int, None] = {}
        self.shared = 0
        """How many blocks have two or more holders."""
        self.freed = 0
        """How often a block has lost its last holder so far."""
        self.on_evict: Callable[[int], None] | None = None

    @property
    def available(self) -> int:
        """How many blocks `take` could give now."""
        return len(self.stack) + len(self.idle)

    @property
    def held(self) -> int:
        """How many blocks have at least one holder."""
        return self.num_blocks - self.available

    def take(self, count: int) -> list[int]:
        """Take `count` blocks, which then have one holder each; the caller has checked `available`."""
        stack, refs = self.stack, self.refs
        while len(stack) < count:
            self._evict_one()
        taken = [stack.pop() for _ in range(count)]
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a holder to a held or idle block."""
        if self.refs[block] == 0:
            del self.idle[block]
        elif self.refs[block] == 1:
            self.shared += 1
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Pass a sequence's last block first, so that leaves are evicted before
        roots."""
        for block in blocks:
            left = self.refs[block] = self.refs[block] - 1
            assert left >= 0, f"block {block} released twice"
            if left == 1:
                self.shared -= 1
            elif left == 0:
                self.freed += 1
                if block in self.cached:
                    self.idle[block] = None
                else:
                    self.stack.append(block)

    def cache(self, block: int, node: object) -> None:
        """The prefix cache now knows this (held) block."""
        self.cached[block] = node

    def uncache(self, block: int) -> None:
        """The prefix cache forgets this block; an idle one becomes free."""
        del self.cached[block]
        if block in self.idle:
            del self.idle[block]
            self.stack.append(block)

    def _evict_one(self) -> None:
        block = next(iter(self.idle))
        assert self.on_evict is not None
        self.on_evict(block)
        assert block not in self.idle, "the prefix cache must uncache what it evicts"
