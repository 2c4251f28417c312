"""Messages between a process and its worker, over a pair of sockets. Owns: frames, and waiting without deadlocks.

A message is its length (4 bytes, big-endian) and its bytes. The end that starts workers keeps reading while it cannot
write, so two large messages never block each other. While it waits, it runs the caller's checks. Must not know: what
messages say.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

HEAD = struct.Struct(">I")
CHUNK = 1 << 20
LOOK_S = 0.1
"""How often a waiting end runs the caller's checks."""


class Pipe:
    """One end. greedy: reads while it cannot write; one thread of such an end reads and writes."""

    def __init__(self, sock: socket.socket, *, greedy: bool = False) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.greedy = greedy
        self.held = bytearray()
        self.ready: deque[bytes] = deque()
        self.lock = threading.Lock()
        self.reading, self.writing = select.poll(), select.poll()
        self.reading.register(sock, select.POLLIN)
        self.writing.register(sock, select.POLLOUT | (select.POLLIN if greedy else 0))

    def send(self, message: bytes, look: Callable[[], None] = lambda: None) -> None:
        """Send the whole message; OSError if the other end is gone. look: called now and then while that takes long."""
        with self.lock:
            rest = memoryview(HEAD.pack(len(message)) + message)
            while rest:
                try:
                    rest = rest[self.sock.send(rest) :]
                except (BlockingIOError, InterruptedError):
                    if not self.writing.poll(LOOK_S * 1000):
                        look()
                    if self.greedy:
                        self._read()

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message, waiting at most this long (None: for ever); None: none has come. EOFError: the other end
        is gone."""
        while not self.ready:
            if not self.reading.poll(None if timeout is None else timeout * 1000):
                return None
            self._read()
            if timeout is not None and not self.ready:
                return None
        return self.ready.popleft()

    def poll(self) -> bool:
        """Has a message or the end arrived?"""
        return bool(self.ready) or bool(self.reading.poll(0))

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _read(self) -> None:
        try:
            data = self.sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self.held += data
        at = 0
        while len(self.held) - at >= HEAD.size:
            (size,) = HEAD.unpack_from(self.held, at)
            if len(self.held) - at < HEAD.size + size:
                break
            self.ready.append(bytes(self.held[at + HEAD.size : at + HEAD.size + size]))
            at += HEAD.size + size
        del self.held[:at]
