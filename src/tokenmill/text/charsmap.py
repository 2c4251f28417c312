"""A SentencePiece model's own replacements of characters. Owns: reading its table, and applying it to texts.

At each place of a text the longest entry of the table counts, as in SentencePiece. (The `tokenizers` library looks at
what a reader sees as one character, and loses marks that an entry does not cover.) Must not know: tokenizers, files.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tokenmill.core.errors import ModelError

_LEAF, _LABEL, _VALUE = 1 << 8, (1 << 31) | 0xFF, (1 << 31) - 1
_NOTHING = -1
_MOST_STEPS = 4_000_000
"""No table has as many nodes; a damaged one may lead back to where it began."""
_MOST_RUNS, _LONG = 16_384, 8
"""How many runs are remembered, and of how many characters."""


class CharsMap:
    """The table: a double-array trie over UTF-8, and the replacements that its leaves point to."""

    def __init__(self, data: bytes) -> None:
        size = struct.unpack_from("<I", data)[0] if len(data) > 4 else 0
        if not 0 < size <= len(data) - 4 or size % 4:
            raise _damaged()
        self.data = data
        self._units = array("I", struct.unpack_from(f"<{size // 4}I", data, 4))
        self._texts = data[4 + size :]
        self._new, later = self._characters()
        """Replacements of single characters."""
        self._alone, self._later = _any_of(self._new), _any_of(later)
        """Runs of characters that are replaced, and of those that may be the second of an entry, or a later one. Few
        texts have any of the latter."""
        self._runs: dict[str, str] = {}
        """What has become of runs of the latter."""

    def apply(self, text: str, kept: re.Pattern[str] | None = None) -> str:
        """The text with its replacements. What `kept` finds stays as it is; it has one group around everything."""
        if kept is None:
            return self._applied(text)
        parts = kept.split(text)
        parts[::2] = [self._applied(part) for part in parts[::2]]
        return "".join(parts)

    def _applied(self, text: str) -> str:
        made, done = list[str](), 0
        for found in self._later.finditer(text):
            start = max(found.start() - 1, 0)  # an entry may begin with any character
            made += (self._alone.sub(self._each, text[done:start]), self._run(text[start : found.end()]))
            done = found.end()
        made.append(self._alone.sub(self._each, text[done:] if done else text))
        return "".join(made)

    def _each(self, found: re.Match[str]) -> str:
        """A run of characters none of which belongs to a longer entry."""
        return "".join([self._new.get(char, char) for char in found[0]])

    def _run(self, text: str) -> str:
        """A run in which entries may have several characters."""
        new = self._runs.get(text)
        if new is None:
            at, made = 0, list[str]()
            while at < len(text):
                one, size = self._longest(text, at)
                made.append(one if size else text[at])
                at += size or 1
            new = "".join(made)
            if len(text) <= _LONG and len(self._runs) < _MOST_RUNS:
                self._runs[text] = new
        return new

    def _longest(self, text: str, at: int) -> tuple[str, int]:
        """The replacement of the longest entry there, and of how many characters it is; ("", 0): there is none."""
        node, found, end = self._children(0), _NOTHING, at
        for place in range(at, len(text)):
            node, value = self._walk(node, text[place])
            if value != _NOTHING:
                found, end = value, place + 1
            if node == _NOTHING:
                break
        return ("", 0) if found == _NOTHING else (self._text(found), end - at)

    def _walk(self, node: int, char: str) -> tuple[int, int]:
        """(the node behind a character, the place of its replacement); where there is none: _NOTHING."""
        value = _NOTHING
        for byte in char.encode("utf-8", "surrogatepass"):
            node ^= byte
            if node >= len(self._units) or self._units[node] & _LABEL != byte:
                return _NOTHING, _NOTHING
            node, value = self._inside(node)
        return node, value

    def _inside(self, place: int) -> tuple[int, int]:
        """(the node of a unit's children, the place of its replacement)."""
        node = self._children(place)
        valued = self._units[place] & _LEAF and node < len(self._units)
        return node, self._units[node] & _VALUE if valued else _NOTHING

    def _children(self, place: int) -> int:
        unit = self._units[place]
        return place ^ (unit >> 10) << ((unit & (1 << 9)) >> 6)

    def _text(self, place: int) -> str:
        return self._texts[place : self._texts.find(b"\0", place)].decode("utf-8", "replace")

    def _characters(self) -> tuple[dict[str, str], set[str]]:
        """The replacements of single characters, and the characters that stand behind another one in an entry."""
        below: dict[int, list[int]] = defaultdict(list)
        for place, unit in enumerate(self._units):
            if 0 < unit & _LABEL < 256:
                below[place ^ unit & 0xFF].append(place)
        left = _MOST_STEPS

        def next_ones(node: int) -> Iterator[tuple[str, int, int]]:
            """(character, node behind it, place of its replacement)."""
            nonlocal left
            waiting = [(node, b"")]
            while waiting:
                node, start = waiting.pop()
                left -= len(below.get(node, ())) + 1
                if left < 0:
                    raise _damaged()
                for place in below.get(node, ()):
                    key, (inner, value) = start + bytes((self._units[place] & 0xFF,)), self._inside(place)
                    if len(key) < _length(key[0]):
                        waiting.append((inner, key))
                    elif char := key.decode("utf-8", "ignore"):
                        yield char, inner, value

        new, later = dict[str, str](), set[str]()
        seen = [self._children(0)]
        known = {*seen}
        for node in seen:
            for char, inner, value in next_ones(node):
                if node == seen[0] and value != _NOTHING:
                    new[char] = self._text(value)
                elif node != seen[0]:
                    later.add(char)
                if inner not in known:
                    known.add(inner)
                    seen.append(inner)
        return new, later


def _length(first: int) -> int:
    """How many bytes a character has that begins with this one."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _any_of(chars: Iterable[str]) -> re.Pattern[str]:
    """Finds runs of these characters, and of all between those beyond U+FFFF: a set of many of the latter would be gone
    through one by one."""
    low, high = ([char for char in sorted(chars) if (char > "\uffff") == far] for far in (False, True))
    near, far = re.escape("".join(low)), f"{high[0]}-{high[-1]}" if high else ""
    return re.compile(f"[{near}{far}]+" if near or far else r"(?!)")


def _damaged() -> ModelError:
    return ModelError("its table of replacements (precompiled_charsmap) is damaged")
