"""From token ids to bytes. Owns: reading a decoder's description into rules, the table id -> exact bytes that follows
from them, and what is trimmed at the very start of a text. Must not know: files, requests, streaming.

Byte-level and SentencePiece vocabularies have one byte string per token, so a text is the joined bytes read as UTF-8
(broken sequences become U+FFFD by the Unicode "maximal subpart" practice). That makes decoding a dictionary lookup and
streaming exact. Other decoders (WordPiece, `</w>` suffixes) have no such table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceRules:
    """How a token's string becomes bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip: tuple[str, int] = ("", 0)  # up to this many of this character vanish at the start of a text
    first_drops: str = ""  # the first visible token loses every occurrence of this


def read_rules(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """Rules for a decoder description (the "decoder" object of tokenizer.json); None when it has no byte table."""
    if decoder is None:
        return None
    steps = list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]
    byte_level = byte_fallback = fused = False
    replace: list[tuple[str, str]] = []
    strip, first_drops = ("", 0), ""
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and len(steps) == 1:
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and (old := step.get("pattern", {}).get("String")) and (not fused or len(old) == 1):
            replace.append((old, step["content"]))
        elif kind == "Metaspace":
            replace.append((step["replacement"], " "))
            first_drops = "" if step.get("prepend_scheme") == "never" else step["replacement"]
        elif kind == "Strip" and fused and step["stop"] == 0 and len(step["content"].encode()) == 1:
            strip = (step["content"], step["start"])
        else:
            return None
    return PieceRules(byte_level, byte_fallback, tuple(replace), strip, first_drops)


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level vocabularies use for the 256 bytes: character -> byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = sorted(set(range(256)).difference(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class PieceTable(dict[int, bytes]):
    """id -> bytes, filled on first use. Hidden and unknown ids give b""."""

    def __init__(
        self,
        rules: PieceRules,
        token_of: Callable[[int], str | None],
        added: Collection[int],
        hidden: Collection[int],
    ) -> None:
        super().__init__()
        self.rules = rules
        self._token_of = token_of
        self._added = added
        self._hidden = hidden
        self._alphabet = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) if token_id >= 0 and token_id not in self._hidden else None
        data = b"" if token is None else self._convert(token, token_id)
        self[token_id] = data
        return data

    def visible(self, token_id: int) -> bool:
        """Is this id part of a decoded text (even as an empty string)?"""
        return token_id >= 0 and token_id not in self._hidden and self._token_of(token_id) is not None

    def first_form(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text."""
        token = (self._token_of(token_id) or "").replace(self.rules.first_drops, "")
        return self._convert(token, token_id)

    def text(self, ids: Iterable[int]) -> str:
        """The whole text of some ids."""
        return StartTrimmer(self).take(ids).decode("utf-8", "replace")

    def _convert(self, token: str, token_id: int) -> bytes:
        rules = self.rules
        if rules.byte_level:
            # Added tokens are written out as they are; only vocabulary tokens use the stand-in alphabet.
            if token_id not in self._added and all(char in self._alphabet for char in token):
                return bytes(map(self._alphabet.__getitem__, token))
            return token.encode()
        for old, new in rules.replace:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if rules.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()


class StartTrimmer:
    """Trims the start of a text. Give it every id from the first one on."""

    __slots__ = ("_first", "_strip", "_table")

    def __init__(self, table: PieceTable) -> None:
        self._table = table
        self._first = bool(table.rules.first_drops)
        self._strip = table.rules.strip[1]

    @property
    def settled(self) -> bool:
        """True when nothing will be trimmed any more, so the table's bytes can be used as they are."""
        return not self._first and not self._strip

    def take(self, ids: Iterable[int]) -> bytes:
        """The bytes of the next ids."""
        table = self._table
        rest = iter(ids)
        out = []
        while not self.settled:
            token_id = next(rest, None)
            if token_id is None:
                break
            out.append(self._trimmed(token_id))
        out.extend(map(table.__getitem__, rest))
        return b"".join(out)

    def _trimmed(self, token_id: int) -> bytes:
        table = self._table
        data = table[token_id]
        if self._first and table.visible(token_id):
            data, self._first = table.first_form(token_id), False
        char = table.rules.strip[0].encode()
        while self._strip and data.startswith(char):
            data, self._strip = data[1:], self._strip - 1
        if data:
            self._strip = 0
        return data
