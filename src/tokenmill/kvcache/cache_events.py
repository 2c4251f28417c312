"""What a prefix cache holds, reported block by block to the router between engines. Owns: the marks that name a block
and everything before it, and which of them were published or lost since the last report.

A block is reported once the step that writes it is committed, because a plan may fail. A mark covers a salt and every
token up to the block's end; every process computes the same mark. Must not know: tensors, requests, engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

MARK_BYTES = 8


def salt_of(adapter: int, salt: str | None) -> str:
    """What keeps beginnings of one tenant and adapter apart from those of others."""
    return f"{adapter}\x00{salt or ''}" if adapter or salt else ""


def root_mark(salt: str) -> bytes:
    """The mark of no tokens."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=MARK_BYTES).digest()


def next_mark(before: bytes, keys: Iterable[int]) -> bytes:
    """The mark of a block that holds these keys, after one."""
    try:
        said = array("q", keys).tobytes()
    except OverflowError:  # a picture's keys may be longer
        said = repr(tuple(keys)).encode()
    return blake2b(before + said, digest_size=MARK_BYTES).digest()


def prompt_marks(keys: list[int], salt: str, block_size: int, most: int) -> list[bytes]:
    """One mark per full block of the first `most` keys."""
    mark, found = root_mark(salt), []
    for start in range(0, min(len(keys), most) - block_size + 1, block_size):
        mark = next_mark(mark, keys[start : start + block_size])
        found.append(mark)
    return found


class Told(Protocol):
    """What is read and kept of a node of the prefix cache. mark: none yet if empty; told: it was published."""

    key: tuple[int | str, ...]
    mark: bytes
    told: bool

    @property
    def parent(self) -> Told | None:
        """The block before it; None of a root, whose key is its salt."""
        ...

    @property
    def alive(self) -> bool:
        """Is it in the tree?"""
        ...


class Listener(Protocol):
    """Who wants to hear of a cache's blocks."""

    def published(self, nodes: Iterable[Told]) -> None:
        """What these blocks hold has been written."""
        ...

    def gone(self, node: Told) -> None:
        """No hit may end behind this block any more."""
        ...

    def take(self) -> tuple[bytes, bytes]:
        """Marks, one after the other: of blocks that were published, and of blocks that are gone, since last time."""
        ...


class NoListener:
    """Nobody chooses between engines."""

    def published(self, nodes: Iterable[Told]) -> None:
        """Nobody hears it."""

    def gone(self, node: Told) -> None:
        """Nobody hears it."""

    def take(self) -> tuple[bytes, bytes]:
        """Nothing."""
        return b"", b""


class CacheEvents:
    """Keeps what has changed, until it is taken. Of a block that came and went only the end is told."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bool] = {}

    def published(self, nodes: Iterable[Told]) -> None:
        """A node that is no longer in the tree went down with a step that failed, or was evicted before its commit."""
        for node in nodes:
            if node.alive and not node.told:
                node.told = True
                self.changes[_mark_of(node)] = True

    def gone(self, node: Told) -> None:
        """One that was never told is no news."""
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


def _mark_of(node: Told) -> bytes:
    """Worked out once per node, from the first ancestor that has one."""
    todo: list[Told] = []
    at: Told | None = node
    while at is not None and not at.mark:
        todo.append(at)
        at = at.parent
    mark = b"" if at is None else at.mark
    for each in reversed(todo):
        mark = root_mark(str(each.key[0])) if each.parent is None else next_mark(mark, each.key)  # type: ignore[arg-type]
        each.mark = mark
    return mark
