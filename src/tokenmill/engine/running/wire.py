"""What crosses between an engine's loop and its users. Owns: message types; msgpack, never pickle. One report per step.

A report is about many requests. A part that cannot be encoded or read fails only the request that it belongs to. Must
not know: how messages travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from tokenmill.core.errors import BusyError, NotHereError, ParameterError, UserError
from tokenmill.core.request import Request, TokenDelta
from tokenmill.core.sleeping import Slept


class Add(msgspec.Struct, tag="add"):
    """Work on this request; `pooling` asks for a vector, `ack` for a message that it was accepted."""

    request: Request
    pooling: str | None = None
    ack: bool = False

    @property
    def num_outputs(self) -> int:
        """How many outputs the request has; each ends by itself."""
        return 1 if self.pooling is not None else self.request.params.num_outputs


class Abort(msgspec.Struct, tag="abort"):
    """End a request or one of its outputs; no answer is wanted."""

    request_id: str
    index: int | None = None


class Broken(msgspec.Struct, tag="broken"):
    """A command about this request came and could not be read. The receiver makes this; it is never sent."""

    request_id: str


class Adapt(msgspec.Struct, tag="adapt"):
    """Take this adapter, with its name and number, from `path`; without a path: drop it."""

    number: int
    name: str
    path: str | None = None


class Sleep(msgspec.Struct, tag="sleep"):
    """Give memory back, once no request is open."""

    level: int


class Wake(msgspec.Struct, tag="wake"):
    """Take memory again."""

    tags: list[str]


class Stop(msgspec.Struct, tag="stop"):
    """End the loop."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded: the facts that requests are checked against, and the tokenizer's state."""

    facts: dict[str, Any]
    eos_ids: list[int]
    generation: dict[str, Any]
    tokenizer: dict[str, Any] | None
    load_s: float = 0.0


class Failed(msgspec.Struct, tag="failed"):
    """The engine could not start; `user` says that a person can fix it, `lost` that one of its processes was ended from
    outside."""

    message: str
    user: bool = False
    lost: bool = False


_TOTALS = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "failures", "steps"),
    *("drafts", "drafted", "accepted", "saved_s", "spent_s", "expert_moves"),
    *("states_saved", "states_used", "states_evicted"),
    *("flops", "read_bytes", "written_bytes", "kernel_calls", "fallback_calls", "joules"),
)


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One engine's current gauges, and its totals since its start."""

    up: int = 1
    """0 while the engine starts, or makes no progress: others take its requests."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_blocks: int = 0
    kv_shared: int = 0
    """Blocks that several sequences read."""
    kv_idle: int = 0
    """Blocks that only the prefix cache keeps."""
    states_kept: int = 0
    """Slots of the prefix cache that hold states of recurrent layers, of `state_slots`."""
    state_slots: int = 0
    states_saved: int = 0
    states_used: int = 0
    states_evicted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = []
    saved_s: float = 0.0
    """Estimates, in seconds: steps that right drafts have made needless, and time that drafts have taken."""
    spent_s: float = 0.0
    steps: int = 0
    processed: int = 0
    balancedness: float = 0.0
    """Mean / maximum of the ranks' tokens for experts; 0: not computed."""
    expert_moves: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    kernel_calls: int = 0
    fallback_calls: int = 0
    grammar_bytes: int = 0
    rss_bytes: int = 0
    open_files: int = 0
    joules: float = 0.0
    watts: float = 0.0
    awake: int = 1
    offloaded: int = 0
    """1 if the engine sleeps at level 1."""
    discarded: int = 0
    """1 if the engine sleeps at level 2."""

    def after(self, before: EngineStats) -> EngineStats:
        """These gauges, with the totals of earlier lives."""
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(before, name) for name in _TOTALS}
        pairs = itertools.zip_longest(self.accepted_at, before.accepted_at, fillvalue=0)
        summed["accepted_at"] = [a + b for a, b in pairs]
        return msgspec.structs.replace(self, **summed)


class Beat(msgspec.Struct, tag="beat"):
    """The engine has been working on one step for long; `done` grows while it makes progress."""

    done: int


class Refused(msgspec.Struct):
    """A request that was not accepted. `busy`: the request is fine and may be sent again; `gone`: what it names is not
    here any more."""

    request_id: str
    message: str
    param: str | None = None
    busy: bool = False
    gone: bool = False

    @classmethod
    def by(cls, request_id: str, error: UserError) -> Refused:
        """The message of an error."""
        return cls(request_id, str(error), error.param, isinstance(error, BusyError), isinstance(error, NotHereError))

    def error(self) -> UserError:
        """The error whose message this is."""
        kind = BusyError if self.busy else NotHereError if self.gone else UserError
        return kind(self.message, param=self.param)


class Report(msgspec.Struct, tag="report", omit_defaults=True):
    """What one step brought. `started`: how many seconds before this report a request's first step was planned (that
    step is over by now, and may have taken long). `failed`: requests that unexpected exceptions ended, with the
    message. `prefilled`: how many prompt tokens of a request are computed or were cached, if there are more than
    before. `preempted`: preemptions by request id, if there were new ones. `adapted`: by number, adapters that are
    ready, or why not. `slept`: the result of Sleep or Wake. `published`, `gone`: joined marks of blocks of the prefix
    cache (kvcache/cache_events.py), sent by one of several engines."""

    deltas: list[TokenDelta] = []
    started: dict[str, float] = {}
    accepted: list[str] = []
    refused: list[Refused] = []
    failed: dict[str, str] = {}
    preempted: dict[str, int] = {}
    prefilled: dict[str, int] = {}
    adapted: dict[int, str] = {}
    tokens: int = 0
    stats: EngineStats | None = None
    slept: Slept | None = None
    published: bytes = b""
    gone: bytes = b""


Command = Add | Abort | Adapt | Sleep | Wake | Broken | Stop
News = Ready | Failed | Beat | Report
T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_news = msgspec.msgpack.Decoder(News).decode
UNSENT = "what it said could not be sent"
UNREAD = "what it said could not be read"


def check_carried(command: Command) -> None:
    """Refuse values that cannot be sent to an engine, such as integers beyond 64 bits, while the caller still waits."""
    try:
        encode(command)
    except Exception as error:
        named = {OverflowError: "an integer beyond 64 bits", UnicodeEncodeError: "half a character (a lone surrogate)"}
        what = named.get(type(error), type(error).__name__)
        raise ParameterError(f"The request cannot be sent to the engine: it holds {what}.") from error


def encode_news(news: News) -> bytes:
    """News as bytes; parts of a report that cannot be encoded fail only their own requests."""
    try:
        return encode(news)
    except Exception:
        if not isinstance(news, Report):
            raise
        return encode(_split(msgspec.structs.asdict(news), _encodes, UNSENT))


def read_news(data: bytes) -> News:
    """News from bytes; parts of a report that cannot be read fail only their own requests."""
    try:
        return decode_news(data)
    except Exception:
        found = msgspec.msgpack.decode(data, strict=False)
        if not isinstance(found, dict) or found.get("type") != "report":
            raise
        return _split(found, msgspec.convert, UNREAD)


def _encodes(value: Any, wanted: type[T]) -> T:
    encode(value)
    return value


def _split(parts: dict[str, Any], take: Callable[[Any, Any], Any], why: str) -> Report:
    """Take a report's parts one by one; those that `take` cannot handle fail."""
    made = Report()

    def keep(items: Iterable[Any], kind: Any, name: Callable[[Any], Any]) -> list[Any]:
        kept = []
        for item in items:
            try:
                kept.append(take(item, kind))
            except Exception:
                made.failed[str(name(item)).encode(errors="replace").decode()] = why
        return kept

    made.deltas = keep(parts.get("deltas", ()), TokenDelta, _request_of)
    made.refused = keep(parts.get("refused", ()), Refused, _request_of)
    made.accepted = keep(parts.get("accepted", ()), str, str)
    for field, kind in (("started", float), ("preempted", int), ("prefilled", int), ("failed", str)):
        pairs = keep(parts.get(field, {}).items(), tuple[str, kind], lambda pair: pair[0])  # type: ignore[valid-type]
        getattr(made, field).update(pairs)
    made.adapted = dict(parts.get("adapted", {}))
    made.slept = next(iter(keep([parts.get("slept")], Slept | None, _nobody)), None)
    made.stats = next(iter(keep([parts.get("stats")], EngineStats | None, _nobody)), None)
    made.tokens = next(iter(keep([parts.get("tokens", 0)], int, _nobody)), 0)
    made.published = next(iter(keep([parts.get("published", b"")], bytes, _nobody)), b"")
    made.gone = next(iter(keep([parts.get("gone", b"")], bytes, _nobody)), b"")
    return made


def _nobody(item: Any) -> str:
    return ""


def _request_of(item: Any) -> Any:
    return item.get("request_id") if isinstance(item, dict) else item.request_id
