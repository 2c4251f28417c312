"""Text that arrives in pieces, read as if it were complete. Owns: waiting for more text exactly where a result depends
on it.

Every reader is a generator that yields when it needs more text. No reader looks at where pieces end, so the result does
not depend on how the text was cut. Each character is read once. Must not know: formats, messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from tokenmill.text.messages.values import escaped_controls, without_halves

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

_IN_JSON = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<]")
_PYTHON = {"": re.compile(r"[\"'()\[\]{},]"), "'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_NOT_SPACE = re.compile(r"\S")


class Markers:
    """Texts to look for. Among those that begin at the same place, the longest counts."""

    __slots__ = ("find", "longest", "prefixes", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({t for t in texts if t}, key=lambda t: (-len(t), t)))
        self.find = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self.prefixes = frozenset(t[:n] for t in self.texts for n in range(1, len(t)))
        self.longest = max(map(len, self.texts), default=0)


@lru_cache(maxsize=1024)
def markers(*texts: str) -> Markers:
    """The Markers of these texts, cached."""
    return Markers(texts)


class ArrivingText:
    """The text so far. While `kept` is a list, it collects everything that is read."""

    __slots__ = ("at", "ended", "kept", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Append text."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def _pass(self, end: int) -> str:
        found = self.text[self.at : end]
        self.at = end
        if self.kept is not None:
            self.kept.append(found)
        return found

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters, fewer only at the end."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def skip(self, count: int) -> None:
        """Pass `count` characters that have arrived."""
        self._pass(self.at + count)

    def spaces(self) -> Reading[str]:
        """Pass white space; -> it."""
        return (yield from self.span(_NOT_SPACE))

    def span(self, stop: re.Pattern[str]) -> Reading[str]:
        """Pass everything before the first character that `stop` matches; -> it."""
        parts = []
        while True:
            found = stop.search(self.text, self.at)
            parts.append(self._pass(len(self.text) if found is None else found.start()))
            if found is not None or self.ended:
                return "".join(parts)
            yield

    def word(self, word: str) -> Reading[bool]:
        """Pass this text if it comes next."""
        found = yield from self.sees(word)
        if found:
            self.skip(len(word))
        return found

    def sees(self, word: str) -> Reading[bool]:
        """Does this text come next?"""
        known = 0
        while known < len(word):
            yield from self.peek(known + 1)
            seen = self.text[self.at : self.at + len(word)]
            if len(seen) <= known or not word.startswith(seen):
                return False
            known = len(seen)
        return True

    def until(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Give everything before the next marker to `sink` and pass the marker; -> it, "" at the end."""
        while True:
            found = markers.find.search(self.text, self.at)
            begin = None if self.ended else self._maybe(markers)
            if found is not None and (begin is None or found.start() < begin):
                if found.start() > self.at:
                    sink(self._pass(found.start()))
                self.skip(len(found[0]))
                return found[0]
            stop = len(self.text) if begin is None else begin
            if stop > self.at:
                sink(self._pass(stop))
            if self.ended:
                return ""
            yield

    def _maybe(self, markers: Markers) -> int | None:
        """Where the text's end could be the beginning of a marker."""
        size = len(self.text)
        for i in range(max(self.at, size - markers.longest + 1), size):
            if self.text[i:] in markers.prefixes:
                return i
        return None

    # ------------------------------------------------------------ JSON

    def string(self) -> Reading[str | None]:
        """A JSON string's value; None if there is none, or if it is broken."""
        parts: list[str] = []
        if not (yield from self.json(parts.append, '"')):
            return None
        try:
            value = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return without_halves(value) if isinstance(value, str) else None

    def json(self, sink: Sink, kinds: str = "") -> Reading[bool]:
        """Give one JSON value, as written, to `sink`; False if it does not end (or begins with none of `kinds`).

        Brackets are counted, not matched: broken JSON inside stays as the model wrote it, except that line ends and the
        like within a string become escapes."""
        first = yield from self.peek()
        if not first or (kinds and first not in kinds):
            return False
        if first not in '"{[':
            return (yield from self._scalar(sink))
        depth, quoted, place = 0, False, self.at
        given = sink

        def inner(text: str) -> None:
            given(escaped_controls(text))

        while True:
            found = yield from self._mark(_IN_STRING if quoted else _IN_JSON, place, sink)
            if found is None:
                return False
            place = found.end()
            if found[0] == "\\":
                place += 1
            elif found[0] == '"':
                quoted = not quoted
            else:
                depth += 1 if found[0] in "{[" else -1
            if depth <= 0 and not quoted:
                sink(self._pass(place))
                return True
            if found[0] == '"':  # what is passed at once lies in a string, or outside of all
                sink = inner if quoted else given
                (given if quoted else inner)(self._pass(place))

    def _mark(self, marks: re.Pattern[str], place: int, sink: Sink) -> Reading[re.Match[str] | None]:
        """The next character from `place` on that `marks` matches, a backslash only with what follows it; None at the
        end. Text that is waited behind goes to `sink`."""
        while True:
            found = marks.search(self.text, place)
            cut = found is not None and found[0] == "\\" and found.end() == len(self.text)
            if found is not None and not cut:
                return found
            stop = found.start() if found is not None and not self.ended else len(self.text)
            if stop > self.at:
                sink(self._pass(stop))
            if self.ended:
                return None
            yield
            place = self.at

    def python(self, sink: Sink) -> Reading[bool]:
        """One Python literal up to the comma or bracket behind it, which stays; False if neither comes."""
        depth, quote, place = 0, "", self.at
        while True:
            found = yield from self._mark(_PYTHON[quote], place, sink)
            if found is None:
                return False
            place = found.end()
            if found[0] == "\\":
                place += 1
            elif found[0] in "\"'":
                quote = "" if quote else found[0]
            elif depth == 0 and found[0] in ",)]}":
                if found.start() > self.at:
                    sink(self._pass(found.start()))
                return True
            elif found[0] != ",":
                depth += 1 if found[0] in "([{" else -1

    def _scalar(self, sink: Sink) -> Reading[bool]:
        begun = False
        while True:
            found = _AFTER_SCALAR.search(self.text, self.at)
            stop = len(self.text) if found is None else found.start()
            if stop > self.at:
                begun = True
                sink(self._pass(stop))
            if found is not None or self.ended:
                return begun and found is not None
            yield
