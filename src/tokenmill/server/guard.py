"""The first step of every request. Owns: access, the body's ceiling and deadline, disconnects, ids, logs, metrics.

It is a plain ASGI function around the app. So the app sees no request that is too large, not allowed, or whose client
has left. Must not know: what endpoints do.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from prometheus_client import Counter, Histogram
from starlette.routing import compile_path

from tokenmill.server.access import CORS_EXPOSED, CORS_METHODS, OPEN_PATHS, Access, allowed_headers
from tokenmill.server.bodies import Parcel
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, Pairs, describe_error, error_headers, shutting_down
from tokenmill.server.memory_trim import Load
from tokenmill.server.routing import Api, error_shape, reads_any_type

log = logging.getLogger("tokenmill.access")
_ID = re.compile(rb"^[\x21-\x7e]{1,128}$")
_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_TYPES = (b"application/json", b"text/json", b"application/octet-stream", b"")
Headers = dict[bytes, bytes]
ONCE = frozenset({b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-encoding"})
"""Headers that decide something may occur only once: a proxy on the way may have read the other copy."""


class Guard:
    """The outermost ASGI application of the server."""

    def __init__(self, app: FastAPI, context: Context, apis: Sequence[Api]) -> None:
        self.app = app
        self.apis = apis
        self.config = context.config
        self.metrics = context.shared.metrics
        self.gate = context.gate
        self.bodies = context.bodies
        paths = [getattr(route, "path", "") for route in app.routes]
        self.routes = frozenset(paths)
        self.templates = [(compile_path(path)[0], path) for path in dict.fromkeys(paths) if "{" in path]
        self.generating = frozenset[str]().union(*(api.generating for api in apis))
        self.keyless = frozenset[str]().union(*(api.keyless for api in apis))
        self.unlogged = OPEN_PATHS.union(*(api.unlogged for api in apis))
        self.renamed = {name: path for api in apis for name, path in api.renamed.items()}
        self.streamed = tuple(prefix for api in apis for prefix in api.streamed)
        self.access = Access(self.config.listen)
        self.load = Load()
        self.telling = frozenset(api.header for api in apis if api.header)
        """Headers that show to which API a shared path belongs."""
        self.wordings: dict[tuple[str, frozenset[bytes]], Callable[[HttpError], bytes]] = {}
        self.series: dict[tuple[str, str, str], tuple[Counter, Histogram, Histogram]] = {}
        self.next_line = 0.0
        self.untold = 0
        self.root = "/" + self.config.listen.root_path.strip("/")
        """The prefix of all paths, whether or not a proxy strips it. `/`: there is none."""

    def inner_path(self, path: str) -> str:
        """A path without the prefix that --root-path names, without a slash at its end, and by its first name: a
        redirection would name an address that may not be the client's (behind a proxy), and cost a second body."""
        if self.root != "/" and (path == self.root or path.startswith(self.root + "/")):
            path = path[len(self.root) :]
        path = path.removesuffix("/") or "/"
        return self.renamed.get(path, path)

    def wording(self, path: str, headers: Headers) -> Callable[[HttpError], bytes]:
        """The function that words errors on a path."""
        key = path, self.telling.intersection(headers)
        found = self.wordings.get(key) or error_shape(self.apis, path, key[1])
        if path in self.routes:
            self.wordings[key] = found
        return found

    def label(self, path: str) -> str:
        """The path's name in logs and metrics: its route's, so that clients cannot make more of them."""
        if path in self.routes:
            return path
        return next((template for pattern, template in self.templates if pattern.match(path)), "other")

    def count(self, handler: str, method: str, status: str, seconds: float, received: int) -> None:
        """Count an answered request."""
        found = self.series.get((handler, method, status))
        if found is None:
            found = self.series[handler, method, status] = self.metrics.series_of(handler, method, status)
        answers, durations, sizes = found
        answers.inc()
        durations.observe(seconds)
        sizes.observe(received)

    def tell_refusal(self, request_id: str, found: HttpError) -> None:
        """Log a refusal, at most one per second, because a burst has thousands. The access log and /metrics have all of
        them."""
        now = time.monotonic()
        if now < self.next_line:
            self.untold += 1
            return
        log.warning(
            "request refused",
            extra={"data": {"id": request_id, "status": found.status, "why": str(found), "others": self.untold}},
        )
        self.next_line, self.untold = now + 1, 0

    def is_shut(self, scope: Any) -> bool:
        """Will this request be refused whatever its body holds?"""
        return self.gate.is_shut() and scope["method"] == "POST" and self.inner_path(scope["path"]) in self.generating

    def turn_away(self, scope: Any, usual: Pairs) -> bytes | None:
        """The complete refusal of a request, made without the cost of a task. None: the request may enter."""
        return _Visit(self, scope, None, None).turn_away(usual)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        visit = _Visit(self, scope, receive, send)
        self.load.enter()
        self.metrics.load.set(self.load.open)
        try:
            await visit.answer()
        except asyncio.CancelledError:  # the server ends; left alone, uvicorn would answer 500
            await visit.refuse(shutting_down())
            raise
        except Exception as error:
            await visit.refuse(error)
        finally:
            self.load.leave(visit.received)
            self.metrics.load.set(self.load.open)
            visit.note()


class _Visit:
    """One HTTP request on its way."""

    def __init__(self, guard: Guard, scope: Any, receive: Any, send: Any) -> None:
        self.path = guard.inner_path(scope["path"])
        if self.path != scope["path"]:
            scope = {**scope, "path": self.path}
        # HEAD is handled as GET: the listener sends no body after such a head. Where clients store files, HEAD asks
        # whether one exists, so it stays.
        if scope["method"] == "HEAD" and not self.path.startswith(guard.streamed):
            scope = {**scope, "method": "GET"}
        self.guard, self.scope, self.receive, self.send = guard, scope, receive, send
        self.headers: Headers = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        self.twice = {name for name in ONCE if names.count(name) > 1} if len(names) > len(self.headers) else set()
        given = self.headers.get(b"x-request-id", b"")
        self.id = given.decode() if _ID.match(given) else uuid.uuid4().hex
        self.status = 0
        self.tenant = "anonymous"
        self.origin: bytes | None = None
        self.received = 0
        self.began = time.monotonic()
        scope.setdefault("state", {})["request_id"] = self.id

    def turn_away(self, usual: Pairs) -> bytes | None:
        """The complete refusal of a request whose client is allowed but finds no place. Other refusals leave the
        connection open."""
        state = self.scope["state"]
        try:
            self._meet()
            self.tenant = self.guard.access.tenant(self.path, self.headers)
        except HttpError:
            return None
        try:
            self.guard.gate.peek()
        except HttpError as found:
            body = self._body_of(found)
            self.status = found.status
            headers = [*usual, *_headers_of(found, body), *self._own_headers(state), (b"connection", b"close")]
            self.note()
            lines = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
            return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (found.status, _PHRASES[found.status], lines, body)
        return None

    async def answer(self) -> None:
        """Let the request in, read its body and hand it to the application, or raise why not."""
        state = self.scope["state"]
        path, method = self.path, self.scope["method"]
        self._meet()
        if method == "OPTIONS" and self.origin is not None and b"access-control-request-method" in self.headers:
            await self._preflight()
            return
        if method in ("GET", "HEAD") and path in self.guard.keyless:
            await self.guard.app(self.scope, self.receive, self._send)
            return
        self.tenant = state["tenant"] = self.guard.access.tenant(path, self.headers)
        if path in OPEN_PATHS or path.startswith(self.guard.streamed) or "upgrade" in state:
            await self.guard.app(self.scope, self.receive, self._send)
            return
        if method in ("GET", "HEAD", "OPTIONS"):
            await self._watched()
            return
        if path in self.guard.generating:
            self.guard.gate.peek()
        parcel = state["body"] = Parcel(self.guard.bodies)
        try:
            await self._gather(parcel)
            await self._watched()
        finally:
            parcel.release()

    def _meet(self) -> None:
        """Read from the head where the request comes from."""
        if self.twice:
            raise HttpError(400, f"The header {min(self.twice).decode()} came twice.")
        if self.headers.get(b"expect", b"100-continue").strip().lower() != b"100-continue":
            raise HttpError(417, "Expect can be 100-continue here: nothing else that it asks for would be done.")
        self.guard.access.check_host(self.headers)
        self.origin = self.guard.access.check_origin(self.headers)

    async def _gather(self, parcel: Parcel) -> None:
        """Read the whole body, within its ceiling and its deadline."""
        limit = self.guard.config.limits.max_body_bytes
        coded = self.headers.get(b"content-encoding", b"identity").lower() != b"identity"
        if coded or self.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise HttpError(415, "Compressed bodies are not accepted.")
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind not in _TYPES and not reads_any_type(self.guard.apis, self.path):
            raise HttpError(415, "The body must be JSON (Content-Type: application/json).")
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise HttpError(413, f"The body is larger than {limit} bytes.")
        try:
            async with asyncio.timeout(self.guard.config.patience.read_timeout):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    parcel.add(message.get("body", b""))
                    if parcel.size > limit:
                        raise HttpError(413, f"The body is larger than {limit} bytes.")
                    if not message.get("more_body"):
                        self.received = parcel.size
                        return
        except TimeoutError:
            raise HttpError(408, "The body did not arrive in time.") from None

    async def _watched(self) -> None:
        """Run the app; cancel it if the client leaves. A body is in the parcel, not in messages."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self.receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            await self.guard.app(self.scope, receive, self._send)
        except asyncio.CancelledError:
            if not gone and not self.status:
                raise  # the server ends, and the client can still be told
            self.status = self.status or 499
            if not gone and self.scope["state"].get("abort") is not None:
                self.scope["state"]["abort"]()  # a reader that has stopped reading would never empty the buffer
            if task.uncancel() > 0:
                raise
        finally:
            watcher.cancel()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), *self._own_headers(self.scope["state"])]
            if self.scope["state"].get("sending", bool)():  # the rest of the body is not read
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
            if "take" in message:  # the connection speaks another protocol from now on
                head = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
                line = b"HTTP/1.1 101 Switching Protocols\r\n"
                self.scope["state"]["taken"] = message["take"](line + head + b"\r\n")
                return
        await self.send(message)

    def _own_headers(self, state: dict[str, Any]) -> Pairs:
        """The headers of every answer. A page in a browser may read only headers that are listed."""
        headers = [(b"x-request-id", self.id.encode())]
        if self.origin:
            exposed = (b"access-control-expose-headers", CORS_EXPOSED)
            headers += [(b"access-control-allow-origin", self.origin), (b"vary", b"origin"), exposed]
        return [*headers, *state.get("warnings", ())]

    async def _preflight(self) -> None:
        names = allowed_headers(self.headers.get(b"access-control-request-headers", b""))
        headers = [(b"access-control-allow-methods", CORS_METHODS), (b"access-control-allow-headers", names)]
        await self._send({"type": "http.response.start", "status": 204, "headers": headers})
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: Exception) -> None:
        """Answer with the error, if no answer has begun."""
        if isinstance(error, _GoneError):
            self.status = 499
            return
        found = describe_error(error)
        if found.status == 500:
            log.error("request failed", exc_info=error, extra={"data": {"id": self.id}})
        body = self._body_of(found)
        if self.status:
            return  # the answer had already begun
        headers = _headers_of(found, body)
        if found.status in (408, 413, 415, 503):
            headers.append((b"connection", b"close"))
        with contextlib.suppress(OSError):
            await self._send({"type": "http.response.start", "status": found.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    def _body_of(self, found: HttpError) -> bytes:
        """The body of a refusal, worded by the path's API."""
        if found.status > 500:
            self.guard.tell_refusal(self.id, found)
        found.request_id = self.id
        return self.guard.wording(self.path, self.headers)(found)

    def note(self) -> None:
        """Count the visit, and write it into the access log."""
        path = self.path
        handler = self.guard.label(path)
        seconds = time.monotonic() - self.began
        method = self.scope["method"]
        known = method if method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH") else "OTHER"
        self.guard.count(handler, known, f"{self.status // 100}xx", seconds, self.received)
        if log.isEnabledFor(logging.INFO) and path not in self.guard.unlogged:
            data = {
                "id": self.id,
                "method": known,
                "path": handler,
                "status": self.status,
                "ms": round(seconds * 1e3, 2),
                "key": self.tenant,
            }
            log.info("request", extra={"data": data})


class _GoneError(Exception):
    """The client left before its request was complete."""


def _headers_of(found: HttpError, body: bytes) -> Pairs:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(k.encode(), v.encode()) for k, v in error_headers(found).items()]
    if found.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
