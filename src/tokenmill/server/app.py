"""The application: routes and what hangs together. Owns: paths, request bodies to schemas, and the OpenAPI document.

Must not know: how tokens are made (Backend), sockets (run.py).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pydantic_core
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import tokenmill
from tokenmill.core.config import ServerConfig
from tokenmill.core.errors import UserError
from tokenmill.server.backend import Backend
from tokenmill.server.context import Context, RequestLimits
from tokenmill.server.errors import HttpError, describe_error, error_bytes, error_headers
from tokenmill.server.gate import Gate, GateLimits
from tokenmill.server.guard import Guard
from tokenmill.server.metrics import Metrics
from tokenmill.server.openai import chat, completions, embeddings, tokens
from tokenmill.server.openai.job import Job
from tokenmill.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from tokenmill.server.sse import EventStream
from tokenmill.server.text import TextWorkers

B = TypeVar("B", bound=BaseModel)
encode = msgspec.json.Encoder().encode
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_context(backend: Backend, config: ServerConfig) -> Context:
    """The parts of one server around a loaded backend."""
    info = backend.info
    metrics = Metrics(backend, info.names[0])
    backend.observe = metrics.saw_step
    limits = config.limits
    gate_limits = GateLimits(
        capacity=limits.max_num_queued_reqs,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        tenants=max(1, len(config.listen.api_key or ())),
    )
    return Context(
        backend=backend,
        config=config,
        gate=Gate(gate_limits, metrics.reject),
        metrics=metrics,
        text=TextWorkers(info.tokenizer, info.max_model_len, budget_s=config.patience.text_timeout),
        limits=RequestLimits(limits.max_n, limits.max_logprobs, limits.max_stop),
        chat_template=_template(config.serve.chat_template),
    )


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat-template {path} cannot be read: {error}.") from error


def make_app(context: Context) -> Guard:
    """The whole ASGI application."""
    app = FastAPI(title="tokenmill", version=tokenmill.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _any_error)
    _add_openai(app, context)
    _add_operations(app, context)
    routes = frozenset(getattr(route, "path", "") for route in app.routes)
    return Guard(app, context, routes)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "There is no such path here.", 405: "This path does not take that method."}
    found = HttpError(error.status_code, text.get(error.status_code, "The request was refused."))
    return _error_response(found, dict(error.headers or {}))


async def _any_error(request: Request, error: Exception) -> Response:
    return _error_response(describe_error(error), {})


def _error_response(found: HttpError, headers: dict[str, str]) -> Response:
    return Response(
        error_bytes(found), found.status, {**headers, **error_headers(found)}, media_type="application/json"
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


# ---------------------------------------------------------------- OpenAI


async def _read(request: Request, schema: type[B]) -> tuple[B, dict[str, Any]]:
    """The body, checked; -> model and raw object."""
    try:
        raw = pydantic_core.from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise HttpError(400, "The body must be a JSON object.")
    return schema.model_validate(raw), raw


def _add_openai(app: FastAPI, context: Context) -> None:
    created = int(time.time())

    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        async with _Work(context, request) as work:
            body, raw = await _read(request, ChatRequest)
            work.job.set_deadline(body.timeout or context.config.patience.request_timeout)
            opened = await chat.open_chat(context, body, raw, work.job, work.base(body.request_id))
            if body.stream:
                return work.stream(chat.ChatStream(opened).chunks())
            return _json(await chat.whole_answer(opened))

    async def text_completions(request: Request) -> Response:
        """Continue one or several prompts."""
        async with _Work(context, request) as work:
            body, raw = await _read(request, CompletionRequest)
            work.job.set_deadline(body.timeout or context.config.patience.request_timeout)
            opened = await completions.open_completion(context, body, raw, work.job, work.base(body.request_id))
            if body.stream:
                return work.stream(completions.CompletionStream(opened).chunks())
            return _json(await completions.whole_answer(opened))

    async def make_embeddings(request: Request) -> Response:
        """Unit vectors of texts."""
        async with _Work(context, request) as work:
            body, raw = await _read(request, EmbeddingRequest)
            work.job.set_deadline(body.timeout or context.config.patience.request_timeout)
            return _json(await embeddings.embed(context, body, raw, work.job, work.base(body.request_id)))

    async def models(request: Request) -> Response:
        """The served models."""
        return _json(tokens.model_list(context, created))

    async def model(request: Request) -> Response:
        """One served model."""
        name = context.check_model(request.path_params["name"])
        return _json(tokens.model_card(context, name, created))

    async def timeline(request: Request) -> Response:
        """What happened to a recent request, and when; only its own key may ask."""
        owner = request.scope["state"].get("tenant", "anonymous")
        found = context.history.find(request.path_params["id"], owner)
        if found is None:
            raise HttpError(404, "There is no such request, or it is too long ago.", param="id")
        return _json(found)

    app.add_api_route("/v1/requests/{id}", timeline, methods=["GET"], response_class=Response)
    _post(app, "/v1/chat/completions", chat_completions, ChatRequest)
    _post(app, "/v1/completions", text_completions, CompletionRequest)
    _post(app, "/v1/embeddings", make_embeddings, EmbeddingRequest)
    app.add_api_route("/v1/models", models, methods=["GET"], response_class=Response)
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], response_class=Response)


class _Work:
    """A job's frame: its places are given back however the handler ends, unless a stream takes it over."""

    def __init__(self, context: Context, request: Request) -> None:
        self.context = context
        self.request = request
        self.handed_over = False

    async def __aenter__(self) -> _Work:
        state = self.request.scope["state"]
        self.job = Job(self.context, state.get("tenant", "anonymous"), 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.handed_over:
            self.job.close()

    def base(self, given: str | None) -> str:
        """The id that the answer carries, after its prefix."""
        return given or self.request.scope["state"]["request_id"]

    def stream(self, chunks: Any) -> Response:
        """Answer with events; the job ends with them."""
        self.handed_over = True
        return EventStream(chunks, self.job.close)


def _post(app: FastAPI, path: str, handler: Callable[[Request], Awaitable[Response]], schema: type[BaseModel]) -> None:
    """A route whose body is read by hand (strictly, from bytes) and documented from its schema."""
    content = {"application/json": {"schema": schema.model_json_schema(ref_template="#/components/schemas/{model}")}}
    app.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


# ---------------------------------------------------------------- operations


def _add_operations(app: FastAPI, context: Context) -> None:
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        body, _ = await _read(request, TokenizeRequest)
        return _json(await tokens.tokenize(context, body))

    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body, _ = await _read(request, DetokenizeRequest)
        return _json(await tokens.detokenize(context, body))

    async def health(request: Request) -> Response:
        """200 while the engine makes progress, else 503."""
        return Response(status_code=503 if context.backend.health() else 200)

    async def ready(request: Request) -> Response:
        """200 while new requests are taken."""
        return Response(status_code=503 if context.gate.draining or context.backend.health() else 200)

    async def version(request: Request) -> Response:
        """This server's version."""
        return _json({"version": tokenmill.__version__})

    async def load(request: Request) -> Response:
        """How many outputs are open."""
        return _json({"server_load": context.gate.open})

    async def metrics(request: Request) -> Response:
        """Numbers for Prometheus."""
        return Response(context.metrics.render(), media_type=METRICS_TYPE)

    async def document(request: Request) -> Response:
        """This API as an OpenAPI document."""
        return _json(openapi(app))

    _post(app, "/tokenize", tokenize, TokenizeRequest)
    _post(app, "/detokenize", detokenize, DetokenizeRequest)
    plain = {"/health": health, "/ready": ready, "/ping": health, "/version": version, "/load": load}
    for path, handler in {**plain, "/metrics": metrics}.items():
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)
    app.add_api_route("/openapi.json", document, methods=["GET"], response_class=Response, include_in_schema=False)


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with the schemas' definitions in their common place and the error answers named."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shared = document.setdefault("components", {}).setdefault("schemas", {})
    for name, path in document["paths"].items():
        for operation in path.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            shared.update(body.pop("$defs", {}))
            answers = operation.setdefault("responses", {})
            answers.pop("422", None)
            for code, text in ERRORS.items():
                if "requestBody" in operation or code in ("401", "403", "503") or ("{" in name and code == "404"):
                    answers[code] = {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    return document


ERRORS = {
    "400": "Something in the request is wrong; `param` names it.",
    "401": "A key is needed.",
    "403": "Foreign Host or Origin.",
    "404": "No such model.",
    "413": "The body is too large.",
    "408": "The body did not arrive in time, or the deadline has passed.",
    "415": "The body is not JSON.",
    "429": "Over this key's rate or share; see Retry-After.",
    "503": "No room, or no engine; see Retry-After.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
