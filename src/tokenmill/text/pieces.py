"""Encoding long texts in pieces. Owns: where a text may be cut so that its tokens are those of the whole.

While it encodes a text, the library takes up to 600 times its size in memory, and frees it only at the end. A cut is at
the end of a word, and only where a window around it has the same tokens cut and whole. Must not know: requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tokenmill.core.errors import TooLargeError

PIECE = 1 << 17
"""About how many characters a piece has. Texts up to twice as long are encoded whole."""
MOST_WHOLE = 4 << 20
"""Most bytes of UTF-8 without a place to cut. Only a text that is one endless word has more."""
_AROUND = 128
_TRIES = 32
"""Places to try before a piece is made longer by another piece."""
_SLICE = 1 << 16
"""Characters searched in one call, during which no other thread runs."""
_WORD_ENDS = re.compile(r"(?<=\S)(?=\s)|(?<=\w)(?=\W)")

Encode = Callable[[str], list[int]]


def is_long(text: str) -> bool:
    """Is a text cut into pieces?"""
    return len(text) > 2 * PIECE


def encode_in_pieces(text: str, encode: Encode) -> list[int]:
    """The ids that `encode` gives for the whole text. Each piece is encoded together with the end of the one before,
    whose ids are dropped: so nothing that belongs to a text's beginning gets into its middle."""
    ids: list[int] = []
    shared: dict[int, int] = {}  # one object per id: a separate number takes four times its place in a list
    begin = 0
    while begin < len(text):
        end = _next_cut(text, begin, encode)
        head = text[max(0, begin - _AROUND) : begin]
        known, row = (encode(head) if head else []), encode(head + text[begin:end])
        if row[: len(known)] != known:
            return encode(text)  # later text changed an earlier end: such a tokenizer must read a text whole
        ids += [shared.setdefault(index, index) for index in row[len(known) :]]
        begin = end
    return ids


def _next_cut(text: str, begin: int, encode: Encode) -> int:
    least = begin + PIECE
    while least + PIECE < len(text):
        _check_whole(text, begin, least)
        for place, _ in zip(_word_ends(text, least, least + PIECE), range(_TRIES), strict=False):
            if _is_seam(text, place, encode):
                return place
        least += PIECE
    _check_whole(text, begin, len(text))
    return len(text)


def _word_ends(text: str, begin: int, end: int) -> Iterator[int]:
    for start in range(begin, end, _SLICE):
        for found in _WORD_ENDS.finditer(text, start, min(end, start + _SLICE) + 1):
            yield found.start()


def _is_seam(text: str, place: int, encode: Encode) -> bool:
    before, after = text[place - _AROUND : place], text[place : place + _AROUND]
    known = encode(before)
    return encode(before + after)[: len(known)] == known


def _check_whole(text: str, begin: int, end: int) -> None:
    if end - begin > MOST_WHOLE // 4 and len(text[begin:end].encode()) > MOST_WHOLE:
        raise TooLargeError(
            f"The text has more than {MOST_WHOLE} bytes without a place where a word ends, which is more than is read "
            "at once: put blanks or line breaks into it, or shorten it."
        )
