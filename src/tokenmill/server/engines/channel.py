"""Frames over a pair of sockets. Owns: their format, buffers that grow instead of blocking, and reading many at once.

A frame is the lengths of a name and a body (4 bytes each, big-endian), the name and the body. The name says whose a
message is even when its body cannot be read. Must not know: messages, engines.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import threading
from collections.abc import Callable

log = logging.getLogger("tokenmill.server")
HEAD = struct.Struct(">II")
CHUNK = 1 << 20


def frame(name: str, body: bytes) -> bytes:
    """One message as bytes."""
    data = name.encode(errors="surrogatepass")
    return HEAD.pack(len(data), len(body)) + data + body


class Frames:
    """Turns bytes into whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> list[tuple[str, bytes]]:
        """(name, body) of every message that is complete now. Each is given only once, even if its handler fails."""
        self._data += data
        at, held, found = 0, self._data, []
        while len(held) - at >= HEAD.size:
            name_size, size = HEAD.unpack_from(held, at)
            begin = at + HEAD.size
            end = begin + name_size + size
            if len(held) < end:
                break
            name = bytes(held[begin : begin + name_size]).decode(errors="surrogatepass")
            found.append((name, bytes(held[begin + name_size : end])))
            at = end
        del held[:at]
        return found


class LoopEnd:
    """The server's end, with callbacks in an event loop. Bytes that the other end does not take yet wait here."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[str, bytes], None], on_end: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.frames = Frames()
        self.on_frame, self.on_end = on_frame, on_end
        self.waiting = bytearray()
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(sock.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        """Send without waiting. If the other end is gone, nothing is sent."""
        if self.closed:
            return
        if self.waiting:
            self.waiting += data
            return
        sent = self._write(data)
        if sent < len(data) and not self.closed:
            self.waiting += memoryview(data)[sent:]
            self.loop.add_writer(self.sock.fileno(), self._writable)

    def close(self) -> None:
        """Close the socket."""
        if not self.closed:
            self.closed = True
            self.loop.remove_reader(self.sock.fileno())
            self.loop.remove_writer(self.sock.fileno())
            self.sock.close()
            self.waiting.clear()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._ended()
            return 0

    def _writable(self) -> None:
        del self.waiting[: self._write(self.waiting)]
        if not self.waiting and not self.closed:
            self.loop.remove_writer(self.sock.fileno())

    def _readable(self) -> None:
        try:
            data = self.sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        for name, body in self.frames.push(data):
            try:
                self.on_frame(name, body)
            except Exception:
                log.exception("a message of an engine could not be handled")

    def _ended(self) -> None:
        self.close()
        self.on_end()


class BlockingEnd:
    """The engine's end: one thread receives, and any thread sends. Sending never waits for a slow server."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.frames = Frames()
        self.waiting = bytearray()
        self.more = threading.Condition()
        self.sender: threading.Thread | None = None
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def receive(self, timeout: float) -> list[tuple[str, bytes]] | None:
        """All messages that have arrived, after waiting at most `timeout` for the first. None: the other end is
        gone."""
        found: list[tuple[str, bytes]] = []
        if not self.poll.poll(timeout * 1000):
            return found
        while True:
            try:
                data = self.sock.recv(CHUNK)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError:
                return None
            if not data:
                return None
            found += self.frames.push(data)

    def send(self, data: bytes) -> None:
        """Send a message. A thread sends the bytes that the socket does not take at once."""
        with self.more:
            if not self.waiting:
                data = data[self._write(data) :]
            if not data:
                return
            self.waiting += data
            if self.sender is None:
                self.sender = threading.Thread(target=self._send_rest, name="tokenmill-sender", daemon=True)
                self.sender.start()
            self.more.notify()

    def flush(self, seconds: float) -> None:
        """Wait until all is sent, at most this long."""
        with self.more:
            self.more.wait_for(lambda: not self.waiting, seconds)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the server is gone, and `receive` reports it
            return len(data)

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        while True:
            with self.more:
                self.more.wait_for(lambda: bool(self.waiting))
            poll.poll()
            with self.more:
                del self.waiting[: self._write(self.waiting)]
                self.more.notify_all()
