"""An expression without some texts. Owns: writing an expression for what a portable expression matches, except listed
texts.

The grammar engine cannot subtract expressions in a schema. So a text is followed character by character: where it
leaves all listed texts, the rest of the expression is unchanged. Must not know: schemas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.structured.classes import Ranges, complement, normalise
from tokenmill.structured.regex import Alt, Chars, Item, Rep, Seq, read, width_of, write

Rest = tuple[Item, ...]
"""The items that must follow, in order."""


@dataclass
class _Place:
    """A common beginning of listed texts: where each next character leads, and whether one of them is complete."""

    after: dict[str, _Place] = field(default_factory=dict)
    complete: bool = False


def without(portable: str, texts: frozenset[str]) -> str | None:
    """An expression for what `portable` matches except `texts`; None: nothing is left."""
    start = _Place()
    for text in sorted(texts):
        at = start
        for char in text:
            at = at.after.setdefault(char, _Place())
        at.complete = True
    found = _less([(read(portable),)], start)
    return None if found is None else write(found)


def _less(rests: list[Rest], place: _Place) -> Alt | None:
    """What one of `rests` matches, except the ends of listed texts from `place` on."""
    heads = [head for rest in rests for head in _heads(rest)]
    taken = normalise(tuple((ord(c), ord(c)) for c in place.after))
    options = [Seq((Chars(free), *rest)) for chars, rest in heads if (free := _beside(chars, taken))]
    for char, after in place.after.items():
        following = list(dict.fromkeys(rest for chars, rest in heads if _holds(chars, ord(char))))
        found = _less(following, after) if following else None
        if found is not None:
            options.append(Seq((Chars(((ord(char), ord(char)),)), found)))
    if not place.complete and any(width_of(Seq(rest))[0] == 0 for rest in rests):
        options.append(Seq(()))
    return Alt(tuple(dict.fromkeys(options))) if options else None


def _heads(rest: Rest) -> list[tuple[Ranges, Rest]]:
    """Every way to begin: the first character's class, and what may follow it."""
    if not rest:
        return []
    first, others = rest[0], rest[1:]
    if isinstance(first, Chars):
        return [(first.ranges, others)]
    if isinstance(first, Alt):
        return [head for option in first.options for head in _heads((*option.items, *others))]
    assert isinstance(first, Rep), "a portable expression has no anchors"
    if first.high == 0:
        return _heads(others)
    more = Rep(first.item, max(first.low - 1, 0), None if first.high is None else first.high - 1)
    found = [(chars, (*tail, more, *others)) for chars, tail in _heads((first.item,))]
    may_be_empty = first.low == 0 or width_of(first.item)[0] == 0
    return found + _heads(others) if may_be_empty else found


def _beside(chars: Ranges, taken: Ranges) -> Ranges:
    return complement(normalise((*complement(chars), *taken)))


def _holds(chars: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in chars)
