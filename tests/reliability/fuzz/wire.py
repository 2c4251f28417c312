"""How requests reach the server: as they should, in pieces, cut, too short, too long. Owns: bytes of HTTP, a client.

Must not know: what the bodies mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from dataclasses import dataclass, field

HEAD = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
MOST_ANSWER = 8 << 20
METHODS = [
    "GET",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "HEAD",
    "TRACE",
    "CONNECT",
    "post",
    "POST ",
    "P\x00ST",
    "PROPFIND",
]
HEADERS = [
    *(b"expect: 100-continue", b"expect: x", b"connection: keep-alive", b"connection: upgrade\r\nupgrade: websocket"),
    *(b"content-encoding: gzip", b"content-type: text/plain", b"content-type: application/json; charset=utf-16"),
    *(
        b"content-type: multipart/form-data",
        b"accept: text/event-stream",
        b"accept-encoding: gzip, br",
        b"range: bytes=0-1",
    ),
    *(
        b"x-request-id: " + b"a" * 5000,
        b"x-request-id: \xff\xfe",
        b"x-request-id: a\tb",
        b"x-vllm-priority: 99999999999",
    ),
    *(b"x-vllm-priority: -1", b"x-session-id: \xc3\xa9", b"x-data-parallel-rank: 7", b"x-data-parallel-rank: a"),
    *(
        b"traceparent: 00-zz-zz-01",
        b"traceparent: " + b"0" * 400,
        b"origin: http://[::1",
        b"origin: null",
        b"origin: *",
    ),
    *(
        b"host: evil.example",
        b"host: [::1]evil",
        b"authorization: Bearer \xff",
        b"cookie: " + b"a=b;" * 900,
        b": empty",
    ),
    *(b"no colon", b" folded: line", b"x: \x00", b"x" * 2000 + b": 1", b"transfer-encoding: gzip", b"te: trailers"),
    *(b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: 0x10"),
    *(b"anthropic-version: \x80", b"if-none-match: *", b"sec-fetch-site: cross-site", b"x-forwarded-for: ::"),
]


@dataclass(slots=True)
class Sent:
    """What is written to one connection: pieces and pauses, and whether it is left early."""

    method: str
    pieces: list[bytes] = field(default_factory=list)
    leaves: bool = False
    odd: bool = False
    """Not what HTTP asks for: the answer may come in nobody's words, or not at all."""


@dataclass(slots=True)
class Heard:
    """What came back. `ended`: the server closed in time."""

    statuses: list[int]
    data: bytes
    ended: bool


def plain(method: str, path: str, body: bytes | None, more: tuple[bytes, ...] = ()) -> Sent:
    """As every client would."""
    return Sent(method, [head(method, path, (*more, *length(body)), close=True) + (body or b"")])


def length(body: bytes | None) -> tuple[bytes, ...]:
    return () if body is None else (b"content-type: application/json", b"content-length: %d" % len(body))


def head(method: str, path: str, lines: tuple[bytes, ...], *, close: bool) -> bytes:
    """The first lines of a request."""
    first = f"{method} {path} HTTP/1.1".encode("utf-8", "surrogatepass")
    fixed = (first, b"host: localhost", *lines, *((b"connection: close",) if close else ()))
    return b"\r\n".join(fixed) + b"\r\n\r\n"


def framed(rng: random.Random, method: str, path: str, body: bytes | None) -> tuple[str, Sent]:
    """(what is odd about it, the request)."""
    ways = (_chunked, _wrong_length, _early_close, _pipelined, _wrong_method, _odd_header, _in_pieces, _noise)
    way = rng.choice(ways)
    return way.__name__.strip("_"), way(rng, method, path, body)


def _chunked(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    data = (body or b"")[:200_000]
    lines = (b"content-type: application/json", b"transfer-encoding: chunked")
    pieces = [head(method, path, lines, close=True)]
    step = rng.choice([1, 2, 7, 100, 5000]) if len(data) < 3000 else 5000
    extension = rng.choice([b"", b"", b";a=b", b";" + b"x" * 300])
    for start in range(0, len(data), step):
        part = data[start : start + step]
        size = rng.choice([b"%x", b"%X", b"000%x"]) % len(part)
        pieces.append(size + extension + b"\r\n" + part + b"\r\n")
    end = [b"0\r\n\r\n"] * 4 + [
        b"0\r\na: b\r\n\r\n",
        b"",
        b"zz\r\n",
        b"-1\r\n",
        b"ffffffffffffffffff\r\n",
        b"0\r\n" + b"a" * 999,
    ]
    last = rng.choice(end)
    pieces.append(last)
    together = rng.random() < 0.5
    return Sent(method, [b"".join(pieces)] if together else pieces, odd=last[:4] != b"0\r\n\r" or len(extension) > 9)


def _wrong_length(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    data = body or b"{}"
    said = rng.choice([0, len(data) - 1, len(data) + 1, len(data) + 5000, 1 << 24, 1 << 40, len(data) // 2])
    lines = (b"content-type: application/json", b"content-length: %d" % max(0, said))
    return Sent(method, [head(method, path, lines, close=rng.random() < 0.8) + data], odd=True)


def _early_close(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    whole = plain(method, path, body).pieces[0]
    cut = rng.choice([len(whole), rng.randrange(len(whole) + 1)])
    return Sent(method, [whole[:cut]], leaves=True, odd=True)


def _pipelined(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    one = head(method, path, length(body), close=False) + (body or b"")
    probe = head("GET", "/health", (), close=False)
    many = [rng.choice([one, probe]) if len(one) < 50_000 else probe for _ in range(rng.choice([1, 3, 12]))]
    last = plain(method, path, body).pieces[0]
    return Sent(method, [b"".join([*many, last])], odd=True)


def _wrong_method(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    other = rng.choice(METHODS)
    return Sent(other, plain(other, path, body).pieces, odd=True)


def _odd_header(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    more = tuple(rng.sample(HEADERS, rng.randint(1, 3)))
    return Sent(method, plain(method, path, body, more).pieces, odd=True)


def _in_pieces(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    whole = plain(method, path, body).pieces[0]
    cuts = sorted(rng.randrange(len(whole)) for _ in range(rng.randint(1, 20)))
    edges = [0, *cuts, len(whole)]
    return Sent(method, [whole[a:b] for a, b in itertools.pairwise(edges)])


def _noise(rng: random.Random, method: str, path: str, body: bytes | None) -> Sent:
    whole = bytearray(plain(method, path, body).pieces[0])
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(min(len(whole), 160))] = rng.randrange(256)
    return Sent(method, [bytes(whole)], odd=True)


async def send(port: int, sent: Sent, patience_s: float) -> Heard:
    """One connection, from its beginning to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = bytearray()

    async def hear() -> None:
        """An answer may come before all is sent, and the connection may be cut soon after it."""
        with contextlib.suppress(ConnectionError):
            while len(data) < MOST_ANSWER and (part := await reader.read(1 << 16)):
                data.extend(part)

    hearing = asyncio.ensure_future(hear())
    try:
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionError):
                for piece in sent.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            if sent.leaves:
                return Heard([], b"", True)
            if sent.odd:
                with contextlib.suppress(OSError):
                    writer.write_eof()
            await hearing
    except TimeoutError:
        return Heard(_statuses(bytes(data)), bytes(data), False)
    finally:
        hearing.cancel()
        writer.close()
    return Heard(_statuses(bytes(data)), bytes(data), True)


def _statuses(data: bytes) -> list[int]:
    return [int(found[1]) for found in HEAD.finditer(data)]


def body_of(data: bytes) -> bytes:
    """The last answer's body, put together where it came in chunks."""
    found = list(HEAD.finditer(data))
    if not found:
        return b""
    rest = data[found[-1].end() :]
    if b"transfer-encoding: chunked" not in found[-1][2].lower():
        return rest
    parts = []
    while (end := rest.find(b"\r\n")) > 0:
        size = int(rest[:end], 16)
        if size == 0:
            break
        parts.append(rest[end + 2 : end + 2 + size])
        rest = rest[end + 4 + size :]
    return b"".join(parts)
