"""An expression less a few texts. Owns: writing what a portable expression matches beside texts that are listed.

The grammar engine has no difference of expressions in a schema. A text is followed character by character: where it
leaves every listed text, the rest of the expression stands as it is. Must not know: schemas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.structured.classes import Ranges, complement, normalise
from tokenmill.structured.regex import Alt, Chars, Item, Rep, Seq, read, width_of, write

Rest = tuple[Item, ...]
"""What may follow, one after the other."""


@dataclass
class _Place:
    """A beginning of listed texts: where each next character leads, and is one of them complete?"""

    after: dict[str, _Place] = field(default_factory=dict)
    complete: bool = False


def without(portable: str, texts: frozenset[str]) -> str | None:
    """An expression for what `portable` matches and `texts` does not hold; None: nothing."""
    start = _Place()
    for text in sorted(texts):
        at = start
        for char in text:
            at = at.after.setdefault(char, _Place())
        at.complete = True
    found = _less([(read(portable),)], start)
    return None if found is None else write(found)


def _less(rests: list[Rest], place: _Place) -> Alt | None:
    """What one of `rests` matches and no listed text, from `place` on, is."""
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
