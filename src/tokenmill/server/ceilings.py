"""What a body may hold. Owns: counting strings, containers, members, values, depth and numbers in the bytes themselves.

Two megabytes of `{}` become a gigabyte of objects, so a body is refused before anything becomes an object. The check
goes slice by slice, so that no single call keeps other threads waiting. Text that is not JSON passes here; the decoder
refuses it. Must not know: schemas, HTTP.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import msgspec

from tokenmill.core.errors import ParameterError, TooLargeError

MOST_STRINGS = 1 << 17
"""Most strings in a body. Names of members count as well."""
MOST_CONTAINERS = 1 << 16
MOST_MEMBERS = 1 << 16
MOST_VALUES = 1 << 19
"""Most values in a body. Most of them are token ids; OpenAI takes 300,000 in one request for embeddings."""
MOST_DEPTH = 128
MOST_FIELDS = 512
"""Most fields of the body itself, known or not."""
LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1
MOST_NAME = 128
SLICE = 1 << 18
_MOST_DIGITS = 4096
_BLANK = b" \t\r\n"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ANY_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19
_EXPONENT = re.compile(rb"[eE]\+?[0-9]{3}")
_TOKEN = re.compile(rb"[0-9.eE+\-]+")
_MOST_LONG = 1 << 14
"""Most numbers that are long enough to need a check of their own."""


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Counts:
    """How many members all objects of a JSON text have, and how many lists and objects there are."""

    members: int
    containers: int


def check_ceilings(data: bytes) -> Counts:
    """Raise TooLargeError or ParameterError for the first ceiling that a JSON text exceeds."""
    found = _count(data)
    if wrong := found.end():
        field = _field_with_number(data)
        shown = wrong[:40] + ("..." if len(wrong) > 40 else "")
        where = field or "The body"
        raise ParameterError(f"{where} holds the number {shown}, which 64 bits cannot hold.", param=field)
    return Counts(found.members, found.containers)


def _field_with_number(data: bytes) -> str | None:
    """The field of the body in which a number is too large."""
    try:
        found = _fields(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the text is not even JSON
    return next((name[:MOST_NAME] for name, value in found.items() if _count(bytes(value)).end()), None)


def _count(data: bytes) -> _Counter:
    """Count a whole text. Raises if a count is too high."""
    counter = _Counter()
    start, inside = 0, 0
    while start < len(data):
        end = _slice_end(data, start)
        part = data[start:end]
        if b"\\" in part:  # pairs first, so that a backslash that remains before a quote belongs to that quote
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = part.count(b'"')
        counter.add_quotes(quotes)
        pieces = part.split(b'"')
        counter.add(b'"'.join(pieces[inside::2]).translate(None, _BLANK))
        inside = (inside + quotes) & 1
        start = end
    return counter


def _slice_end(data: bytes, start: int) -> int:
    """A place before `end` where a slice does not cut an escape in two: after an even number of backslashes."""
    end = min(len(data), start + SLICE)
    part = data[start:end]
    odd = (len(part) - len(part.rstrip(b"\\"))) & 1
    return min(len(data), end + odd)


class _Counter:
    """The counts of one text so far. `rest`: a number that may continue in the next slice."""

    def __init__(self) -> None:
        self.quotes = self.containers = self.members = self.values = 0
        self.depth = self.long = 0
        self.rest = b""
        self.wrong: str | None = None

    def add_quotes(self, count: int) -> None:
        self.quotes += count
        if self.quotes > 2 * MOST_STRINGS:
            _refuse(MOST_STRINGS, "strings and names")

    def add(self, text: bytes) -> None:
        """Count another piece of the text outside of strings."""
        opened = text.count(b"[") + text.count(b"{")
        self.containers += opened
        self.members += text.count(b":")
        self.values += text.count(b",") + opened
        if self.containers > MOST_CONTAINERS:
            _refuse(MOST_CONTAINERS, "lists and objects")
        if self.members > MOST_MEMBERS:
            _refuse(MOST_MEMBERS, "members of objects")
        if self.values > MOST_VALUES:
            _refuse(MOST_VALUES, "values")
        self._descend(text)
        text = self.rest + text
        cut = 1 + max(text.rfind(mark) for mark in (b",", b"[", b":", b"{"))
        self.rest = text[cut:]
        if len(self.rest) > _MOST_DIGITS:
            raise ParameterError(f"The body holds a number of more than {_MOST_DIGITS} digits.")
        self._check_numbers(text[:cut])

    def end(self) -> str | None:
        """The text has ended. Returns the first number that is too large."""
        self._check_numbers(self.rest)
        return self.wrong

    def _descend(self, text: bytes) -> None:
        for bracket in text.translate(None, _NOT_BRACKETS):
            self.depth += 1 if bracket in b"[{" else -1
            if self.depth > MOST_DEPTH:
                raise ParameterError(f"The body is nested more than {MOST_DEPTH} levels deep.")

    def _check_numbers(self, text: bytes) -> None:
        """Find a number that neither 64 bits nor a double can hold: no process could pass it on to another."""
        digits = text.translate(_ANY_DIGIT)
        exponents = b"e" in text or b"E" in text
        places = [found.start() for found in _EXPONENT.finditer(text)] if exponents else []
        count = digits.count(_LONG)
        self.long += count + len(places)
        if self.long > _MOST_LONG:
            _refuse(_MOST_LONG, "numbers of 19 digits or large exponents")
        place = 0
        for _ in range(count):
            place = digits.index(_LONG, place)
            places.append(place)
            place += len(_LONG)
        wrong = (number for number in (_number_at(text, place) for place in places) if not _fits(number))
        self.wrong = self.wrong or next(wrong, None)


def _number_at(text: bytes, place: int) -> str:
    """The number around a place in a text without strings."""
    start = max(0, place - _MOST_DIGITS)
    for mark in (b",", b"[", b":", b"{"):
        start = max(start, text.rfind(mark, start, place) + 1)
    found = _TOKEN.match(text, start)
    return found.group().decode("ascii") if found is not None else ""


def _fits(number: str) -> bool:
    if len(number) > _MOST_DIGITS:
        return False
    try:
        if number.lstrip("-").isdigit():
            return LEAST_INTEGER <= int(number) <= MOST_INTEGER
        return math.isfinite(float(number))
    except ValueError:
        return True  # not a number: the decoder says so


def _refuse(most: int, what: str) -> None:
    raise TooLargeError(f"The body holds more than {most} {what}; this server takes no more in one request.")
