"""An expression without some texts. Owns: writing an expression for what a portable expression matches, except listed
texts.

The grammar engine cannot subtract expressions in a schema. So a text is followed character by character: where it
leaves all listed texts, the rest of the expression is unchanged. Must not know: schemas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.structured.classes import Ranges, complement, normalise
from tokenmill.structured.matching import Rest, heads, holds
from tokenmill.structured.regex import Alt, Chars, Seq, read, width_of, write


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
    begun = [head for rest in rests for head in heads(rest)]
    taken = normalise(tuple((ord(c), ord(c)) for c in place.after))
    options = [Seq((Chars(free), *rest)) for chars, rest in begun if (free := _beside(chars, taken))]
    for char, after in place.after.items():
        following = list(dict.fromkeys(rest for chars, rest in begun if holds(chars, ord(char))))
        found = _less(following, after) if following else None
        if found is not None:
            options.append(Seq((Chars(((ord(char), ord(char)),)), found)))
    if not place.complete and any(width_of(Seq(rest))[0] == 0 for rest in rests):
        options.append(Seq(()))
    return Alt(tuple(dict.fromkeys(options))) if options else None


def _beside(chars: Ranges, taken: Ranges) -> Ranges:
    return complement(normalise((*complement(chars), *taken)))
