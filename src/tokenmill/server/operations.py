"""Endpoints for whoever runs the server: health, readiness, version, load, metrics, the OpenAPI document.

Must not know: how tokens are made, any client's API.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

import tokenmill
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, error_bytes
from tokenmill.server.inputs.headers import QUERIES
from tokenmill.server.rights import models_of
from tokenmill.server.routing import Api, PlainRoute, get, json_answer
from tokenmill.server.switch.listing import trouble_of_all

_MODEL = re.compile(rb'[{,]model(?:_name)?="((?:[^"\\]|\\.)*)"')
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_routes(app: FastAPI, context: Context) -> None:
    """What operators and their tools ask."""

    async def health(request: Request) -> Response:
        """200 while an engine makes progress, else 503."""
        if trouble_of_all(context.shared):
            found = HttpError(503, "The engine is not available right now.", retry_after=1)
            return Response(error_bytes(found), 503, media_type="application/json")
        return json_answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        """200 while new requests are taken."""
        return Response(status_code=503 if context.gate.draining or trouble_of_all(context.shared) else 200)

    async def version(request: Request) -> Response:
        """This server's version."""
        return json_answer({"version": tokenmill.__version__})

    async def load(request: Request) -> Response:
        """How many outputs are open."""
        return json_answer({"server_load": context.gate.open})

    async def metrics(request: Request) -> Response:
        """Numbers for Prometheus."""
        text, allowed = context.shared.metrics.render(), models_of(context.shared, request)
        return Response(text if allowed is None else _series_of(text, allowed), media_type=METRICS_TYPE)

    async def document(request: Request) -> Response:
        """This API as an OpenAPI document."""
        root = context.config.listen.root_path.strip("/")
        return json_answer({**openapi(app), **({"servers": [{"url": f"/{root}"}]} if root else {})})

    plain = {
        "/health": health,
        "/v1/health": health,
        "/ready": ready,
        "/ping": health,
        "/version": version,
        "/load": load,
    }
    for path, handler in {**plain, "/metrics": metrics}.items():
        get(app, path, handler)
    get(app, "/openapi.json", document, documented=False)


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with the schemas' definitions in one place and the answers for errors."""
    routes = [route.described() for route in app.routes if isinstance(route, PlainRoute)]
    document = get_openapi(title=app.title, version=app.version, routes=routes)
    about_model = {route.path_format for route in routes if getattr(route.endpoint, "about_model", False)}
    shared = document.setdefault("components", {}).setdefault("schemas", {})
    for name, path in document["paths"].items():
        for operation in path.values():
            operation["parameters"] = _parameters(name, "requestBody" not in operation, about_model)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for part, definition in body.pop("$defs", {}).items():
                assert shared.setdefault(part, definition) == definition, f"two different schemas are called {part}"
            answers = operation.setdefault("responses", {})
            answers.pop("422", None)
            for code, text in ERRORS.items():
                asked = "requestBody" in operation or operation["parameters"]
                if (asked and code != "501") or code in ("401", "403", "503") or name in _CHANGES:
                    answers[code] = {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    return document


def _parameters(name: str, bare: bool, about_model: Container[str]) -> list[dict[str, Any]]:
    """The parameters in an address. `bare`: no body comes with them."""
    inner = re.findall(r"\{(\w+)\}", name)
    asked = {*(QUERIES.get(name, ()) if bare else ()), *(("model",) if name in about_model else ())}
    found = [{"name": each, "in": "path", "required": True} for each in inner]
    found += [{"name": each, "in": "query", "required": False} for each in sorted(asked.difference(inner))]
    return [{**each, "schema": {"type": "string"}} for each in found]


def _series_of(text: bytes, models: frozenset[str]) -> bytes:
    """The series without those of other models: a key that may not use a model does not hear of it."""
    names = {name.encode() for name in models}
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if (found := _MODEL.search(line)) is None or found[1] in names)


ERRORS = {
    "400": "Something in the request is wrong; `param` names it.",
    "401": "A key is needed.",
    "403": "Foreign Host or Origin.",
    "404": "No such model.",
    "413": "The body is too large.",
    "408": "The body did not arrive in time, or the deadline has passed.",
    "415": "The body is not JSON.",
    "417": "The header Expect asks for more than 100-continue.",
    "429": "Over this key's rate or share; see Retry-After.",
    "501": "A flag of the server allows it; `error` names it.",
    "503": "No room, or no engine; see Retry-After.",
    "507": "The model does not fit into the memory for models.",
}
_CHANGES = frozenset(f"/api/{verb}" for verb in ("pull", "create", "copy", "delete"))
"""Paths that change which models there are."""
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
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}

OPERATIONS = Api(add_routes, unlogged=frozenset({"/metrics"}))
