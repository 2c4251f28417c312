"""Objects whose names are counted. Owns: splitting a count into choices of listed names, none of which needs counting.

A choice says which optional names are there and which may be; all others are absent. The names are walked in order,
and what is left is free as soon as the count cannot go wrong any more, so there are as few choices as possible: one a
name for "at least one". Must not know: nodes, plain schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_CHOICES = 1000
MAX_NAMES = 10_000
"""Most names that all choices list together: each is a piece of the grammar."""


@dataclass(frozen=True, slots=True)
class Choice:
    """These optional names are `there`, `free` ones may be. unlisted: how many names that are not listed must come;
    None: none may."""

    there: tuple[str, ...]
    free: tuple[str, ...] = ()
    unlisted: int | None = 0


def choices(names: Sequence[str], lo: int, hi: int | None, *, opened: bool) -> list[Choice] | None:
    """Choices of lo..hi optional names, of which no two share a set of names; None: there are too many.

    opened: unlisted names count, too. Then at most one of them makes up for listed ones: it could come twice."""
    if hi is not None and hi < max(lo, 0):
        return []
    found: list[Choice] = []
    size = 0
    for choice in _walk(names, lo, hi, opened):
        found.append(choice)
        size += len(choice.there) + len(choice.free)
        if len(found) > MAX_CHOICES or size > MAX_NAMES:
            return None
    return found


def _walk(names: Sequence[str], lo: int, hi: int | None, opened: bool) -> Iterator[Choice]:
    """Every state that is walked on from leads to a choice."""
    stack: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    while stack:
        at, there = stack.pop()
        have, left = len(there), len(names) - at
        if have + left < lo - opened:
            continue
        if have == hi:
            yield Choice(there, (), None)
        elif (have >= lo and (hi is None or (have + left <= hi and not opened))) or not left:
            # With a most, whatever is there leaves another number of unlisted names: none is free in an open object.
            yield Choice(there, tuple(names[at:]), max(0, lo - have) if opened else None)
        elif have + left == lo - opened:
            yield Choice((*there, *names[at:]), (), 1 if opened else None)
        else:
            stack += [(at + 1, there), (at + 1, (*there, names[at]))]
