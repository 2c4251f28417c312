"""Finds the model that a request is for, and waits until it is loaded. Owns: reading the name before any other work,
which key may use which model, refusals, and the comments that keep a stream's connection alive meanwhile.

The name is the `model` of the path, the query or the body. Without one, the first entry that this key may use answers.
A server of one model does not read the body's name here: the handler has the model check it. Must not know: any one
API.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from tokenmill.server.context import Context, Model, ServerContext, no_such_model
from tokenmill.server.errors import HttpError, describe_error, shutting_down, under_other_names, with_request_id
from tokenmill.server.many_models.entry import Entry, GoneError, State, UnreadyError
from tokenmill.server.rights import models_of
from tokenmill.server.sse import HEADERS

ModelHandler = Callable[[Request, Context], Awaitable[Response]]
FIRST_COMMENT_S = 1.0
"""A stream's answer does not begin before this, so that a refusal can still have its own status."""
COMMENT_S = 5.0
COMMENT = b": loading\n\n"


@dataclass(frozen=True, slots=True)
class Streams:
    """Which answers are server-sent events, and the form of an error after such an answer has begun. `always`: paths
    (or their last part) whose answers are always events; `asked`: paths whose answers are events if the body says
    `stream`."""

    asked: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    failed: Callable[[HttpError], bytes] = lambda found: b""

    def holds(self, path: str, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Will the answer be events?"""
        return self.of(path) and (path not in self.asked or bytes(fields.get("stream", b"")) == b"true")

    def of(self, path: str) -> bool:
        """Can answers on this path be events?"""
        return path in self.asked or path in self.always or path.rpartition("/")[2] in self.always


class ModelAnswer(Response):
    """An answer by a model. The model is found, loaded, and kept loaded while it answers."""

    def __init__(self, handler: ModelHandler, request: Request, names: tuple[str, ...] = ("model",)) -> None:
        """`names`: the body's fields that may name the model."""
        self.handler, self.request, self.names = handler, request, names
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = self.request
        request.scope["state"]["began"] = time.monotonic()
        shared: ServerContext = request.app.state.context.shared
        fields = await peek_fields(shared, request) if len(shared.models.entries) > 1 else {}
        named = next(filter(None, (text_of(fields, name) for name in self.names)), None)
        entry = find_entry(shared, request, named)
        check_agreement(shared, request, entry, named)
        late = None if entry.state is State.READY else await late_stream(shared, request, fields, send)
        try:
            async with holding_model(shared, entry, seconds_of(fields)) as (entry, context):
                request.scope["state"]["entry"] = entry
                if late is not None:
                    await late.stop()
                if (name := named_in_address(request)) is not None:
                    context.check_model(name)
                response = await self.handler(request, context)
                await response(scope, receive, send if late is None else late.send)
        except asyncio.CancelledError:  # the server ends, or the client has left and hears nothing
            if late is not None and late.begun and not late.telling.done():
                late.telling.cancel()
                await late.fail(shutting_down())
            raise
        except Exception as error:
            if late is None or not late.begun:
                raise
            spelled = request.scope["state"].get("spelled", {})
            await late.fail(under_other_names(describe_error(error), spelled))
        finally:
            if late is not None:
                late.telling.cancel()


@contextlib.asynccontextmanager
async def asked_model(shared: ServerContext, request: Request) -> AsyncIterator[Context]:
    """The context of the model that a WebSocket message names. The model stays loaded inside this context."""
    request.scope["state"]["began"] = time.monotonic()
    fields = await peek_fields(shared, request) if len(shared.models.entries) > 1 else {}
    entry = find_entry(shared, request, text_of(fields, "model"))
    async with holding_model(shared, entry, seconds_of(fields)) as (_, context):
        yield context


@contextlib.asynccontextmanager
async def holding_model(
    shared: ServerContext, entry: Entry[Model], seconds: float | None = None
) -> AsyncIterator[tuple[Entry[Model], Context]]:
    """A model's entry and its context, once it is loaded. The model stays loaded inside it. Refusals are raised in the
    form that clients see. `seconds`: the request's own deadline."""
    try:
        async with asyncio.timeout(seconds or shared.config.patience.request_timeout or None):
            entry, unit = await _enter(shared, entry)
    except UnreadyError as error:
        shared.metrics.reject("model")
        raise refusal(error) from None
    try:
        yield entry, unit.context
    finally:
        shared.models.leave(entry)


async def _enter(shared: ServerContext, entry: Entry[Model]) -> tuple[Entry[Model], Model]:
    """Wait until the model is loaded. One that is made again meanwhile is a new entry of the same name, and requests
    wait for that."""
    while True:
        try:
            return entry, await shared.models.enter(entry)
        except GoneError:
            again = shared.models.names.get(entry.name)
            if again is None:
                raise no_such_model(entry.name) from None
            entry = again


def refusal(error: UnreadyError) -> HttpError:
    """507 for a model that can never fit, else 503, with the loader's own sentence."""
    return HttpError(507 if error.never else 503, str(error), retry_after=error.retry_after)


async def peek_fields(shared: ServerContext, request: Request) -> Mapping[str, msgspec.Raw]:
    """The body's fields, not decoded. The body stays in its parcel."""
    parcel = request.scope["state"].get("body")
    if parcel is None:
        return {}
    found: Mapping[str, msgspec.Raw] = await shared.bodies.run_in_thread(parcel.size, parcel.fields)
    return found


def text_of(fields: Mapping[str, msgspec.Raw], name: str) -> str | None:
    """The text in a field. None: it holds no text."""
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (KeyError, msgspec.MsgspecError, ValueError):  # the text may not be UTF-8
        return None


def seconds_of(fields: Mapping[str, msgspec.Raw]) -> float | None:
    """The request's own deadline. None: it has none, or one that its handler refuses."""
    try:
        found = msgspec.json.decode(fields["timeout"], type=float)
    except (KeyError, msgspec.MsgspecError, ValueError):
        return None
    return found if found > 0 else None


def find_entry(shared: ServerContext, request: Request, named: str | None) -> Entry[Model]:
    """The entry that a request is for. Raises 404 if there is none that this key may use."""
    models, allowed = shared.models, models_of(shared, request)
    if len(models.entries) == 1 and allowed is None:
        return models.first
    name = named_in_address(request) or named
    mine = [each for each in models.entries.values() if allowed is None or each.name in allowed]
    if not name:
        if not mine:
            raise HttpError(404, "There is no model here.", param="model")
        return mine[0]
    return find_by_name(shared, request, name)


def check_agreement(shared: ServerContext, request: Request, entry: Entry[Model], named: str | None) -> None:
    """Refuse a body that names another model than the address does. The handler refuses a name that nothing has."""
    if named is None or named_in_address(request) is None:
        return
    try:
        other = find_by_name(shared, request, named)
    except HttpError:
        return
    if other is not entry:
        text = f"The address names the model {entry.name!r}, and the body names {named[:100]!r}: name one of them."
        raise HttpError(400, text, param="model")


def named_in_address(request: Request) -> str | None:
    """The model that the path or the query names, which goes before the body's. None: neither does."""
    path, query = request.path_params.get("model"), request.query_params.get("model")
    if path and query and path != query:
        text = f"The path names the model {path[:100]!r}, and the query names {query[:100]!r}: name one of them."
        raise HttpError(400, text, param="model")
    return path or query or None


def find_by_name(shared: ServerContext, request: Request, name: str) -> Entry[Model]:
    """The entry of this name. Raises 404 if there is none that this key may use."""
    models, allowed = shared.models, models_of(shared, request)
    entry = next(filter(None, map(models.find, models.spellings.of(name))), None)
    if entry is None or (allowed is not None and entry.name not in allowed):
        mine = [each.name for each in models.entries.values() if allowed is None or each.name in allowed]
        raise no_such_model(name, mine)
    return entry


def find_streams(request: Request) -> Streams | None:
    """How answers on this path stream. None: they never do."""
    path = request.scope["path"]
    for api in request.app.state.apis:
        if api.streams.of(path):
            found: Streams = api.streams
            return found
    return None


async def late_stream(
    shared: ServerContext, request: Request, fields: Mapping[str, msgspec.Raw], send: Any
) -> LateStream | None:
    """The answer to a request whose model is not loaded yet. None: it is no stream, and simply waits."""
    streams = find_streams(request)
    if streams is None or not streams.holds(request.scope["path"], fields or await peek_fields(shared, request)):
        return None
    return LateStream(send, lambda found: streams.failed(with_request_id(found, request.scope)))


class LateStream:
    """An answer that begins with comments. Its head is already sent, so everything that follows goes into its body."""

    def __init__(self, send: Any, failed: Callable[[HttpError], bytes]) -> None:
        self.inner, self.failed = send, failed
        self.telling = asyncio.ensure_future(self.tell())
        self.begun = False
        self.refused: int | None = None
        self.said = b""

    async def tell(self) -> None:
        """Send comments until cancelled."""
        await asyncio.sleep(FIRST_COMMENT_S)
        self.begun = True
        await self.inner({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while True:
            await self._body(COMMENT)
            await asyncio.sleep(COMMENT_S)

    async def stop(self) -> None:
        """Send no more comments."""
        self.telling.cancel()
        await asyncio.wait((self.telling,))  # (which passes on that the client has left meanwhile)

    async def send(self, message: Any) -> None:
        if not self.begun:
            await self.inner(message)
        elif message["type"] == "http.response.start":
            self.refused = message["status"] if message["status"] != 200 else None
        elif self.refused is None:
            await self.inner(message)
        else:  # not a stream but an error, which becomes the data of an event
            self.said += message.get("body", b"")
            if not message.get("more_body"):
                await self.inner({**message, "body": b"data: " + self.said + b"\n\n"})

    async def fail(self, found: HttpError) -> None:
        """End with an error in the form that this API uses in streams."""
        await self.inner({"type": "http.response.body", "body": self.failed(found), "more_body": False})

    async def _body(self, data: bytes) -> None:
        await self.inner({"type": "http.response.body", "body": data, "more_body": True})
