"""Frames of a WebSocket (RFC 6455) as bytes. Owns: reading what a client sends, piece by piece, and writing frames.

Nothing is compressed, so that a message is never larger than what came. Must not know: sockets, time, what is said.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
NORMAL, GOING_AWAY, WRONG, BAD_TYPE, BAD_TEXT, POLICY, TOO_LARGE, LATER = 1000, 1001, 1002, 1003, 1007, 1008, 1009, 1013
MOST_FRAGMENTS = 1 << 12
"""Most fragments of one message. Clients hardly ever send more than one."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MOST_CONTROL = 125


class BrokenError(Exception):
    """The bytes are not a WebSocket's, or too many. `code` tells the client which."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True, slots=True)
class Control:
    """A whole control frame."""

    opcode: int
    payload: bytes


class Begun:
    """A message has begun. Its text goes to the receiver that the caller has named."""


class Ended:
    """The message is complete."""


Found = Control | Begun | Ended


def accept_key(key: bytes) -> bytes | None:
    """The answer to a client's key. None: the key is invalid."""
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            return None
    except (binascii.Error, ValueError):
        return None
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def frame(opcode: int, payload: bytes) -> bytes:
    """One whole frame as a server sends it."""
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 127, size)
    return head + payload


def closing(code: int, reason: str) -> bytes:
    """A close frame."""
    return frame(CLOSE, struct.pack("!H", code) + reason.encode()[: _MOST_CONTROL - 2])


class Frames:
    """Reads a client's bytes. `take` receives the text of messages piece by piece. A message holds at most `most`
    bytes."""

    def __init__(self, most: int, take: Callable[[bytes], None]) -> None:
        self.most, self.take = most, take
        self.inside = False
        """Has a message begun that has not ended yet?"""
        self._buffer = bytearray()
        self._left = 0
        self._last = False
        self._mask = b""
        self._size = self._fragments = 0
        self._text = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes) -> Iterator[Found]:
        """What these bytes complete."""
        self._buffer += data
        while True:
            if self._left:
                if not self._buffer:
                    return
                self._payload()
            else:
                found = self._head()
                if found is None:
                    return
                if isinstance(found, Control):
                    yield found
                    continue
                if found:
                    yield Begun()
            if not self._left and self._last:
                self._check_text(b"", final=True)
                self.inside = self._last = False
                yield Ended()

    def _head(self) -> Control | bool | None:
        """The next frame's head: a whole control frame, whether a message begins, or None if more bytes must come."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        opcode, size = first & 15, second & 127
        if first & 0x70 or not second & 0x80:
            raise BrokenError(WRONG, "A client's frames must be masked and use no extensions.")
        start = 2 + {126: 2, 127: 8}.get(size, 0)
        if opcode >= CLOSE:
            return self._control(opcode, size, whole=bool(first & 0x80))
        if opcode == BINARY:
            raise BrokenError(BAD_TYPE, "Messages must be text.")
        if opcode > TEXT or (opcode == TEXT) == self.inside:
            raise BrokenError(WRONG, "This frame cannot follow the one before it.")
        if len(buffer) < start + 4:
            return None
        if size >= 126:
            size = int.from_bytes(buffer[2:start], "big")
        begins = not self.inside
        self._size = size if begins else self._size + size
        self._fragments = 1 if begins else self._fragments + 1
        if self._size > self.most or self._fragments > MOST_FRAGMENTS:
            raise BrokenError(TOO_LARGE, f"A message holds at most {self.most} bytes, in {MOST_FRAGMENTS} frames.")
        self._mask, self._left = bytes(buffer[start : start + 4]), size
        self._last, self.inside = bool(first & 0x80), True
        if begins:
            self._text.reset()
        del buffer[: start + 4]
        return begins

    def _control(self, opcode: int, size: int, *, whole: bool) -> Control | None:
        if opcode > PONG or not whole or size > _MOST_CONTROL:
            raise BrokenError(WRONG, "There is no such control frame.")
        if len(self._buffer) < 6 + size:
            return None
        found = Control(opcode, unmasked(bytes(self._buffer[6 : 6 + size]), bytes(self._buffer[2:6])))
        del self._buffer[: 6 + size]
        return found

    def _payload(self) -> None:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        text = unmasked(piece, self._mask)
        turn = len(piece) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        self._check_text(text)
        self.take(text)

    def _check_text(self, text: bytes, *, final: bool = False) -> None:
        try:
            self._text.decode(text, final)
        except UnicodeDecodeError:
            raise BrokenError(BAD_TEXT, "Messages must be UTF-8 text.") from None


def unmasked(data: bytes, mask: bytes) -> bytes:
    """Remove or add the mask of these bytes."""
    whole = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "little") ^ int.from_bytes(whole, "little")).to_bytes(len(data), "little")
