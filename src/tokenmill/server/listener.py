"""uvicorn around the application. Owns: its protocol and bounds, its tasks, and how it ends.

It is imported late, so that loading a model does not wait for it. Must not know: signals, engines, endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any

import uvicorn

from tokenmill.core.config import ServerConfig
from tokenmill.server.guard import Guard
from tokenmill.server.loop_lag import watch_lag
from tokenmill.server.memory_trim import system_trim, trim_after_bursts
from tokenmill.server.protocol import RESERVE, ConnectionBounds, make_protocol
from tokenmill.server.tls import Handshakes, context_of
from tokenmill.server.transport import drop_stalled

BACKLOG = 4096
OWN_FILES = 128
"""Open files that the server keeps for itself: engines, helpers, logs."""


class HttpServer:
    """uvicorn around the guard, on a socket that is already bound, and without uvicorn's signal handling."""

    def __init__(self, guard: Guard, server: ServerConfig, sock: socket.socket) -> None:
        listen = server.listen
        self.guard = guard
        self.sock = sock
        self.patience = server.patience.write_timeout
        self.shakes = Handshakes(context_of(listen))
        config = uvicorn.Config(
            guard,
            http=make_protocol(bounds_of(server), self.shakes, guard),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            backlog=BACKLOG,
        )
        self.server = uvicorn.Server(config)
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        allow_restart(self.sock)
        self.tasks = [
            loop.create_task(self.server._serve([self.sock])),
            loop.create_task(
                drop_stalled(
                    self.server.server_state.connections,
                    self.patience,
                    lambda: self.guard.metrics.reject("slow_reader"),
                )
            ),
            loop.create_task(watch_lag(self.guard.metrics.saw_lag)),
            loop.create_task(trim_after_bursts(self.guard.load, system_trim())),
        ]
        while not self.server.started and not self.tasks[0].done():
            await asyncio.sleep(0.005)
        if self.tasks[0].done():
            self.tasks[0].result()

    async def stop(self) -> None:
        """Close the listener. Requests that still run are cancelled after a moment."""
        self.server.config.timeout_graceful_shutdown = 1
        self.server.should_exit = True
        self.shakes.end()
        for task in self.tasks[1:]:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.tasks[0]


def bounds_of(server: ServerConfig) -> ConnectionBounds:
    """The limits of connections. Their number is that of open files, minus some that are kept for the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    files = server.limits.max_connections if soft == resource.RLIM_INFINITY else soft - OWN_FILES - RESERVE
    return ConnectionBounds(
        head=server.limits.max_header_bytes,
        body=server.limits.max_body_bytes,
        read_timeout=server.patience.read_timeout,
        connections=max(1, min(server.limits.max_connections, files)),
    )


def allow_restart(sock: socket.socket) -> None:
    """Connections that end from now on do not keep the next server from using the port."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
