"""Sockets. Owns: one rule for everything that is read or written (a deadline and a ceiling of bytes), and who may
connect.

uvicorn's httptools protocol has neither; this adds them. A message is read in two parts, head and body. Each has its
deadline and its ceiling, whether or not a handler reads it. A refusal is answered, and then the connection stays open
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
from tokenmill.server.old_clients import answer_as_1_0
from tokenmill.server.tls import Door, Handshakes
from tokenmill.server.transport import CountedTransport, Flow, LateEvent, Wire

MAX_HEADERS = 200
MAX_PIPELINED = 16
RESERVE = 64
"""Connections beyond the ceiling. They may only ask whether the server is up."""
RESERVE_S = 2.0
LINGER_BYTES = 1 << 20
LINGER_S = 2.0
GRACE_S = 1.0
"""The seconds by which the guard's deadline of a body comes before the connection's, because the guard answers in the
API's words."""
_FRAMING = (b"content-length", b"transfer-encoding")
FRAMING = 8
"""Bytes on the wire for each byte of a chunked body. The smallest chunks usually take six."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Limits of a connection in bytes and seconds, and the number of connections."""

    head: int = 64 << 10
    body: int = 16 << 20
    read_timeout: float = 30.0
    connections: int = 4096


class MessagePart(Enum):
    """The part of a message that the client may be sending."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class Porter(Protocol):
    """Decides which requests cannot enter."""

    def is_shut(self, scope: Any) -> bool:
        """Might `turn_away` refuse this request?"""
        ...

    def turn_away(self, scope: Any, usual: Pairs) -> bytes | None:
        """The complete refusal with the usual headers. It closes the connection. None: the request may enter."""
        ...


class Taker(Protocol):
    """Handles a connection that has changed to another protocol."""

    def feed(self, data: bytes) -> None:
        """Bytes have arrived."""
        ...

    def gone(self) -> None:
        """The connection has ended."""
        ...

    def leave(self) -> None:
        """The server ends: say so to the client, and close."""
        ...


class _Waiting(list[Any]):
    """Requests that arrived before the previous one was answered. An empty deque would take ten times as much
    memory."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        self.insert(0, item)

    def popleft(self) -> Any:
        return self.pop(0)


class _Rest:
    """The callbacks of a parser that reads only a body."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its bounds are a class attribute, because uvicorn makes the objects.

    There may be thousands of connections, so each is kept small. Its own fields are slots: together with uvicorn's they
    are more than thirty, beyond which Python no longer shares a table of names. What most connections never need is
    made late."""

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

    bounds = ConnectionBounds()
    shakes = Handshakes()
    deadlines = Deadlines()
    porter: Porter | None = None

    def num_open(self) -> int:
        """The number of connections, including those still in their handshake."""
        return len(self.connections) + len(self.shakes)

    def seconds(self) -> float | None:
        """The seconds that a new connection has for its next part. None: it is one too many."""
        most, patience = self.bounds.connections, self.bounds.read_timeout
        if self.num_open() > most + RESERVE:
            return None
        return min(RESERVE_S, patience) if self.num_open() > most else patience

    def connection_made(self, transport: Any) -> None:
        self.part = MessagePart.NOTHING
        self.refused = False
        self.wire = self.head = self.payload = 0
        self.most: int | None = None
        """The ceiling of the current body, if its handler allows more bytes than usual."""
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
        """The client will send no more. If a complete request is open, the client may still wait for the answer, and
        the connection stays (True). Otherwise the connection closes. Engines hear of it before handlers are
        cancelled."""
        if self._owes() and self.transport.can_write_eof() and self._give_up_message():
            self.ended = True
            self._stop_timer()
            HalfClosed(self.out, self._asking, hears=self.running.scope["http_version"] == "1.1").watch(
                self.loop.call_later
            )
            return True
        self._tell_gone()
        return False

    def _owes(self) -> bool:
        """Is a request open?"""
        return self.taker is None and self.running is not None and not self.running.response_complete

    def _give_up_message(self) -> bool:
        """Forget the message that is being read, if complete ones are before it: these are still answered, and the
        last of them ends the connection. False: there are none."""
        if self.part is MessagePart.BODY:  # its cycle has been made
            if not self.pipeline or self.running is self.cycle:
                return False
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self.running
        self.part = MessagePart.NOTHING
        return True

    def _asking(self) -> bool:
        return self._owes() and not self.running.response_started

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.ended and not self._owes():  # no other request waits either, because it would be running now
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell_gone()
        self._stop_timer()
        self.pipeline.clear()
        self._forget_answer()
        super().connection_lost(exc)
        self._let_go()

    def _let_go(self) -> None:
        """Drop the references back to this object, so that it is freed at once. The garbage collector would come late,
        and a burst's memory would stay until then."""
        self._stop_timer()  # closing may have set a timer
        self._unset_keepalive_if_required()  # uvicorn does not stop it if a connection ends by an error
        self.scope = self.cycle = self.running = None  # type: ignore[assignment]
        self.out.let_go()

    def _tell_gone(self) -> None:
        if self.taker is not None:
            self.taker.gone()
        for tell in self.on_gone:
            tell()
        self.on_gone.clear()

    def _forget_answer(self) -> None:
        """Discard further output to this client, and tell the handler."""
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
        if self.part is MessagePart.NOTHING and self.due is None:  # blank lines do not begin a message
            self._set_timer(self.bounds.read_timeout)
        self._parse(data)
        if self.refused:
            return
        # A line that never ends causes no callback, and neither do chunk extensions.
        if self.part is not MessagePart.BODY and self.wire > 2 * self.bounds.head + self.head:
            self._refuse(431, f"The request's head is larger than {self.bounds.head} bytes.")
        elif (
            self.part is MessagePart.BODY
            and self.wire > 4 * self.bounds.head + self.head + (1 + FRAMING) * self.payload
        ):
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
        """Read the body of a message that asked for another protocol but is answered in HTTP/1.1. (Clients ask for
        HTTP/2 in this way.) The parser reads no body after such a head, so another parser does."""
        framing = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(_Rest(self))
        self._parse(b"\r\n".join((b"POST / HTTP/1.1", *framing, b"connection: close\r\n\r\n")) + data)

    def _upgraded(self, data: bytes) -> None:
        """Bytes after the end of HTTP. They go to the Taker of the connection; until there is one, only a few are
        kept."""
        if self.taker is not None:
            self.taker.feed(data)
        elif len(self.early) + len(data) <= self.bounds.head:
            self.early += data
        else:  # too many bytes before there is a Taker
            self.scope["state"].pop("upgrade", None)

    def _upgrade(self, head: bytes, make: Callable[[Any], Taker]) -> Taker:
        """Hand the connection to another protocol after this answer. `make` gets the Wire to write to."""
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
        if self.refused:  # what follows in the same bytes is not read, so nobody waits for its rest
            return
        super().on_message_begin()
        self.part = MessagePart.HEAD
        self.wire = self.head = self.payload = 0
        self.most = None
        self._set_timer(self.bounds.read_timeout)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self.refused and self.part is MessagePart.HEAD:  # trailers are not headers
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
        self.part = MessagePart.BODY
        self._set_timer(self.bounds.read_timeout + GRACE_S)
        state = self.scope["state"]
        state.update(abort=self.transport.abort, on_gone=self.on_gone, sending=self._is_sending, widen=self._widen)
        super().on_headers_complete()
        self.cycle.message_event = LateEvent()  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            answer_as_1_0(self.cycle)
        self.declined = False
        if self.parser.should_upgrade():  # a handler takes the connection, or the bytes that follow are not read
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
        """A handler reads this body as it arrives. The body may have `most` bytes, and each of its parts gets the time
        of a whole body."""
        if self._is_sending() and not self.refused:
            self.most = most
            self._set_timer(self.bounds.read_timeout + GRACE_S)

    def _is_sending(self) -> bool:
        """Is the client still sending the body of the request that is being answered?"""
        return self.part is MessagePart.BODY and self.running is self.cycle

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.running = cycle
        if self.porter is not None and self.porter.is_shut(cycle.scope):  # in a burst there are thousands a second
            # later, so that a body that came with its head is read first
            self.loop.call_soon(self._turn_away, self.porter, cycle, app)
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
        if self.declined and self.parser.should_upgrade():  # the body is still to come
            return
        self.part = MessagePart.NOTHING
        self.wire = self.head = 0
        self._stop_timer()
        if not self.refused:
            super().on_message_complete()

    # ------------------------------------------------------------ ends

    def shutdown(self) -> None:
        """The server ends."""
        if self.taker is not None:
            self.taker.leave()
        else:
            super().shutdown()

    def late(self) -> None:
        """The deadline has passed."""
        if self.refused or self.transport.is_closing():
            self.out.finish()
        elif self.flow.read_paused:  # it waits for answers before it: the server reads nothing, so no client is late
            self._set_timer(self.bounds.read_timeout + GRACE_S)
        elif self.part is MessagePart.BODY:
            self._refuse(408, "The body did not arrive in time.")
        elif self.part is MessagePart.HEAD or self.wire:
            self._refuse(408, "The request's head did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close. If earlier answers are still on their way, the last of them closes instead."""
        self.refused = True
        self._stop_timer()
        if self._owes() and self._give_up_message():
            self.cycle.keep_alive = False
            return
        if self.part is MessagePart.BODY and self.cycle is not None:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self._forget_answer()
        body = error_bytes(HttpError(status, message))
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        again = b"retry-after: 1\r\n" if status in (429, 503) else b""
        self.transport.write(head.encode() + again + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _close_gently(self) -> None:
        """Stop writing. A client that may still be sending gets a moment to read the answer."""
        self._unset_keepalive_if_required()
        if self.ended or (self.part is MessagePart.NOTHING and not self.refused):
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


def make_protocol(bounds: ConnectionBounds, shakes: Handshakes, porter: Porter | None = None) -> Any:
    """The factory of connection protocols with these bounds."""
    own = {"bounds": bounds, "shakes": shakes, "deadlines": Deadlines(), "porter": porter}
    protocol = type("Protocol", (BoundedProtocol,), own)
    if shakes.context is None:
        return protocol

    def door(**settings: Any) -> Door:
        inner = protocol(**settings)
        return Door(inner, shakes, inner.seconds)

    return door
