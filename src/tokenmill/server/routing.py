"""The building blocks of every family of endpoints. Owns: Api (routes and how they word errors), the frame of a job,
JSON answers.

Must not know: any one API.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FunctionType
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Match, Route

from tokenmill.core.unread_names import Unknown, judge_names, look_in_template, refuse_unknown
from tokenmill.server.bodies import B, Parcel, Schema, parse
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, error_bytes
from tokenmill.server.inputs.headers import PROBES, as_headers, ineffective_headers, judge_query, judge_unread_body
from tokenmill.server.inputs.schema_names import schema_name
from tokenmill.server.model_lookup import ModelAnswer, ModelHandler, Streams, find_streams, named_in_address
from tokenmill.server.request_job import Gathered, Job
from tokenmill.server.sse import EventStream, LineStream

Handler = Callable[[Request], Awaitable[Response]] | ModelHandler
"""A handler that also takes a context is about one model, which is found and loaded first (model_lookup.py)."""
Endpoint = Callable[[Request], Awaitable[Response]]
MAX_SESSION = 256
encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Api:
    """One family of endpoints."""

    add: Callable[[FastAPI, Context], None]
    """Adds its routes to the application."""
    generating: frozenset[str] = frozenset()
    """Paths that are refused before their body is read while the server is full."""
    keyless: frozenset[str] = frozenset()
    """Paths that anybody may GET: they hold no data."""
    unlogged: frozenset[str] = frozenset()
    """Paths that the access log leaves out, because they are requested often or say little."""
    prefixes: tuple[str, ...] = ()
    """Paths with these prefixes have their errors worded by `error`."""
    error: Callable[[HttpError], bytes] = error_bytes
    """The body of an error answer."""
    streams: Streams = field(default_factory=Streams)
    """Which answers are server-sent events."""
    any_type: bool = False
    """Read bodies as JSON whatever their Content-Type says. This API's own server does so, and `curl -d` without a
    header calls every body a form."""
    streamed: tuple[str, ...] = ()
    """Prefixes of paths whose POSTs bring bytes that their handlers read as they arrive."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Paths that are other names of paths, of this API or of another one."""
    header: bytes = b""
    shared: tuple[str, ...] = ()
    """Prefixes of paths that another API has as well. Requests with `header` belong to this API."""


def error_shape(apis: Iterable[Api], path: str, headers: Collection[bytes] = ()) -> Callable[[HttpError], bytes]:
    """The function that words errors on `path`: that of the API with the longest matching prefix, else OpenAI's."""
    own = [(api, (*api.prefixes, *(api.shared if api.header in headers else ()))) for api in apis]
    found = [(len(prefix), api.error) for api, prefixes in own for prefix in prefixes if _covers(prefix, path)]
    return max(found, key=lambda pair: pair[0])[1] if found else error_bytes


def reads_any_type(apis: Iterable[Api], path: str) -> bool:
    """Is a body on `path` JSON whatever its Content-Type?"""
    return any(_covers(prefix, path) for api in apis if api.any_type for prefix in api.prefixes)


def _covers(prefix: str, path: str) -> bool:
    """Does a path belong to a prefix? `/` covers only itself."""
    return path == prefix if prefix == "/" else path.startswith(prefix)


def json_answer(value: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(encode(value), status, media_type="application/json")


Fields = dict[str, Any]


async def read_body(
    context: Context, request: Request, schema: Schema[B], first: Callable[[Fields], None] | None = None
) -> B:
    """The checked body. Its bytes are released before anything else happens. `first` sees the fields and may remove
    some."""
    parcel: Parcel = request.scope["state"]["body"]

    def look_at(chosen: type[BaseModel], raw: Fields) -> None:
        if first is not None:
            first(raw)
        judge(context, request, schema_name(chosen), raw)

    try:
        judge_around(context, request)
        return await context.bodies.run_in_thread(parcel.size, lambda: parse(parcel.take(), schema, look_at))
    finally:
        parcel.release()


def body_size(request: Request) -> int:
    """Bytes of the received body."""
    size: int = request.scope["state"]["body"].size
    return size


def judge(context: Context, request: Request, object_name: str, raw: dict[str, Any]) -> None:
    """Refuse the names on the list of refused ones. Unknown names are counted, and reported in the answer's headers."""
    unknown, known = Unknown(), context.bodies.rules[object_name]
    judge_names(raw, known, unknown)
    request.scope["state"].setdefault("spelled", {}).update(unknown.spelled)
    kwargs = raw.get("chat_template_kwargs") if "chat_template_kwargs" in known.fields else None
    if isinstance(kwargs, dict):
        tokenizer = context.backend.info.tokenizer
        own = raw.get("chat_template") or context.chat_template
        template = own or (tokenizer.chat_template if tokenizer is not None else None)
        look_in_template(kwargs, template, unknown)
    _tell(context, request, object_name, unknown)


def judge_around(context: Context, request: Request) -> None:
    """The same for names in the query, and for headers that ask for something that this server does not do."""
    if request.scope.get("query_string"):
        unknown, route = Unknown(), request.scope.get("route")
        about_model = getattr(getattr(route, "endpoint", None), "about_model", False)
        judge_query(getattr(route, "path", ""), request.query_params, unknown, about_model=about_model)
        _tell(context, request, "query", unknown)
    unknown = Unknown()
    for name in ineffective_headers(request.headers):
        unknown.tell(name)
    _tell(context, request, "header", unknown)


def judge_without_body(context: Context, request: Request) -> None:
    """The same for a request whose body nobody reads. If it has one all the same, its fields have no effect either."""
    judge_around(context, request)
    parcel: Parcel | None = request.scope["state"].get("body")
    if parcel is not None and parcel.size:
        unknown = Unknown()
        path = getattr(request.scope.get("route"), "path", "")
        judge_unread_body(path, parcel.fields(), request.query_params, unknown)
        _tell(context, request, "body", unknown)


def _tell(context: Context, request: Request, object_name: str, unknown: Unknown) -> None:
    """Report names that have no effect here, or refuse them with --strict-fields."""
    if not unknown.names:
        return
    context.shared.metrics.ignored.labels(object_name).inc(len(unknown.names))
    if context.config.limits.strict_fields:
        refuse_unknown(unknown)
    request.scope["state"].setdefault("warnings", []).extend(as_headers(unknown))


class Work:
    """The frame of a job. Its places are freed however the handler ends, unless a stream takes the job over."""

    def __init__(self, context: Context, request: Request) -> None:
        self.context = context
        self.request = request
        self.handed_over = False
        self.after: list[Callable[[], None]] = []
        """Called when the job has ended, however it ends, even if its stream never began."""
        self.on_gone: set[Callable[[], None]] = request.scope["state"].get("on_gone", set())
        self.opening = asyncio.timeout(None)
        """The deadline until the engines have all of the job: texts are read, and grammars wait for each other. From
        then on the job looks at it itself."""

    async def __aenter__(self) -> Work:
        self.job = Job(self.context, tenant(self.request))
        self.job.asked = self.request.scope["state"].get("began", self.job.asked)  # it may have waited for its model
        self.job.adapter = self.context.adapter_of(named_in_address(self.request))
        self.on_gone.add(self.job.abandon)
        self.job.on_sent = self._opened
        await self.opening.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if not self.handed_over:
            self._close()
        self.job.on_sent = None  # it refers back to this object
        await self.opening.__aexit__(*error)

    def _opened(self) -> None:
        if not self.opening.expired():
            self.opening.reschedule(None)

    def detach(self) -> None:
        """Let the job continue without its client. Its new owner closes it."""
        self.handed_over = True
        self.on_gone.discard(self.job.abandon)

    def _close(self) -> None:
        self.job.close()
        self.on_gone.discard(self.job.abandon)
        for end in self.after:
            end()

    async def read(self, schema: Schema[B], first: Callable[[Fields], None] | None = None) -> B:
        """Read the body and start its `timeout`, or the server's. `first` sees the fields before anything else."""
        self.job.size = body_size(self.request)
        body = await read_body(self.context, self.request, schema, first)
        self._apply_headers()
        self.apply_job_fields(body)
        return body

    def judge(self, object_name: str, raw: dict[str, Any]) -> None:
        """Judge the names of an object deeper in the body."""
        judge(self.context, self.request, object_name, raw)

    def apply_job_fields(self, body: BaseModel) -> None:
        """Apply the fields about the job: `timeout`, `session_id`."""
        if (model := getattr(body, "model", None)) is not None:
            self.job.adapter = self.context.adapter_of(model)
        session = getattr(body, "session_id", None) or self.request.headers.get("x-session-id", "")[:MAX_SESSION]
        if session:  # every key has sessions of its own
            self.job.inbox.session = f"{self.job.tenant}/{session}"
        self.job.set_deadline(getattr(body, "timeout", None) or self.context.config.patience.request_timeout)
        if self.job.deadline is not None:
            self.opening.reschedule(asyncio.get_running_loop().time() + self.job.deadline - time.monotonic())

    def _apply_headers(self) -> None:
        """Apply headers that mean the same as fields."""
        headers = self.request.headers
        self.job.priority = _integer_header(headers, "x-vllm-priority")
        self.job.inbox.rank = _integer_header(headers, "x-data-parallel-rank", least=0)
        self.job.parent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}

    def base(self, given: str | None = None) -> str:
        """The id that the answer carries, after its prefix."""
        return given or self.request.scope["state"]["request_id"]

    async def whole(self, make: Callable[[Gathered], Any]) -> Response:
        """Answer with the JSON of all outputs. A large one is made and encoded off the loop."""
        found = await self.job.gather()
        return await self.context.bodies.run_in_thread(self.job.weight, lambda: json_answer(make(found)))

    def stream(self, chunks: AsyncIterator[bytes]) -> Response:
        """Answer with events; the job ends when they end. An error becomes the last event, in the API's words."""
        self.handed_over = True
        streams = find_streams(self.request)
        return EventStream(chunks, self._close, None if streams is None else streams.failed)

    def lines(self, chunks: AsyncIterator[bytes]) -> Response:
        """Answer with one JSON object per line. An error becomes the last line."""
        self.handed_over = True
        word = error_shape(self.request.app.state.apis, self.request.scope["path"])
        return LineStream(chunks, self._close, lambda found: word(found) + b"\n")


def _integer_header(headers: Mapping[str, str], name: str, least: int = -(2**31)) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or not least <= int(text) < 2**31:
        raise HttpError(400, f"The header {name} must be an integer.", param=name)
    return int(text)


def tenant(request: Request) -> str:
    """The key that the request came with."""
    return request.scope["state"].get("tenant", "anonymous")


def of_model(handler: Handler, fields: tuple[str, ...] = ("model",)) -> Endpoint:
    """A handler in the form that routes take. `fields`: the body's fields that may name the model."""
    if cast(FunctionType, handler).__code__.co_argcount == 1:
        return cast(Endpoint, handler)
    about = cast(ModelHandler, handler)

    async def endpoint(request: Request) -> Response:
        return ModelAnswer(about, request, fields)

    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
    vars(endpoint)["about_model"] = True
    return endpoint


class PlainRoute(Route):
    """A route whose endpoint takes the request and reads it by itself. FastAPI's own route is made from it for the
    document alone: it looks at signatures when it is made, which for all paths takes longer than the rest of the
    application, and resolves dependencies for each request."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        methods: Collection[str],
        documented: bool,
        openapi_extra: dict[str, Any] | None,
    ) -> None:
        super().__init__(path, endpoint, methods=methods, include_in_schema=documented)
        self.methods = set(methods)  # Starlette answers HEAD wherever it answers GET
        self.openapi_extra = openapi_extra

    def matches(self, scope: Any) -> Any:
        found, child = super().matches(scope)
        return found, {**child, "route": self}

    def described(self) -> APIRoute:
        """FastAPI's route of the same."""
        return APIRoute(
            self.path,
            self.endpoint,
            methods=self.methods,
            response_class=Response,
            include_in_schema=self.include_in_schema,
            openapi_extra=self.openapi_extra,
        )


def add_route(
    app: FastAPI,
    methods: Collection[str],
    path: str,
    endpoint: Endpoint,
    *,
    documented: bool = True,
    openapi_extra: dict[str, Any] | None = None,
) -> None:
    """A route whose endpoint does everything by itself."""
    app.router.routes.append(PlainRoute(path, endpoint, methods, documented, openapi_extra))


def get(app: FastAPI, path: str, handler: Handler, *, documented: bool = True) -> None:
    """A route without a body."""
    add_route(app, ("GET",), path, _judged(path, handler), documented=documented)


def get_with_header(app: FastAPI, path: str, handler: Handler, header: bytes) -> None:
    """The same, but only for requests with this header. Other requests go to a later route."""
    app.router.routes.append(_HeaderRoute(path, _judged(path, handler), header))


class _HeaderRoute(PlainRoute):
    def __init__(self, path: str, endpoint: Endpoint, header: bytes) -> None:
        super().__init__(path, endpoint, ("GET",), documented=False, openapi_extra=None)
        self.header = header

    def matches(self, scope: Any) -> Any:
        if not any(name == self.header for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


def delete(app: FastAPI, path: str, handler: Handler) -> None:
    """A route that deletes something. A body is not read."""
    add_route(app, ("DELETE",), path, _judged(path, handler))


def _judged(path: str, handler: Handler) -> Endpoint:
    inner = of_model(handler)

    @wraps(inner)
    async def judged(request: Request) -> Response:
        if path not in PROBES:
            judge_without_body(request.app.state.context, request)
        return await inner(request)

    return judged


@cache
def _described(schema: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema. Its parts carry the name of their API, because several APIs have a Message of their own."""
    family = schema.__module__.split(".")[-2]
    prefix = "" if family == "openai" else family.capitalize()
    found = schema.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    found["$defs"] = {prefix + name: part for name, part in found.get("$defs", {}).items()}
    for part in (found, *found["$defs"].values()):
        for name, value in part.get("properties", {}).items():
            if name not in part.get("required", ()) and _NULL not in value.get("anyOf", ()):
                part["properties"][name] = {"anyOf": [value, _NULL]}
    return found


_NULL = {"type": "null"}
"""Every object accepts null for an optional field, which then counts as absent."""


def post(
    app: FastAPI, path: str, handler: Handler, schema: type[BaseModel], fields: tuple[str, ...] = ("model",)
) -> None:
    """A route whose body is read by hand (strictly, from bytes) and documented from its schema. `fields`: the body's
    fields that may name the model."""
    content = {"application/json": {"schema": _described(schema)}}
    extra = {"requestBody": {"required": True, "content": content}}
    add_route(app, ("POST",), path, of_model(handler, fields), openapi_extra=extra)
