"""One WebSocket from its handshake to its end. Owns: its deadlines, how many messages wait, pings and the close.

The same rules as for requests hold: a message that has begun must end in time and has a ceiling, bytes that wait are
counted, and a client that says nothing for long is sent away. Must not know: what is said.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tokenmill.server.bodies import Parcel
from tokenmill.server.websockets.frames import (
    CLOSE,
    GOING_AWAY,
    LATER,
    NORMAL,
    PING,
    POLICY,
    PONG,
    TEXT,
    Begun,
    BrokenError,
    Control,
    Ended,
    Frames,
    closing,
    frame,
)

MOST_WAITING = 16
"""Most messages that wait while one is answered."""
MOST_UNREAD = 1 << 16
"""Bytes that may wait for the client. Beyond them pings are not answered."""
CLOSE_S = 2.0
"""Seconds in which the client's own close frame must come."""


class Wire(Protocol):
    """The connection below."""

    def write(self, data: bytes) -> None: ...
    def unread(self) -> int:
        """Bytes that the client has not taken yet."""
        ...

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        ...

    def end(self) -> None:
        """Close when everything is written."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of a connection: bytes of a message, and seconds for a message that has begun, without any frame while
    nothing is answered, and in all. An answer that is being made is never cut: its own deadline ends it."""

    message: int = 16 << 20
    begun_s: float = 30.0
    idle_s: float = 300.0
    life_s: float = 3600.0


class WebSocket:
    """An open connection. `make_parcel` makes the holder of a message's bytes. It raises if the server already holds
    too many."""

    def __init__(self, wire: Wire, patience: Patience, make_parcel: Callable[[], Parcel]) -> None:
        self.wire, self.patience, self.make_parcel = wire, patience, make_parcel
        self.loop = asyncio.get_running_loop()
        self.frames = Frames(patience.message, self._take)
        self.waiting: deque[Parcel] = deque()
        self.growing: Parcel | None = None
        self.over = False
        """Nothing more is read or written."""
        self._come = asyncio.Event()
        self._gone = asyncio.Event()
        self._said_close = False
        self._begun: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        """Runs while the server waits for the client's words. None: it answers, and the client waits."""
        self._life = self.loop.call_later(patience.life_s, self._grow_old)
        self._old = False
        self._await_words()

    # ------------------------------------------------------------ reading

    def feed(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self.over:
            return
        if self._idle is not None:
            self._await_words()
        try:
            for found in self.frames.feed(data):
                self._handle(found)
                if self.over:
                    return
        except BrokenError as error:
            self.end(error.code, error.reason)

    def _handle(self, found: Control | Begun | Ended) -> None:
        match found:
            case Begun():
                self.growing = self.make_parcel()
                self._begun = self.loop.call_later(self.patience.begun_s, self._late)
            case Ended():
                self._stop(self._begun)
                assert self.growing is not None
                self.waiting.append(self.growing)
                self.growing = None
                if len(self.waiting) > MOST_WAITING:
                    self.end(POLICY, f"More than {MOST_WAITING} messages wait for their answers.")
                self._come.set()
            case Control(opcode, payload) if opcode == PING:
                if self.wire.unread() < MOST_UNREAD:
                    self.wire.write(frame(PONG, payload))
            case Control(opcode, payload) if opcode == CLOSE:
                self._said_close = True
                self.end(NORMAL, "")
            case _:
                pass  # a pong without a ping

    def _take(self, text: bytes) -> None:
        assert self.growing is not None
        try:
            self.growing.add(text)
        except Exception as error:
            raise BrokenError(LATER, "The server is reading many large messages now; try again.") from error

    async def receive(self) -> Parcel | None:
        """The next message. None: there will be no more. The caller releases it, and answers it before the next
        call."""
        if self._old:
            self._tired()
        elif not self.over:
            self._await_words()
        while not self.waiting or self.over:
            if self.over:
                return None
            self._come.clear()
            await self._come.wait()
        self._stop(self._idle)
        self._idle = None
        return self.waiting.popleft()

    def _await_words(self) -> None:
        self._stop(self._idle)
        self._idle = self.loop.call_later(self.patience.idle_s, self._tired)

    # ------------------------------------------------------------ writing

    async def send(self, text: bytes) -> None:
        """Send one message. Waits until the client has taken most of the earlier ones."""
        if not self.over:
            self.wire.write(frame(TEXT, text))
            await self.wire.drain()

    # ------------------------------------------------------------ ends

    def end(self, code: int = NORMAL, reason: str = "") -> None:
        """Close the connection. Waiting messages are dropped. It may be called twice."""
        if self.over:
            return
        self.wire.write(closing(code, reason))
        self.gone()
        if self._said_close:
            self.wire.end()
        else:
            self.loop.call_later(CLOSE_S, self.wire.end)

    def leave(self) -> None:
        """The server ends."""
        self.end(GOING_AWAY, "The server is shutting down.")

    def gone(self) -> None:
        """The connection has gone, or soon will."""
        self.over = True
        for timer in (self._begun, self._idle, self._life):
            self._stop(timer)
        for parcel in (*self.waiting, *([self.growing] if self.growing else [])):
            parcel.release()
        self.waiting.clear()
        self.growing = None
        self._come.set()
        self._gone.set()

    async def converse_until_gone(self, converse: Callable[[WebSocket], Awaitable[None]]) -> None:
        """Run the conversation until it is over or the client has gone. What still runs for it is then cancelled."""
        talk = asyncio.ensure_future(converse(self))
        watch = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((talk, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talk
            self.end(GOING_AWAY, "")

    def _late(self) -> None:
        self.end(POLICY, "A message did not arrive in time.")

    def _grow_old(self) -> None:
        self._old = True
        if self._idle is not None:
            self._tired()

    def _tired(self) -> None:
        self.end(GOING_AWAY, "Nothing was said for long, or enough: connect again.")

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
