"""What crosses between an engine's loop and its users. Owns: message types; msgpack, never pickle. One report per step.

Must not know: how messages travel.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.request import Request, TokenDelta


class Add(msgspec.Struct, tag="add"):
    """Work on this request; `pooling` asks for a vector, `ack` for a word that it was accepted."""

    request: Request
    pooling: str | None = None
    ack: bool = False

    @property
    def num_outputs(self) -> int:
        """Outputs that end one by one."""
        return 1 if self.pooling is not None else self.request.params.num_outputs


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


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges of now and totals since the start of one engine."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = []
    steps: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    kernel_calls: int = 0
    fallback_calls: int = 0
    grammar_bytes: int = 0
    rss_bytes: int = 0
    open_files: int = 0


class Report(msgspec.Struct, tag="report", omit_defaults=True):
    """What one step brought. `refused` holds (request id, message, param); `prefilled` says how many prompt tokens of a
    request are computed or were cached, when a step has brought more; `preempted` counts by request id, when new
    preemptions have happened."""

    deltas: list[TokenDelta] = []
    started: list[str] = []
    accepted: list[str] = []
    refused: list[tuple[str, str, str | None]] = []
    preempted: dict[str, int] = {}
    prefilled: dict[str, int] = {}
    tokens: int = 0
    stats: EngineStats | None = None


Command = Add | Abort | Stop
News = Ready | Failed | Report

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_news = msgspec.msgpack.Decoder(News).decode
