"""What a prefix cache holds, reported block by block to who picks engines. Owns: the marks that name a block
and everything before it, and which of them were published or lost since the last report.

A block is reported once the step that writes it is committed, because a plan may fail. A mark covers a salt and every
token up to the block's end; every process computes the same mark. Must not know: tensors, requests, engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Protocol

MARK_BYTES = 8


def salt_of(adapter: int, salt: str | None) -> str:
    """The salt that keeps the prefixes of one tenant and adapter apart from those of others."""
    return f"{adapter}\x00{salt or ''}" if adapter or salt else ""


def root_mark(salt: str) -> bytes:
    """The mark of an empty prefix."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=MARK_BYTES).digest()


def next_mark(before: bytes, keys: Iterable[int]) -> bytes:
    """The mark of a block that holds these keys and follows the block with mark `before`."""
    try:
        said = array("q", keys).tobytes()
    except OverflowError:  # a picture's keys may be larger
        said = repr(tuple(keys)).encode()
    return mark_of(before + said)


def mark_of(said: bytes) -> bytes:
    """The mark of a block that is told by these bytes: those of the mark before, then its keys'."""
    return blake2b(said, digest_size=MARK_BYTES).digest()


def prompt_marks(
    keys: list[int], salt: str, block_size: int, most: int, mark: Callable[[bytes], bytes] = mark_of
) -> list[bytes]:
    """One mark per full block of the first `most` keys, as `next_mark` gives it. mark: one that remembers, if prompts
    begin alike."""
    before, found = root_mark(salt), []
    whole = min(len(keys), most) // block_size * block_size
    try:
        said = array("q", keys[:whole]).tobytes()
    except OverflowError:
        for start in range(0, whole, block_size):
            before = next_mark(before, keys[start : start + block_size])
            found.append(before)
        return found
    step = len(said) // whole * block_size if whole else 1
    for start in range(0, len(said), step):
        before = mark(before + said[start : start + step])
        found.append(before)
    return found


class ToldNode(Protocol):
    """What listeners use of a node of the prefix cache. mark: empty if not computed yet. told: it was reported as
    published."""

    key: tuple[int | str, ...]
    mark: bytes
    told: bool

    @property
    def parent(self) -> ToldNode | None:
        """The block before this one; None for a root, whose key is its salt."""
        ...

    @property
    def alive(self) -> bool:
        """Is it still in the tree?"""
        ...


class Listener(Protocol):
    """Is called when a cache's blocks come and go."""

    def published(self, nodes: Iterable[ToldNode]) -> None:
        """The contents of these blocks have been written."""
        ...

    def gone(self, node: ToldNode) -> None:
        """No hit can end behind this block any more."""
        ...

    def take(self) -> tuple[bytes, bytes]:
        """The joined marks of blocks published since the last call, and those of blocks that are gone since then."""
        ...


class NoListener:
    """The listener of an engine that nobody picks among others."""

    def published(self, nodes: Iterable[ToldNode]) -> None:
        """Nothing is kept."""

    def gone(self, node: ToldNode) -> None:
        """Nothing is kept."""

    def take(self) -> tuple[bytes, bytes]:
        """Nothing."""
        return b"", b""


class CacheEvents:
    """Keeps changes until they are taken. If a block came and went in between, only its end is reported."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bool] = {}

    def published(self, nodes: Iterable[ToldNode]) -> None:
        """Nodes that have left the tree are skipped: their step failed, or they were evicted before its commit."""
        for node in nodes:
            if node.alive and not node.told:
                node.told = True
                self.changes[_mark_of(node)] = True

    def gone(self, node: ToldNode) -> None:
        """Nodes that were never reported are skipped."""
        if node.told:
            node.told = False
            self.changes[_mark_of(node)] = False

    def take(self) -> tuple[bytes, bytes]:
        """See Listener."""
        if not self.changes:
            return b"", b""
        changes, self.changes = self.changes, {}
        return (
            b"".join(mark for mark, there in changes.items() if there),
            b"".join(mark for mark, there in changes.items() if not there),
        )


def _mark_of(node: ToldNode) -> bytes:
    """A node's mark; computed once, from the nearest ancestor that has one."""
    todo: list[ToldNode] = []
    at: ToldNode | None = node
    while at is not None and not at.mark:
        todo.append(at)
        at = at.parent
    mark = b"" if at is None else at.mark
    for each in reversed(todo):
        mark = root_mark(str(each.key[0])) if each.parent is None else next_mark(mark, each.key)  # type: ignore[arg-type]
        each.mark = mark
    return mark
