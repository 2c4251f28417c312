"""Sockets. Owns: one rule for whatever is read or written (a deadline and a ceiling of bytes), and who may connect.

uvicorn's httptools protocol has neither; this adds them. A message is read in two parts, head and body; each has its
deadline and its ceiling, whether a handler reads it or not. What is refused is answered, then the connection lingers
for a moment, so that a client that is still sending can read the answer. Must not know: endpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenmill.server.access import OPEN_PATHS
from tokenmill.server.deadlines import Deadlines
from tokenmill.server.errors import HttpError, Pairs, error_bytes
from tokenmill.server.half_closed import HalfClosed
from tokenmill.server.tls import Door, Handshakes
from tokenmill.server.transport import CountedTransport, Flow, LateEvent

MAX_HEADERS = 200
MAX_PIPELINED = 16
RESERVE = 64
"""Connections beyond the ceiling that may ask whether the server is up."""
RESERVE_S = 2.0
LINGER_BYTES = 1 << 20
LINGER_S = 2.0
GRACE_S = 1.0
_FRAMING = (b"content-length", b"transfer-encoding")
"""The guard's own deadline of a body comes first: it answers in the API's words."""
FRAMING = 8
"""Bytes around each byte of a chunked body: six are usual for the smallest chunks."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one connection may take: bytes, seconds, and how many there may be."""

    head: int = 64 << 10
    body: int = 16 << 20
    read_timeout: float = 30.0
    connections: int = 4096


class Part(Enum):
    """What of a message the client may be sending."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class Porter(Protocol):
    """Who knows that a request cannot come in."""

    def is_shut(self, scope: Any) -> bool:
        """Is it worth asking?"""
        ...

    def turn_away(self, scope: Any, usual: Pairs) -> bytes | None:
        """The whole answer, that closes the connection, with the usual headers; None: the request may come in."""
        ...


class Taker(Protocol):
    """Who speaks another protocol on a connection."""

    def feed(self, data: bytes) -> None:
        """More has come."""
        ...

    def gone(self) -> None:
        """The connection ends."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """What a taker writes to."""

    out: CountedTransport
    flow: Any

    def write(self, data: bytes) -> None:
        """To the client, or to what waits for it."""
        if not self.out.is_closing():
            self.out.write(data)

    def unread(self) -> int:
        """Bytes that the client has not taken."""
        size: int = self.out.get_write_buffer_size()
        return size

    async def drain(self) -> None:
        """Until the client has taken enough."""
        await self.flow.drain()

    def end(self) -> None:
        """Close, once all is written."""
        self.out.finish()


class _Waiting(list[Any]):
    """Requests that came before the one ahead of them was answered; an empty deque takes ten times as much."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        self.insert(0, item)


class _Rest:
    """What a parser tells of a body alone."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


class BoundedProtocol(HttpToolsProtocol):
    """One connection; the bounds are a class attribute, because uvicorn makes the objects.

    There may be thousands, so each is kept small: its own fields are slots (uvicorn's and they are more than the thirty
    for which Python shares a table of names), and what most connections never need is made late.
    """

    __slots__ = (
        "declined",
        "due",
        "early",
        "ended",
        "head",
        "most",
        "on_gone",
        "out",
        "part",
        "payload",
        "refused",
        "running",
        "taker",
        "upgrading",
        "wire",
    )

    bounds = Bounds()
    shakes = Handshakes()
    deadlines = Deadlines()
    porter: Porter | None = None

    def num_open(self) -> int:
        """Connections, those that are not encrypted yet among them."""
        return len(self.connections) + len(self.shakes)

    def seconds(self) -> float | None:
        """What a connection that has just been made has for its next part; None: it is one too many."""
        most, patience = self.bounds.connections, self.bounds.read_timeout
        if self.num_open() > most + RESERVE:
            return None
        return min(RESERVE_S, patience) if self.num_open() > most else patience

    def connection_made(self, transport: Any) -> None:
        self.part = Part.NOTHING
        self.refused = False
        self.wire = self.head = self.payload = 0
        self.most: int | None = None
        """Bytes of the body that is coming, if a handler takes more of them than others do."""
        self.running: Any = None
        self.due: int | None = None
        self.on_gone: set[Callable[[], None]] = set()
        self.upgrading = self.declined = self.ended = False
        self.early = bytearray()
        self.taker: Taker | None = None
        self.out = CountedTransport(transport, self._close_gently)
        super().connection_made(cast(asyncio.Transport, self.out))
        self.flow, self.pipeline = Flow(self.out), _Waiting()  # type: ignore[assignment]
        seconds = self.seconds()
        if seconds is None:
            self._refuse(503, f"{self.bounds.connections} connections are open; the server takes no more.")
            self.out.finish()
            return
        self._set_timer(seconds)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn never keeps one
        """The client sends no more. With a whole request open it may wait for the answer: the connection stays (True).
        Else it closes; engines need not wait until handlers have been cancelled."""
        if self._owes() and self.part is Part.NOTHING and not self.refused and self.transport.can_write_eof():
            self.ended = True
            HalfClosed(self.out, self._asking, hears=self.running.scope["http_version"] == "1.1").watch(
                self.loop.call_later
            )
            return True
        self._tell_gone()
        return False

    def _owes(self) -> bool:
        """Is a request open?"""
        return self.taker is None and self.running is not None and not self.running.response_complete

    def _asking(self) -> bool:
        return self._owes() and not self.running.response_started

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.ended and not self._owes():  # nor does another one wait, which would be running now
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_gone()
        self._stop_timer()
        self.pipeline.clear()
        self._forget_answer()
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Drop what refers back to this object: it goes at once, and does not wait for the collector of cycles, whose
        coming late keeps the memory of a burst."""
        self._stop_timer()  # closing may have set one
        self._unset_keepalive_if_required()  # uvicorn leaves it where a connection ends by an error
        self.scope = self.cycle = self.running = None  # type: ignore[assignment]
        self.out.let_go()

    def _tell_gone(self) -> None:
        if self.taker is not None:
            self.taker.gone()
        for tell in self.on_gone:
            tell()
        self.on_gone.clear()

    def _forget_answer(self) -> None:
        """Whatever is still said to this client goes nowhere; its handler hears of it."""
        for cycle in (self.running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    # ------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        if self.upgrading:
            self._upgraded(data)
            return
        self.wire += len(data)
        if self.refused or self.transport.is_closing():
            if self.wire > LINGER_BYTES:
                self.transport.abort()
            return
        if self.part is Part.NOTHING and self.due is None:  # blank lines are no message yet
            self._set_timer(self.bounds.read_timeout)
        self._parse(data)
        if self.refused:
            return
        # A line that never ends produces no callback, nor do the extensions of chunks.
        if self.part is not Part.BODY and self.wire > 2 * self.bounds.head + self.head:
            self._refuse(431, f"The request's head is larger than {self.bounds.head} bytes.")
        elif self.part is Part.BODY and self.wire > 4 * self.bounds.head + self.head + (1 + FRAMING) * self.payload:
            self._refuse(400, "The body's chunks hold too little beside their framing.")

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self.declined:
                self._go_on(rest)
            else:
                self.upgrading = True
                self._upgraded(rest)

    def _go_on(self, data: bytes) -> None:
        """A message with a body asked for another protocol and is answered in this one (clients ask for HTTP/2 so): the
        parser takes nothing after such a head for a body, so another one reads it, with the same framing."""
        framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(_Rest(self))
        self._parse(b"\r\n".join((b"POST / HTTP/1.1", *framing, b"connection: close\r\n\r\n")) + data)

    def _upgraded(self, data: bytes) -> None:
        """What is no HTTP any more: whoever took the connection reads it; until then little is kept."""
        if self.taker is not None:
            self.taker.feed(data)
        elif len(self.early) + len(data) <= self.bounds.head:
            self.early += data
        else:  # too much before anybody has agreed: nobody will
            self.scope["state"].pop("upgrade", None)

    def _upgrade(self, head: bytes, make: Callable[[Any], Taker]) -> Taker:
        """Give the connection away, with this answer; `make` gets what can be written to."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        self.transport.write(head)
        self._stop_timer()
        taker = self.taker = make(Wire(self.out, self.flow))
        if self.early:
            taker.feed(bytes(self.early))
        self.early.clear()
        return taker

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.part = Part.HEAD
        self.wire = self.head = self.payload = 0
        self.most = None
        self._set_timer(self.bounds.read_timeout)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self.refused and self.part is Part.HEAD:  # trailers are nobody's headers
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self.head += size
        if not self.refused and (self.head > self.bounds.head or len(self.headers or ()) > MAX_HEADERS):
            self._refuse(431, f"The request's head is larger than {self.bounds.head} bytes or {MAX_HEADERS} lines.")

    def on_headers_complete(self) -> None:
        if self.refused:
            return
        path = self.url.partition(b"?")[0].decode("latin-1")
        if self.num_open() > self.bounds.connections and path not in OPEN_PATHS:
            self._refuse(503, f"{self.bounds.connections} connections are open; the server takes no more.")
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(429, "Too many requests on one connection wait for their answers.")
            return
        self.part = Part.BODY
        self._set_timer(self.bounds.read_timeout + GRACE_S)
        state = self.scope["state"]
        state.update(abort=self.transport.abort, on_gone=self.on_gone, sending=self._is_sending, widen=self._widen)
        super().on_headers_complete()
        self.cycle.message_event = LateEvent()  # type: ignore[assignment]
        self.declined = False
        if self.parser.should_upgrade():  # either a handler takes the connection, or what follows is not read
            self.cycle.keep_alive = False
            self.declined = any(name in _FRAMING and value != b"0" for name, value in self.headers)
            if (
                not self.declined
                and self._get_upgrade() == b"websocket"
                and not self.pipeline
                and self.running is self.cycle
            ):
                self.scope["state"]["upgrade"] = self._upgrade

    def _widen(self, most: int) -> None:
        """A handler takes this body as it comes: it may be so long, and each part of it has the time of a whole one."""
        if self.running and self.running is self.cycle and self.part is Part.BODY and not self.refused:
            self.most = most
            self._set_timer(self.bounds.read_timeout + GRACE_S)

    def _is_sending(self) -> bool:
        """Is a body still on its way?"""
        return self.part is Part.BODY

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        if self.porter is not None and self.porter.is_shut(cycle.scope):  # in a burst, thousands a second
            self.loop.call_soon(self._turn_away, self.porter, cycle, app)  # after its body, if that came with its head
        else:
            super()._start_asgi_task(cycle, app)

    def _turn_away(self, porter: Porter, cycle: Any, app: Any) -> None:
        unheard = cycle.disconnected or self.refused or self.flow.write_paused
        answer = None if unheard else porter.turn_away(cycle.scope, self.server_state.default_headers)
        if answer is None:
            super()._start_asgi_task(cycle, app)
            return
        cycle.response_started = cycle.response_complete = True
        self.transport.write(answer)
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        self.payload += len(body)
        if self.refused:
            return
        most = self.bounds.body if self.most is None else self.most
        if self.payload > most + LINGER_BYTES:
            self._refuse(413, f"The body is larger than {most} bytes.")
            return
        if self.most is not None:
            self._set_timer(self.bounds.read_timeout + GRACE_S)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.declined and self.parser.should_upgrade():  # its body comes yet
            return
        self.part = Part.NOTHING
        self.wire = self.head = 0
        self._stop_timer()
        if not self.refused:
            super().on_message_complete()

    # ------------------------------------------------------------ ends

    def late(self) -> None:
        """What should have come by now has not."""
        if self.refused or self.transport.is_closing():
            self.out.finish()
        elif self.part is Part.BODY:
            self._refuse(408, "The body did not arrive in time.")
        elif self.part is Part.HEAD or self.wire:
            self._refuse(408, "The request's head did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close, unless earlier answers are on their way: then the last of them closes."""
        self.refused = True
        self._stop_timer()
        cycle = self.cycle
        own = self.part is Part.BODY  # the cycle is of the message that is refused
        if cycle is not None and not cycle.response_complete and not own:
            cycle.keep_alive = False
            return
        if own and cycle is not None:
            if cycle.response_started or self.pipeline or self.running is not cycle:
                self.transport.abort()
                return
            self._forget_answer()
        body = error_bytes(HttpError(status, message))
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        again = b"retry-after: 1\r\n" if status in (429, 503) else b""
        self.transport.write(head.encode() + again + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _close_gently(self) -> None:
        """Nothing more is written. A client that may still be sending gets a moment, so that it can read the answer."""
        self._unset_keepalive_if_required()
        if self.part is Part.NOTHING and not self.refused:
            self._stop_timer()
            self.out.finish()
            return
        self.wire = 0
        self.out.say_no_more()
        self.flow.resume_reading()
        self._set_timer(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        if not self.refused:
            self._refuse(400, "The request is not valid HTTP.")

    def _set_timer(self, seconds: float) -> None:
        self._stop_timer()
        self.due = self.deadlines.add(self.loop, self, seconds)

    def _stop_timer(self) -> None:
        if self.due is not None:
            self.deadlines.drop(self, self.due)
            self.due = None


def make_protocol(bounds: Bounds, shakes: Handshakes, porter: Porter | None = None) -> Any:
    """What makes the protocol of a connection with these bounds."""
    own = {"bounds": bounds, "shakes": shakes, "deadlines": Deadlines(), "porter": porter}
    protocol = type("Protocol", (BoundedProtocol,), own)
    if shakes.context is None:
        return protocol

    def door(**settings: Any) -> Door:
        inner = protocol(**settings)
        return Door(inner, shakes, inner.seconds)

    return door


async def drop_stalled(connections: set[Any], patience: float, on_drop: Callable[[], None]) -> None:
    """End connections whose reader takes nothing, be it a stream or a plain answer; runs for ever."""
    while True:
        await asyncio.sleep(min(5.0, patience / 4))
        _drop_stalled_now(connections, patience, on_drop)


def _drop_stalled_now(connections: set[Any], patience: float, on_drop: Callable[[], None]) -> None:
    """Once; apart, because the waiting loop would keep the connection that it saw last."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        if connection.out.stalled(now, patience):
            on_drop()
            connection.transport.abort()
