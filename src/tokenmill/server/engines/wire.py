"""What crosses between the server and an engine. Owns: message types; msgpack, never pickle. One report per step."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.request import Request, TokenDelta
from tokenmill.server.backend import EngineStats


class Add(msgspec.Struct, tag="add"):
    """Work on this request; `pooling` asks for a vector, `ack` for a word that it was accepted."""

    request: Request
    pooling: str | None = None
    ack: bool = False


class Abort(msgspec.Struct, tag="abort"):
    """End a request or one of its outputs; no answer is wanted."""

    request_id: str
    index: int | None = None


class Stop(msgspec.Struct, tag="stop"):
    """End the loop."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded; facts that requests are checked against, and the tokenizer's state."""

    facts: dict[str, Any]
    eos_ids: list[int]
    generation: dict[str, Any]
    tokenizer: dict[str, Any] | None
    load_s: float = 0.0


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not start; `user` says that a person can fix it."""

    message: str
    user: bool = False


class Report(msgspec.Struct, tag="report", omit_defaults=True):
    """What one step brought. `refused` holds (request id, message, param); `preempted` counts by request id, when new
    preemptions have happened."""

    deltas: list[TokenDelta] = []
    started: list[str] = []
    accepted: list[str] = []
    refused: list[tuple[str, str, str | None]] = []
    preempted: dict[str, int] = {}
    tokens: int = 0
    stats: EngineStats | None = None


Command = Add | Abort | Stop
News = Ready | Failed | Report

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_news = msgspec.msgpack.Decoder(News).decode
