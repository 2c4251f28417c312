"""Does a text match a portable expression? Owns: an answer in bounded time, and the ways in which an expression begins.

Python's `re` tries all ways to divide a text among repetitions, which may take for ever. Where it might, a text is
followed character by character, all ways at once. Must not know: schemas.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tokenmill.structured.classes import Ranges
from tokenmill.structured.regex import Alt, Chars, Item, RegexError, Rep, Seq, read, width_of

Rest = tuple[Item, ...]
"""The items that must follow, in order."""
MOST_OPEN = 2
"""With this many repetitions of no fixed count, one after the other, `re` takes the square of a text's length."""
MOST_AGAIN = 4
"""A choice may come so many times before there are too many ways through it."""


def matches(pattern: str, text: str) -> bool:
    """Does this portable expression match the whole text?"""
    known = _known(pattern)
    return known.fullmatch(text) is not None if isinstance(known, re.Pattern) else followed(known, text)


def followed(parts: Alt, text: str) -> bool:
    """Does the expression of these parts match the whole text? In a time that grows as the text does."""
    rests: set[Rest] = {(parts,)}
    for char in text:
        rests = {after for rest in rests for chars, after in _begun(rest) if holds(chars, ord(char))}
    return any(width_of(Seq(rest))[0] == 0 for rest in rests)


def heads(rest: Rest) -> list[tuple[Ranges, Rest]]:
    """Every way to begin: the first character's class, and what may follow it."""
    if not rest:
        return []
    first, others = rest[0], rest[1:]
    if isinstance(first, Chars):
        return [(first.ranges, others)]
    if isinstance(first, Alt):
        return [head for option in first.options for head in heads((*option.items, *others))]
    assert isinstance(first, Rep), "a portable expression has no anchors"
    if first.high == 0:
        return heads(others)
    more = Rep(first.item, max(first.low - 1, 0), None if first.high is None else first.high - 1)
    found = [(chars, (*tail, more, *others)) for chars, tail in heads((first.item,))]
    may_be_empty = first.low == 0 or width_of(first.item)[0] == 0
    return found + heads(others) if may_be_empty else found


def holds(chars: Ranges, code: int) -> bool:
    """Is the character in the class?"""
    return any(low <= code <= high for low, high in chars)


_begun = lru_cache(maxsize=4096)(heads)


@lru_cache(maxsize=512)
def _known(pattern: str) -> re.Pattern[str] | Alt:
    try:
        parts = read(pattern)
    except RegexError:  # our own expressions for other texts are nested deeply, and no text divides in two ways there
        return re.compile(pattern)
    return re.compile(pattern) if _open(parts) <= MOST_OPEN else parts


def _open(node: Item | Seq) -> int:
    """How many repetitions a text can be divided among; too many if there are other ways inside of a repetition."""
    if isinstance(node, Rep):
        inner = _open(node.item)
        if node.high is not None and node.high <= MOST_AGAIN:
            return (node.low != node.high) + inner * node.high
        return MOST_OPEN + 1 if inner or _chooses(node.item) else int(node.low != node.high)
    if isinstance(node, Alt):
        return max(map(_open, node.options), default=0)
    return sum(map(_open, node.items)) if isinstance(node, Seq) else 0


def _chooses(node: Item | Seq) -> bool:
    if isinstance(node, Alt):
        return len(node.options) > 1 or any(map(_chooses, node.options))
    if isinstance(node, Rep):
        return _chooses(node.item)
    return isinstance(node, Seq) and any(map(_chooses, node.items))
