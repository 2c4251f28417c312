"""Reading a SentencePiece `tokenizer.model`. Owns: the part of the protobuf wire format that this file uses, and the
plain record that it becomes. Must not know: how a tokenizer is built from it (see build.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from tokenmill.core.errors import ModelError

Value = int | bytes
E = TypeVar("E", bound=IntEnum)


class PieceKind(IntEnum):
    """The kinds of piece that the file format knows."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelKind(IntEnum):
    """The two segmentation algorithms that language models use."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True)
class Piece:
    """One vocabulary entry."""

    text: str
    score: float
    kind: PieceKind


@dataclass
class SentencePieceModel:
    """What a tokenizer needs from the file; the defaults are those of the format."""

    pieces: list[Piece] = field(default_factory=list)
    kind: ModelKind = ModelKind.UNIGRAM
    byte_fallback: bool = False
    whitespace_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_prefix: bool = True
    trim_spaces: bool = True
    first_only: bool = False
    """Only a text's beginning gets the space, not what follows a special token. Settings beside the file say so."""
    cut_first: bool = False
    """A text is cut at user-defined pieces before anything is put before its parts. GGUF files mean it so: there such
    pieces are often tokens that were added later."""


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse a serialised model; raises ModelError (without a file name) when the bytes are not one."""
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            model.pieces.append(_piece(_bytes(value)))
        elif number == 2:
            _trainer(model, _bytes(value))
        elif number == 3:
            _normalizer(model, _bytes(value))
        elif number == 5 and any(part == 2 and said for part, said in _fields(_bytes(value))):
            raise ModelError("it changes texts after decoding (denormalizer_spec), which is not supported")
    if not model.pieces:
        raise ModelError("it holds no vocabulary, so it is not a SentencePiece model")
    return model


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, PieceKind.NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _text(value)
        elif number == 2:
            score = _float(value)
        elif number == 3:
            kind = _enum(PieceKind, value, "piece kind")
    return Piece(text, score, kind)


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = _enum(ModelKind, value, "model type (only Unigram and BPE can be used)")
        elif number == 24:
            model.whitespace_suffix = bool(value)
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number == 40:
            model.unk_id = _signed(value)
        elif number == 41:
            model.bos_id = _signed(value)
        elif number == 42:
            model.eos_id = _signed(value)


def _normalizer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = _bytes(value)
        elif number == 3:
            model.add_prefix = bool(value)
        elif number == 4:
            model.trim_spaces = bool(value)
        elif number == 5 and not value:
            raise ModelError("it keeps spaces as they are (escape_whitespaces), which is not supported")


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value: Value
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ModelError(f"it has protobuf wire type {wire} at byte {at}, which SentencePiece never writes")
        if size > len(data) - at:
            raise ModelError(f"it ends inside a field: {size} bytes announced at byte {at}, {len(data) - at} left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ModelError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ModelError(f"it has a number longer than 10 bytes at byte {at}")


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ModelError("it has a number where SentencePiece writes a string or a record")
    return value


def _text(value: Value) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise ModelError("it has a piece that is not UTF-8") from error


def _enum(kind: type[E], value: Value, what: str) -> E:
    if isinstance(value, int) and value in set(kind):
        return kind(value)
    raise ModelError(f"it has an unknown {what}: {value!r}")


def _float(value: Value) -> float:
    data = _bytes(value)
    if len(data) != 4:
        raise ModelError("it has a score that is not a 4-byte float")
    return float(struct.unpack("<f", data)[0])


def _signed(value: Value) -> int:
    if not isinstance(value, int):
        raise ModelError("it has a string where SentencePiece writes a number")
    return value - (1 << 64) if value >= 1 << 63 else value
