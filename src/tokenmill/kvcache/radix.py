"""The prefix cache: a tree of full blocks. Owns: which token contents lie in which blocks, per salt and KV group.

Must not know: tensors, requests, scheduling. One tree node stands for one block's worth of tokens after its parent's;
it names a block in every KV group (or -1 where that group's block is gone). Blocks become matchable when they are
*planned*: devices run plans in order, so a later reader finds them written.

Where a hit of n tokens may end, per group:   full / latent: every block of [0, n) is there
                                              window w:      every block of [n - w + 1, n) is there
                                              states:        the node that ends at n has a snapshot
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenmill.kvcache.blocks import BlockPool
from tokenmill.kvcache.cache_events import Listener, NoListener


class Node:
    """One full block of tokens: block number `blocks[g]` holds its K/V in group g (-1: none). A root's key is its salt.
    `snapshot`: the slot that keeps a row's states behind the block's last token, or -1. `followed`: a drafter with K/V
    of its own has also seen the tokens. `mark`, `told`: see cache_events.py."""

    __slots__ = ("blocks", "children", "followed", "key", "mark", "parent", "snapshot", "told")

    def __init__(self, key: tuple[int | str, ...], parent: Node | None, num_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int | str, ...], Node] = {}
        self.blocks = [-1] * num_groups
        self.snapshot = -1
        self.followed = False
        self.mark = b""
        self.told = False

    @property
    def alive(self) -> bool:
        """Is it still in the tree? Roots always are."""
        return self.parent is None or self.parent.children.get(self.key) is self


class RadixCache:
    """Finds the longest reusable prefix of a sequence, and remembers new full blocks."""

    def __init__(self, pools: list[BlockPool], windows: list[int], block_size: int) -> None:
        """`pools[g]` and `windows[g]` belong to KV group g (window 0: every position is kept); groups may share a
        pool."""
        self.pools = pools
        self.windows = windows
        self.block_size = block_size
        self.roots: dict[str, Node] = {}
        self.drop_snapshot: Callable[[Node], object] = lambda node: None
        self.listener: Listener = NoListener()
        for pool in {id(p): p for p in pools}.values():
            pool.on_evict = lambda block, pool=pool: self._evicted(pool, block)

    def root(self, salt: str) -> Node:
        """The root of one tenant and adapter's tree; a new root is remembered once it has a child."""
        return self.roots.get(salt) or Node((salt,), None, len(self.pools))

    def _living(self, node: Node) -> Node:
        """The node itself; but a root is looked up again, because it may have been pruned while a sequence pointed at
        it."""
        return self.roots.get(str(node.key[0]), node) if node.parent is None else node

    def walk(self, start: Node, keys: list[int], position: int, limit: int) -> list[Node]:
        """The nodes that continue `start` (which ends at `position`) along `keys`; none ends behind `limit`."""
        size = self.block_size
        path: list[Node] = []
        node = self._living(start)
        while position + size <= limit:
            child = node.children.get(tuple(keys[position : position + size]))
            if child is None:
                break
            path.append(child)
            node = child
            position += size
        return path

    def usable(self, before: list[Node], path: list[Node], *, states: bool = False) -> int:
        """How many nodes of `path` a hit may take, given the nodes `before` it that the sequence already shares."""
        nodes = before + path
        limit = len(nodes)
        for group, window in enumerate(self.windows):
            if not window:
                for i in range(len(before), limit):
                    if nodes[i].blocks[group] < 0:
                        limit = i
                        break
        for end in range(limit, len(before), -1):
            if states and nodes[end - 1].snapshot < 0:
                continue
            if all(self._window_held(nodes, end, g, w) for g, w in enumerate(self.windows) if w):
                return end - len(before)
        return 0

    def _window_held(self, nodes: list[Node], end: int, group: int, window: int) -> bool:
        first = max(0, (end * self.block_size - window + 1) // self.block_size)
        return all(nodes[i].blocks[group] >= 0 for i in range(first, end))

    def add(self, parent: Node, key: tuple[int, ...], blocks: list[int]) -> tuple[Node, bool]:
        """Remember one full block after `parent`; existing nodes keep their own blocks. Returns the node, and if it is
        new."""
        parent = self._living(parent)
        if parent.parent is None:
            self.roots[str(parent.key[0])] = parent
        node = parent.children.get(key)
        fresh = node is None
        if node is None:
            node = parent.children[key] = Node(key, parent, len(self.pools))
        for group, block in enumerate(blocks):
            pool = self.pools[group]
            if block >= 0 and node.blocks[group] < 0 and block not in pool.cached:
                node.blocks[group] = block
                pool.cache(block, (node, group))
                fresh = True
        return node, fresh

    def retract(self, nodes: Iterable[Node]) -> None:
        """Forget these nodes and everything below them (their contents were never written)."""
        for node in nodes:
            self._drop(node)

    def unfollow(self) -> None:
        """Mark every block as not seen by a drafter: what it has seen is in doubt."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            node.followed = False
            stack.extend(node.children.values())

    def forget_block(self, group: int, block: int) -> None:
        """Forget the node that holds this block, if there is one."""
        entry = self.pools[group].cached.get(block)
        if entry is not None:
            assert isinstance(entry, tuple)
            self._drop(entry[0])

    def clear(self) -> None:
        """Forget everything."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self._drop(child)
        self.roots.clear()

    def _drop(self, node: Node) -> None:
        if node.parent is None or not node.alive:
            return
        del node.parent.children[node.key]
        stack = [node]
        while stack:
            gone = stack.pop()
            stack.extend(gone.children.values())
            gone.children = {}
            self.drop_snapshot(gone)
            self.listener.gone(gone)
            for group, block in enumerate(gone.blocks):
                if block >= 0:
                    gone.blocks[group] = -1
                    self.pools[group].uncache(block)
        self._prune(node.parent)

    def _evicted(self, pool: BlockPool, block: int) -> None:
        entry = pool.cached[block]
        assert isinstance(entry, tuple)
        node, group = entry
        assert isinstance(node, Node)
        if not self.windows[group]:
            self._drop(node)  # nothing below a missing full block can ever be matched
            return
        node.blocks[group] = -1
        node.followed = False
        self.listener.gone(node)
        pool.uncache(block)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove empty leaves, from this node upwards; a root stays only while it has children."""
        while node.parent is not None and not node.children and all(b < 0 for b in node.blocks):
            if node.alive:
                del node.parent.children[node.key]
            self.drop_snapshot(node)
            self.listener.gone(node)  # it may have been told of although its blocks had left their windows
            node = node.parent
        if node.parent is None and not node.children:
            self.roots.pop(str(node.key[0]), None)
