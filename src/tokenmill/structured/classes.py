"""Classes of characters. Owns: sets of code points as ranges, and what \\d, \\w and \\s mean.

Must not know: expressions.

Readers disagree about the classes: in ECMA-262 a word character is ASCII; in Python's `re` and in Rust it is a letter
of any script. What the model says must hold for all readers, so a class is read narrowly where its characters are
wanted and widely where they are excluded.
"""

from __future__ import annotations

import unicodedata
from functools import cache

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))
DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = (
    (9, 13),
    (32, 32),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)
"""What both ECMA-262 and Python call a space."""
_SPACE_OF_SOME: Ranges = (*SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
NEWLINE: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_MARKS: Ranges = (
    *((0, 0xFF), (0x2000, 0x206F), (0x20A0, 0x20CF), (0x2190, 0x23FF), (0x2500, 0x27BF)),
    *((0x3000, 0x303F), (0xFF00, 0xFF0F), (0x1F300, 0x1FAFF)),
)
"""Blocks of punctuation, symbols and pictures: where \\W is taken from."""


def normalise(ranges: Ranges) -> Ranges:
    """Sorted, joined, without surrogates."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    # Joining may have closed the gap that surrogates leave.
    return tuple(_without_surrogates(tuple(found)))


def complement(ranges: Ranges) -> Ranges:
    """Every other character; `ranges` are normalised."""
    at, found = 0, []
    for low, high in ranges:
        if low > at:
            found.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        found.append((at, LAST))
    return normalise(tuple(found))


@cache
def named(letter: str, wide: bool) -> Ranges | None:
    """The characters of \\d, \\w, \\s or an opposite; None for another letter. `wide`: all that any reader counts."""
    if letter in ("D", "W", "S"):
        other = named(letter.lower(), not wide)
        return None if other is None else complement(other)
    if letter == "d":
        return _digits_of_some() if wide else DIGIT
    if letter == "w":
        return complement(_no_words()) if wide else WORD
    if letter == "s":
        return normalise(_SPACE_OF_SOME) if wide else SPACE
    return None


@cache
def _digits_of_some() -> Ranges:
    """Decimal digits of all scripts, which lie in the first two planes."""
    return normalise(tuple((code, code) for code in range(0x20000) if chr(code).isdecimal()))


@cache
def _no_words() -> Ranges:
    """Characters that no reader counts as part of a word."""
    codes = (code for low, high in _MARKS for code in range(low, high + 1))
    return normalise(tuple((code, code) for code in codes if _is_mark(unicodedata.category(chr(code)))))


def _is_mark(category: str) -> bool:
    return category == "Cc" or (category[0] in "PSZ" and category != "Pc")


def _without_surrogates(ranges: Ranges) -> list[tuple[int, int]]:
    found = []
    for low, high in ranges:
        for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if part[0] <= part[1]:
                found.append(part)
    return found
