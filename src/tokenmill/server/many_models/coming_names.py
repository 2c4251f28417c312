"""Names of adapters that engines are reading. Owns: that no other model takes such a name before it is served.

Reading takes a while, and in that time other requests load adapters and add models. Must not know: HTTP, engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenmill.server.adapters import AdapterBook


@dataclass(slots=True)
class ComingNames:
    """By name, the adapters of which model it is about to join, once for each load."""

    books: dict[str, list[AdapterBook]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.books

    def elsewhere(self, name: str, book: AdapterBook) -> bool:
        """Is an adapter of this name being read for another model?"""
        return any(each is not book for each in self.books.get(name, ()))

    @contextlib.contextmanager
    def held(self, name: str, book: AdapterBook) -> Iterator[None]:
        """Hold the name while this context lasts."""
        self.books.setdefault(name, []).append(book)
        try:
            yield
        finally:
            self.books[name].pop()  # all that are held at one time are the same
            if not self.books[name]:
                del self.books[name]
