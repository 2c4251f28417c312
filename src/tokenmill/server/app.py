"""The application: all APIs and the parts of one server, put together. Owns: the list of APIs, and making
ServerContext and Context.

Must not know: paths (each API's `routes.py`), how tokens are made (Backend), sockets (run.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

import tokenmill
from tokenmill.core.config import ServeOptions, ServerConfig, make_config
from tokenmill.core.errors import UserError
from tokenmill.core.unread_names import Unknown, look_in_template
from tokenmill.server.absent import why_absent
from tokenmill.server.activity import Activity
from tokenmill.server.anthropic.routes import ANTHROPIC
from tokenmill.server.backend import Backend
from tokenmill.server.bodies import Bodies
from tokenmill.server.context import Context, Model, Past, RequestLimits, ServerContext
from tokenmill.server.errors import HttpError, describe_error, error_headers, under_other_names, with_request_id
from tokenmill.server.events import Events
from tokenmill.server.gate import Gate, GateLimits
from tokenmill.server.guard import Guard
from tokenmill.server.history import History
from tokenmill.server.kserve.routes import KSERVE
from tokenmill.server.llamacpp.routes import LLAMACPP
from tokenmill.server.lora.routes import ADAPTERS
from tokenmill.server.many_models.catalogue import Catalogue
from tokenmill.server.many_models.entry import Entry, Spec
from tokenmill.server.many_models.model_series import ModelSeries
from tokenmill.server.many_models.no_model import NoModelBackend
from tokenmill.server.metrics import Metrics
from tokenmill.server.ollama.routes import OLLAMA
from tokenmill.server.openai.routes import OPENAI
from tokenmill.server.openai.stored.routes import STORED_CHATS
from tokenmill.server.operations import OPERATIONS
from tokenmill.server.preflight import read_template
from tokenmill.server.request_rules import make_request_rules
from tokenmill.server.responses.routes import RESPONSES
from tokenmill.server.routing import error_shape
from tokenmill.server.scoring.routes import SCORING
from tokenmill.server.scoring.tei import TEI
from tokenmill.server.server_metrics import SeriesSource, ServerMetrics
from tokenmill.server.switch.loaded_model import let_go
from tokenmill.server.switch.routes import MODELS
from tokenmill.server.switch.sleep import SLEEPING
from tokenmill.server.text_workers import TextWorkers
from tokenmill.server.tgi.routes import TGI
from tokenmill.server.traces import Traces
from tokenmill.server.traffic_recorder import Recorder
from tokenmill.server.web.routes import WEB
from tokenmill.text.messages.detect import find_format

log = logging.getLogger("tokenmill.server")
APIS = (
    ANTHROPIC,
    OPENAI,
    STORED_CHATS,
    ADAPTERS,
    MODELS,
    SLEEPING,
    RESPONSES,
    OLLAMA,
    TGI,
    KSERVE,
    LLAMACPP,
    SCORING,
    TEI,
    OPERATIONS,
    WEB,
)
"""All APIs. The first one that has a path answers. A new API is a folder with an `Api`, listed here."""


def make_server_context(config: ServerConfig, models: Catalogue[Model]) -> ServerContext:
    """Make what all models of one server share."""
    metrics, limits = ServerMetrics(), config.limits
    gate_limits = GateLimits(
        capacity=limits.max_num_queued_reqs,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        tenants=max(1, len(config.listen.api_key or ())),
    )
    made = ServerContext(
        config=config,
        models=models,
        gate=Gate(gate_limits, metrics.reject),
        metrics=metrics,
        bodies=Bodies(limits.max_body_bytes, make_request_rules()),
        past=Past(History(owners=gate_limits.tenants)),
        recorder=_recorder(config.serve),
    )
    metrics.kept.set_function(lambda: made.past.store.size)
    metrics.more = lambda: _sources(made)
    return made


def _sources(shared: ServerContext) -> list[SeriesSource]:
    """The metrics of all configured models. Those of removed models are dropped."""
    entries = shared.models.entries
    shared.series = {name: each for name, each in shared.series.items() if name in entries or not name}
    return [ModelSeries(shared.models), *(each.registry for name, each in shared.series.items() if name)]


@dataclass(slots=True)
class _Alone:
    """A loaded model whose backend the caller of `make_context` starts and ends."""

    context: Context

    def open_requests(self) -> int:
        return 0

    def held_bytes(self) -> int:
        return 0

    def kept_bytes(self) -> int:
        return 0

    async def sleep(self, level: int) -> None:
        raise UserError("This model cannot sleep.")

    async def wake(self, tags: Sequence[str]) -> list[str]:
        return []

    async def abort_all(self) -> None:
        """Whoever started the backend ends its requests."""

    def end_all(self, reason: str) -> None:
        """Whoever started the backend ends it."""

    async def close(self) -> None:
        await let_go(self.context)


async def _unmade(entry: Entry[Model]) -> Model:
    raise UserError(f"{entry.name} cannot be loaded by this server.")


def _alone(backend: Backend, config: ServerConfig) -> Context:
    """A context for one model that is already loaded, in a server context of its own."""
    info = backend.info
    names = ",".join(name for name in info.names if name not in info.adapters)
    shared = make_server_context(config, Catalogue(_unmade))
    context = make_context(backend, config, shared)
    shared.models.adopt(Spec(make_config({}, served_model_name=names), config, pin=True), _Alone(context))
    return context


def make_context(backend: Backend, config: ServerConfig, shared: ServerContext | None = None) -> Context:
    """Make one model's context around its loaded backend. Without a server context, the model gets one of its own."""
    if shared is None:
        return _alone(backend, config)
    info, limits = backend.info, config.limits
    metrics = shared.series.get(info.names[0]) or Metrics(backend, info.names[0])
    shared.series[info.names[0]] = metrics
    metrics.attach(backend)
    backend.observe = metrics.saw_step
    template = read_template(config.serve.chat_template)
    own = None if info.tokenizer is None else info.tokenizer.chat_template
    _tell_unread(config.serve, template or own, info.names[0])
    activity = Activity(backend, metrics, Events())
    activity.watch()
    shared.metrics.listeners.add(activity.events.refused)
    return Context(
        shared=shared,
        backend=backend,
        config=config,
        metrics=metrics,
        text=TextWorkers(info.tokenizer, info.max_model_len, budget_s=config.patience.text_timeout),
        limits=RequestLimits(
            limits.max_n, info.vocab_size if limits.max_logprobs < 0 else limits.max_logprobs, limits.max_stop
        ),
        activity=activity,
        chat_template=template,
        form=find_format(template or own, config.messages.tool_call_parser, config.messages.reasoning_parser),
        traces=_traces(config.serve, info.names[0]),
    )


def _tell_unread(options: ServeOptions, template: Any, model: str) -> None:
    """Log default arguments that this model's template never reads. Other models' templates may read them."""
    unread = Unknown()
    look_in_template(options.default_chat_template_kwargs or {}, template, unread)
    if unread.names:
        facts = {"model": model, "arguments": [name.partition(".")[2] for name in unread.names]}
        log.warning("default_chat_template_kwargs that the chat template never reads", extra={"data": facts})


def make_front(shared: ServerContext) -> Context:
    """The context for endpoints that are not about one model."""
    return make_context(NoModelBackend(), shared.config, shared)


def _recorder(options: ServeOptions) -> Recorder | None:
    if options.record is None:
        if options.record_content:
            raise UserError("--record-content needs --record FILE.")
        return None
    return Recorder(options.record, content=options.record_content)


def _traces(options: ServeOptions, model: str) -> Traces | None:
    return Traces(options.otlp_traces_endpoint, model) if options.otlp_traces_endpoint else None


def make_app(context: Context) -> Guard:
    """The whole ASGI application."""
    off: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}
    app = FastAPI(title="tokenmill", version=tokenmill.__version__, **off)
    app.state.context, app.state.apis = context, APIS
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _any_error)
    for api in APIS:
        api.add(app, context)
    return Guard(app, context, APIS)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "There is no such path here.", 405: "This path does not take that method."}
    why, sentence = (
        why_absent(request.method, request.url.path),
        text.get(error.status_code, "The request was refused."),
    )
    if why is not None and error.status_code in text:
        sentence = f"{sentence[:-1]}: {why}."
    elif error.status_code == 404:
        sentence = f"{sentence[:-1]}: /openapi.json lists all."
    found = HttpError(error.status_code, sentence)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = _taken_methods(request)
    return _error_response(request, found, headers)


def _taken_methods(request: Request) -> str:
    """Every method that the path takes; the framework names those of its first route alone."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in route.methods}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


async def _any_error(request: Request, error: Exception) -> Response:
    spelled = request.scope["state"].get("spelled", {})  # fields that came under another spelling
    return _error_response(request, under_other_names(describe_error(error), spelled), {})


def _error_response(request: Request, found: HttpError, headers: dict[str, str]) -> Response:
    names = {name for name, _ in request.scope["headers"]}
    body = error_shape(APIS, request.url.path, names)(with_request_id(found, request.scope))
    return Response(body, found.status, {**headers, **error_headers(found)}, media_type="application/json")
