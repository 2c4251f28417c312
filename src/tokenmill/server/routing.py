"""What every family of endpoints is made of. Owns: Api (routes and how they word errors), strict bodies, the frame of a
job, JSON answers.

Must not know: any one API.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pydantic_core
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, error_bytes
from tokenmill.server.job import Job
from tokenmill.server.sse import EventStream, LineStream
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse

B = TypeVar("B", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
MAX_SESSION = 256
LARGE = 2 * MAX_SPEC_BYTES
"""Bytes of a structure as it is written; the exact limit is looked at where it is worked out."""
STRUCTURES = frozenset(
    (
        *("structured_outputs", "response_format", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("format", "text", "parameters", "output_format", "output_config"),
    )
)
"""Fields of all APIs that hold a structure, and no text that a model reads (`text` does where it is no object)."""
encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Api:
    """One family of endpoints."""

    add: Callable[[FastAPI, Context], None]
    """Puts its routes into the application."""
    generating: frozenset[str] = frozenset()
    """Paths that are refused before their body is read while the server is full."""
    keyless: frozenset[str] = frozenset()
    """Paths that anybody may GET: they hold no data."""
    unlogged: frozenset[str] = frozenset()
    """Paths that are asked so often, or say so little, that the access log leaves them out."""
    prefixes: tuple[str, ...] = ()
    """Paths that begin so get their errors from `error`."""
    error: Callable[[HttpError], bytes] = error_bytes
    """The body of an error answer."""


def error_shape(apis: Iterable[Api], path: str) -> Callable[[HttpError], bytes]:
    """How errors on `path` are worded: the API with the longest prefix decides, else OpenAI's way."""
    found = [(len(prefix), api.error) for api in apis for prefix in api.prefixes if _covers(prefix, path)]
    return max(found, key=lambda pair: pair[0])[1] if found else error_bytes


def _covers(prefix: str, path: str) -> bool:
    """Does a path belong to a prefix? `/` stands for itself alone."""
    return path == prefix if prefix == "/" else path.startswith(prefix)


def json_answer(value: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(encode(value), status, media_type="application/json")


async def read_body(request: Request, schema: type[B]) -> tuple[B, dict[str, Any]]:
    """The body, checked; -> model and raw object."""
    data = await request.body()
    if len(data) > LARGE:
        _refuse_large_structures(data)
    try:
        raw = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise HttpError(400, "The body must be a JSON object.")
    return schema.model_validate(raw), raw


def _refuse_large_structures(data: bytes) -> None:
    """Before it is read: all streams stand still while a hundred thousand values become objects."""
    try:
        fields = _fields(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return  # what is wrong with it is said by who reads it
    for name in STRUCTURES.intersection(fields):
        value = memoryview(fields[name])
        if len(value) > LARGE and (name != "text" or bytes(value[:1]) == b"{"):
            refuse(f"{name} is larger than {MAX_SPEC_BYTES >> 10} KiB.")


def translated(schema: type[B], fields: Mapping[str, Any]) -> B:
    """A request in another API's words; fields that are None count as absent."""
    return schema.model_validate({name: value for name, value in fields.items() if value is not None})


class Work:
    """A job's frame: its places are given back however the handler ends, unless a stream takes it over."""

    def __init__(self, context: Context, request: Request) -> None:
        self.context = context
        self.request = request
        self.handed_over = False
        self.on_gone: set[Callable[[], None]] = request.scope["state"].get("on_gone", set())

    async def __aenter__(self) -> Work:
        owner = tenant(self.request)
        self.job = Job(self.context, owner, 1, owner if self.context.scoped else "")
        self.on_gone.add(self.job.abandon)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.handed_over:
            self._close()

    def detach(self) -> None:
        """The job goes on without its client; whoever takes it closes it."""
        self.handed_over = True
        self.on_gone.discard(self.job.abandon)

    def _close(self) -> None:
        self.job.close()
        self.on_gone.discard(self.job.abandon)

    async def read(self, schema: type[B]) -> tuple[B, dict[str, Any]]:
        """The body; its `timeout`, or the server's, begins to count."""
        body, raw = await read_body(self.request, schema)
        self._heed_headers(body)
        self.job.set_deadline(getattr(body, "timeout", None) or self.context.config.patience.request_timeout)
        return body, raw

    def _heed_headers(self, body: BaseModel) -> None:
        """Headers that say what fields say; a priority in a header wins over the body's, as it does in vLLM."""
        headers, fields = self.request.headers, type(body).model_fields
        priority = _integer_header(headers, "x-vllm-priority")
        if priority is not None and "priority" in fields:
            body.priority = priority  # type: ignore[attr-defined]
        session = getattr(body, "session_id", None) or headers.get("x-session-id", "")[:MAX_SESSION]
        if session:  # a key's sessions are its own
            self.job.inbox.session = f"{self.job.tenant}/{session}"
        self.job.inbox.rank = _integer_header(headers, "x-data-parallel-rank", least=0)
        self.job.parent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}

    def base(self, given: str | None = None) -> str:
        """The id that the answer carries, after its prefix."""
        return given or self.request.scope["state"]["request_id"]

    def stream(self, chunks: AsyncIterator[bytes], headers: list[tuple[bytes, bytes]] | None = None) -> Response:
        """Answer with events; the job ends with them."""
        self.handed_over = True
        return EventStream(chunks, self._close, headers)

    def lines(self, chunks: AsyncIterator[bytes]) -> Response:
        """Answer with one JSON object per line."""
        self.handed_over = True
        return LineStream(chunks, self._close)


def _integer_header(headers: Mapping[str, str], name: str, least: int = -(2**31)) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or not least <= int(text) < 2**31:
        raise HttpError(400, f"The header {name} must be an integer.", param=name)
    return int(text)


def tenant(request: Request) -> str:
    """Whose key asks."""
    return request.scope["state"].get("tenant", "anonymous")


def get(app: FastAPI, path: str, handler: Handler, *, documented: bool = True) -> None:
    """A route without a body."""
    app.add_api_route(path, handler, methods=["GET"], response_class=Response, include_in_schema=documented)


def _described(schema: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema; its parts are named after their API, because several have a Message of their own."""
    family = schema.__module__.split(".")[-2]
    prefix = "" if family == "openai" else family.capitalize()
    found = schema.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    found["$defs"] = {prefix + name: part for name, part in found.get("$defs", {}).items()}
    return found


def post(app: FastAPI, path: str, handler: Handler, schema: type[BaseModel]) -> None:
    """A route whose body is read by hand (strictly, from bytes) and documented from its schema."""
    content = {"application/json": {"schema": _described(schema)}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
