"""What follows from itself: of which named things something holds. Owns: going through them until nothing is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def settled(things: Mapping[str, T], holds: Callable[[T, set[str]], bool]) -> set[str]:
    """The names of those of which something holds, given the names of which it is known to hold."""
    known: set[str] = set()
    order, found = list(things), True
    while found:  # forwards, then backwards, so that a chain of references is followed in one pass
        found = False
        for name in order:
            if name not in known and holds(things[name], known):
                known.add(name)
                found = True
        order.reverse()
    return known
