"""What is kept for later, for every API. Owns: who may see it, how much there is, and what is dropped to make room.

Things are kept as encoded bytes, and these are counted. If there is too much, the key that keeps most loses its least
recently used thing: no key can push out another's. Must not know: routes, what any API keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from tokenmill.core.errors import TooLargeError
from tokenmill.server.errors import HttpError

MOST = 4096
"""Most objects of all kinds and keys."""
MOST_BYTES = 256 << 20
MOST_BYTES_EACH = 32 << 20
"""Most bytes of one object when it is added, or when it grows. An answer comes on top."""
OBJECTS = 2048
"""Bytes that count for the Python objects around an object's bytes."""


@dataclass(slots=True, eq=False)
class Kept:
    """An object that is kept for a client. It is found by its owner's key and its id. Only the store changes `number`
    and `weight`."""

    kind: ClassVar[str] = "thing"
    param: ClassVar[str] = "id"
    """The name of its id in requests."""
    owner: str
    id: str
    number: int = field(default=0, init=False)
    """Its place in the order of creation."""
    weight: int | None = field(default=None, init=False)
    """The bytes that the store counts for it. None: it is not in the store."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return OBJECTS

    @property
    def busy(self) -> bool:
        """Is something still writing to it? Then it is not dropped to make room."""
        return False

    def dropped(self) -> None:
        """Its owner has deleted it. End what still runs for it."""


K = TypeVar("K", bound=Kept)


@dataclass(slots=True)
class Shelf:
    """The objects of one key, the least recently used first."""

    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    size: int = 0


class Store:
    """Kept objects by key and id, limited in number and bytes."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.shelves: dict[str, Shelf] = {}
        self._made = 0

    @property
    def size(self) -> int:
        """The bytes of all objects."""
        return sum(shelf.size for shelf in self.shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self.shelves.values())

    def add(self, kept: Kept) -> None:
        """Keep an object, and drop others that nothing writes to if room is short. An object with the same key and id
        is replaced."""
        self.check(kept, 0)
        shelf = self.shelves.setdefault(kept.owner, Shelf())
        if kept.id in shelf.kept:
            self.drop(shelf.kept[kept.id])
            shelf = self.shelves.setdefault(kept.owner, Shelf())
        self._made += 1
        kept.number, kept.weight = self._made, 0
        shelf.kept[kept.id] = kept
        self.weigh(kept)
        if self._over():
            self.drop(kept)
            raise HttpError(503, "The store is full of answers that are still being written; try again.", retry_after=5)

    def check(self, kept: Kept, more: int) -> None:
        """Refuse if the object would be too large with this many more bytes."""
        size, most = kept.size + more, min(MOST_BYTES_EACH, self.most_bytes)
        if size > most:
            raise TooLargeError(
                f"A {kept.kind} of {size:,} bytes is too large to be stored; {most:,} are kept at most.",
                param=kept.param,
            )

    def weigh(self, kept: Kept) -> None:
        """Count an object again after it has grown or shrunk."""
        if kept.weight is None:
            return
        size = kept.size
        self.shelves[kept.owner].size += size - kept.weight
        kept.weight = size
        while self._over():
            victim = self._victim(kept)
            if victim is None:
                return
            self.drop(victim)

    def holds(self, kept: Kept) -> bool:
        """Is it in the store?"""
        return kept.weight is not None

    def find(self, kind: type[K], name: str, owner: str) -> K:
        """The object of this kind and id that this key made. Raises 404 if there is none."""
        shelf = self.shelves.get(owner)
        found = None if shelf is None else shelf.kept.get(name)
        if shelf is None or not isinstance(found, kind):
            text = f"{kind.kind.capitalize()} with id {name[:100]!r} not found: it was never here, or too long ago."
            raise HttpError(404, text, param=kind.param)
        shelf.kept.move_to_end(name)
        return found

    def all(self, kind: type[K], owner: str) -> list[K]:
        """All objects of a kind that this key keeps, the oldest first."""
        shelf = self.shelves.get(owner, Shelf())
        return sorted((k for k in shelf.kept.values() if isinstance(k, kind)), key=lambda kept: kept.number)

    def delete(self, kind: type[K], name: str, owner: str) -> None:
        """Delete an object, and end what still runs for it."""
        kept = self.find(kind, name, owner)
        kept.dropped()
        self.drop(kept)

    def drop(self, kept: Kept) -> None:
        """Remove an object, if it is in the store."""
        if kept.weight is None:
            return
        shelf = self.shelves[kept.owner]
        shelf.size -= kept.weight
        kept.weight = None
        del shelf.kept[kept.id]
        if not shelf.kept:
            del self.shelves[kept.owner]

    def _over(self) -> bool:
        return len(self) > self.most or self.size > self.most_bytes

    def _victim(self, keep: Kept) -> Kept | None:
        """The least recently used object of the key that keeps most, except those that something still writes to."""
        crowded = len(self) > self.most
        shelves = sorted(self.shelves.values(), key=lambda s: len(s.kept) if crowded else s.size, reverse=True)
        idle = (kept for shelf in shelves for kept in shelf.kept.values() if not kept.busy and kept is not keep)
        return next(idle, None)
