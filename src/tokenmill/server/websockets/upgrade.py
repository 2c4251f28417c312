"""From an HTTP request to a WebSocket. Owns: the handshake, and the answer that becomes a connection for messages.

Must not know: any one API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.server.bodies import Bodies, Parcel
from tokenmill.server.errors import HttpError
from tokenmill.server.websockets.frames import accept_key
from tokenmill.server.websockets.socket import Patience, WebSocket

Talk = Callable[[WebSocket], Awaitable[None]]


class Upgraded(Response):
    """The answer 101, and the messages after it."""

    def __init__(self, accept: bytes, patience: Patience, bodies: Bodies, talk: Talk) -> None:
        self.accept, self.patience, self.bodies, self.talk = accept, patience, bodies, talk
        self.status_code = 101
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upgrade = scope["state"]["upgrade"]
        headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", self.accept)]
        take = partial(_take, upgrade, self.patience, self.bodies)
        await send({"type": "http.response.start", "status": 101, "headers": headers, "take": take})
        socket: WebSocket = scope["state"]["taken"]
        await socket.converse_until_gone(self.talk)


def _take(
    upgrade: Callable[[bytes, Callable[..., WebSocket]], WebSocket], patience: Patience, bodies: Bodies, head: bytes
) -> WebSocket:
    return upgrade(head, lambda wire: WebSocket(wire, patience, lambda: Parcel(bodies)))


def upgraded(request: Request, patience: Patience, bodies: Bodies, talk: Talk) -> Response:
    """The answer to a handshake. An invalid handshake is refused."""
    headers = request.headers
    if "upgrade" not in request.scope["state"]:
        raise HttpError(426, "GET on this path opens a WebSocket: send Connection: Upgrade and Upgrade: websocket.")
    accept = accept_key(headers.get("sec-websocket-key", "").encode())
    if headers.get("sec-websocket-version") != "13" or accept is None:
        raise HttpError(400, "This is not a WebSocket handshake (version 13, a key of 16 bytes).")
    return Upgraded(accept, patience, bodies, talk)
