"""The beginning of an encrypted connection. Owns: handshakes, which are counted and have a deadline like everything
else.

Event loops report a connection only after its handshake, so thousands could wait in handshakes unseen. Here a
connection counts from the moment it is accepted, and is handed on when it is encrypted. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.config import ListenOptions
from tokenmill.core.errors import UserError

GOODBYE_S = 2.0
"""Seconds that a client has to confirm the end."""


def context_of(listen: ListenOptions) -> ssl.SSLContext | None:
    """The context for the certificate files, which were checked before (preflight.py) but for the password of a key.
    None: there are none."""
    if listen.ssl_certfile is None:
        return None
    context, key = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), listen.ssl_keyfile or listen.ssl_certfile
    try:
        context.load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile)
    except OSError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"{key}: the private key is not the one that belongs to {listen.ssl_certfile} (its first certificate)."
            ) from error
        raise UserError(
            f"{key}: this key is kept under a password, and what was typed does not open it. Without a terminal to "
            f"type it, serve a key that has none: openssl pkey -in {key} -out FILE"
        ) from error
    if listen.ssl_ca_certs is not None:
        context.load_verify_locations(listen.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@dataclass(slots=True)
class Handshakes:
    """The handshakes in progress. `context`: None if connections are not encrypted."""

    context: ssl.SSLContext | None = None
    open: set[Door] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.open)

    def end(self) -> None:
        """End all of them: nobody waits for the rest."""
        for door in list(self.open):
            door.give_up()


class Door(asyncio.Protocol):
    """One connection until it is encrypted. `allow`: seconds for the handshake, or None to send the client away."""

    def __init__(self, inner: Any, shakes: Handshakes, allow: Callable[[], float | None]) -> None:
        self.inner, self.shakes, self.allow = inner, shakes, allow
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """Nothing has been read yet, so the socket can be handed on."""
        self.shakes.open.add(self)
        seconds = self.allow()
        sock = None
        if seconds is not None:
            with contextlib.suppress(OSError):  # no descriptor is left
                sock = transport.get_extra_info("socket").dup()
        transport.abort()
        if sock is None or seconds is None:
            self.shakes.open.discard(self)
        else:
            self.task = asyncio.get_running_loop().create_task(self._shake(sock, seconds))

    def give_up(self) -> None:
        """End the connection now."""
        if self.task is not None:
            self.task.cancel()

    async def _shake(self, sock: socket.socket, seconds: float) -> None:
        settings = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": GOODBYE_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._encrypted, sock, ssl=self.shakes.context, **settings
            )
        except OSError:  # errors of TLS, of the network, and of the deadline
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
        finally:
            self.shakes.open.discard(self)

    def _encrypted(self) -> Any:
        return self.inner
