"""A SentencePiece model's own replacements of characters. Owns: reading its table, and applying it to texts.

At each place of a text the longest entry of the table counts, as in SentencePiece. (The `tokenizers` library looks at
what a reader sees as one character, and loses marks that an entry does not cover.) Must not know: tokenizers, files.
"""

from __future__ import annotations

import re
import struct
from array import array

from tokenmill.core.errors import ModelError

_LEAF, _LABEL, _VALUE = 1 << 8, (1 << 31) | 0xFF, (1 << 31) - 1
_NOTHING = -1


class CharsMap:
    """The table: a double-array trie over UTF-8, and the replacements that its leaves point to."""

    def __init__(self, data: bytes) -> None:
        size = struct.unpack_from("<I", data)[0] if len(data) > 4 else 0
        if not 0 < size <= len(data) - 4 or size % 4:
            raise ModelError("its table of replacements (precompiled_charsmap) is damaged")
        self.data = data
        self._units = array("I", struct.unpack_from(f"<{size // 4}I", data, 4))
        self._texts = data[4 + size :]
        self._first: dict[str, int] = {}
        """By character: the node behind it, if some entry begins with it."""
        plain = [chr(i) for i in range(128)]
        changed = "".join(c for c in plain if self._longest(c, 0)[1])
        longer = any(self._longest(a + b, 0)[1] == 2 for a in plain if self._begin(a) != _NOTHING for b in plain)
        odd = rf"[^\x00-\x7f{re.escape(changed)}]" if not changed else rf"(?:[^\x00-\x7f]|[{re.escape(changed)}])"
        # Most texts are ASCII that stays as it is: only its neighbours of other characters may belong to an entry.
        near = rf"(?:[\x00-\x7f]?{odd})+(?:[\x00-\x7f](?!{odd})){{0,8}}"
        self._where = re.compile(r"[\s\S]+" if longer else near)

    def apply(self, text: str, kept: re.Pattern[str] | None = None) -> str:
        """The text with its replacements. What `kept` finds stays as it is; it has one group around everything."""
        if kept is None:
            return self._where.sub(self._replaced, text)
        parts = kept.split(text)
        parts[::2] = [self._where.sub(self._replaced, part) for part in parts[::2]]
        return "".join(parts)

    def _replaced(self, found: re.Match[str]) -> str:
        text, at, made = found[0], 0, list[str]()
        while at < len(text):
            if self._begin(text[at]) == _NOTHING:
                made.append(text[at])
                at += 1
                continue
            new, size = self._longest(text, at)
            made.append(new if size else text[at])
            at += size or 1
        return "".join(made)

    def _begin(self, char: str) -> int:
        node = self._first.get(char)
        if node is None:
            node, _ = self._walk(self._children(0), char)
            self._first[char] = node
        return node

    def _longest(self, text: str, at: int) -> tuple[str, int]:
        """The replacement of the longest entry there, and of how many characters it is; ("", 0): there is none."""
        node, found, end = self._children(0), _NOTHING, at
        for place in range(at, len(text)):
            node, value = self._walk(node, text[place])
            if value != _NOTHING:
                found, end = value, place + 1
            if node == _NOTHING:
                break
        if found == _NOTHING:
            return "", 0
        return self._texts[found : self._texts.find(b"\0", found)].decode("utf-8", "replace"), end - at

    def _walk(self, node: int, char: str) -> tuple[int, int]:
        """(the node behind a character, the place of its replacement); where there is none: _NOTHING."""
        value = _NOTHING
        for byte in char.encode("utf-8", "surrogatepass"):
            node ^= byte
            if node >= len(self._units) or self._units[node] & _LABEL != byte:
                return _NOTHING, _NOTHING
            unit = self._units[node]
            node = self._children(node)
            value = self._units[node] & _VALUE if unit & _LEAF and node < len(self._units) else _NOTHING
        return node, value

    def _children(self, node: int) -> int:
        unit = self._units[node]
        return node ^ (unit >> 10) << ((unit & (1 << 9)) >> 6)
