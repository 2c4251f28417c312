"""Numbers that no double holds: `1e999` is JSON, but most programs read it as infinity. Owns: seeing, from what was
said and what may follow, that such a number would be written, and forbidding the tokens that would write it.

The grammar engine's numbers have no such limit. After a digit of a JSON number, at least one of `,`, `}`, `]`, white
space or the end may follow, and no quote; inside a string a quote may. Must not know: grammars, walks.
"""

from __future__ import annotations

import re

EXPONENT_DIGITS = 2
MOST_DIGITS = 180
"""Before an exponent of 99 and after one more token of digits the number is still below 1e308."""
_EXPONENT = re.compile(rb"[0-9][eE][+-]?([0-9]*)\Z")
_RUN = re.compile(rb"[0-9]{%d}\Z" % MOST_DIGITS)
_LEADING = re.compile(rb"[0-9]*")
_LARGE = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{%d}" % (EXPONENT_DIGITS + 1))
_ENDS = frozenset(b"0123456789eE+-")
_STOPS = (b",", b"}", b"]", b" ", b"\n")


class Numerals:
    """The digits of one vocabulary."""

    def __init__(self, table: list[bytes], end_ids: frozenset[int]) -> None:
        ids = {piece: i for i, piece in enumerate(table) if len(piece) == 1}
        leading = [(i, len(_LEADING.match(piece)[0])) for i, piece in enumerate(table) if piece[:1].isdigit()]  # type: ignore[index]
        self.table = table
        self.longer = [sum(1 << i for i, n in leading if n > most) for most in range(EXPONENT_DIGITS + 1)]
        self.large = sum(1 << i for i, piece in enumerate(table) if piece[-1:].isdigit() and _LARGE.match(piece))
        self.stops = sum(1 << i for i in {*end_ids, *(ids[s] for s in _STOPS if s in ids)})
        self.quote = 1 << ids[b'"'] if b'"' in ids else 0
        self.letter = 1 << ids[b"q"] if b"q" in ids else 0  # begins no value; most strings allow it

    def bounded(self, mask: bytes, said: list[int]) -> bytes:
        """The mask without tokens that would make a number too large for a double."""
        if self.large:  # hardly any vocabulary has such tokens
            mask = _without(mask, self.large, 0, self.letter)
        last = self.table[said[-1]] if said and said[-1] < len(self.table) else b""
        if not last or last[-1] not in _ENDS:
            return mask
        tail = self._tail(said, 8)
        if (found := _EXPONENT.search(tail)) is not None:
            stops = self.stops if found[1] else 0
            return _without(mask, self.longer[max(0, EXPONENT_DIGITS - len(found[1]))], stops, self.quote)
        if tail.isdigit() and _RUN.search(self._tail(said, MOST_DIGITS)):
            return _without(mask, self.longer[0], self.stops, self.quote)
        return mask

    def _tail(self, said: list[int], most: int) -> bytes:
        size = len(self.table)
        return b"".join(self.table[i] for i in said[-most:] if i < size)


def _without(mask: bytes, forbidden: int, some: int, none: int) -> bytes:
    """A mask without some tokens, if it allows `some` of those (0: whatever it allows), `none` of these, and others."""
    bits = int.from_bytes(mask, "little")
    left = bits & ~forbidden
    if left == bits or not left or bits & none or (some and not bits & some):
        return mask
    return left.to_bytes(len(mask), "little")
