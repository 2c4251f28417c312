"""The web page at `/` and the figures that it shows. Owns: their paths.

The files need no key and hold no data; the figures need the key like everything else. Must not know: how tokens are
made, how the page looks.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

import tokenmill
from tokenmill.server.activity import COLUMNS
from tokenmill.server.context import Context, Model
from tokenmill.server.errors import HttpError
from tokenmill.server.many_models.entry import Entry
from tokenmill.server.model_lookup import find_entry
from tokenmill.server.rights import may_manage
from tokenmill.server.routing import Api, add_route, get, json_answer, tenant
from tokenmill.server.switch.listing import ListedModel, context_of, list_models, status
from tokenmill.server.switch.loaded_model import parts_of
from tokenmill.server.web.card import card, form_of, unloaded_card
from tokenmill.server.web.files import PageFile, read_files

FILES = read_files()
PATHS = {"/" if name == "index.html" else f"/static/{name}": name for name in FILES}
MAX_LISTED = 200


def add_routes(app: FastAPI, context: Context) -> None:
    """The page, `/v1/engine`, `/v1/card`, and the list of recent requests."""
    began = time.time()

    async def engine(request: Request) -> Response:
        """Get what the engines do now and did in the last minutes. `since` leaves out samples that the client already
        has."""
        asked = find_entry(context.shared, request, None)  # a look does not load the model
        mine = context_of(asked) or context
        state = engine_state(mine, asked)
        listed = list_models(context.shared, request)
        known = [what_is(each) for each in listed]
        forms = await asyncio.to_thread(lambda: [form_of(*each) for each in known])  # files are examined once
        state["catalogue"] = [{**stand(each), "form": form} for each, form in zip(listed, forms, strict=True)]
        models = context.shared.models
        control = context.config.models.models_control and may_manage(context.shared, request)
        state["memory"] = {"limit": models.memory_of(models.place_of(asked)), "control": control}
        state.update(started=began, columns=COLUMNS, samples=mine.activity.since(_number(request, "since", 0.0)))
        state["events"] = mine.activity.events.shown()
        return json_answer(state)

    async def requests(request: Request) -> Response:
        """List the key's own recent requests, the newest first."""
        most = min(MAX_LISTED, max(1, int(_number(request, "limit", 50))))
        return json_answer({"object": "list", "data": context.history.recent(tenant(request), most)})

    async def model_card(request: Request) -> Response:
        """Get what the served model is and can do, and the settings of a request that sets none."""
        asked = find_entry(context.shared, request, None)
        if (mine := context_of(asked)) is None:
            return json_answer(unloaded_card(card(context), asked))
        return json_answer(await asyncio.to_thread(card, mine))  # files are examined once

    get(app, "/v1/engine", engine)
    get(app, "/v1/card", model_card)
    get(app, "/v1/requests", requests)
    for path, name in PATHS.items():
        add_route(app, ("GET", "HEAD"), path, _sender(FILES[name]), documented=False)


def stand(shown: ListedModel) -> dict[str, Any]:
    """A model's state and parts. `alias`: it is another name of a model."""
    entry, found = shown.entry, {"name": shown.name, **status(shown.entry)}
    parts = {} if shown.info is None else parts_of(shown.info)
    engines = 1 if (mine := context_of(entry)) is None else len(mine.backend.stats())
    found["tokenmill"]["memory"] = {name: size * engines for name, size in parts.items()}
    found["alias"] = shown.parent is None and shown.name != entry.name
    return found


def what_is(shown: ListedModel) -> tuple[str, dict[str, Any], int]:
    """Where a model lies, what is known of it, and its context (0: not known)."""
    model = shown.entry.spec.engine.model
    if shown.info is None:
        return model.model, {}, model.max_model_len or 0
    return shown.info.root, dict(shown.info.details), shown.info.max_model_len


def _sender(file: PageFile) -> Any:
    async def send(request: Request) -> Response:
        return file.answer(request.headers.get("accept-encoding", ""), request.headers.get("if-none-match", ""))

    return send


def engine_state(context: Context, entry: Entry[Model]) -> dict[str, Any]:
    """The present gauges, totals and limits."""
    backend, info = context.backend, context.backend.info
    return {
        "object": "engine",
        "now": time.time(),
        "version": tokenmill.__version__,
        "models": info.names or entry.spec.names,
        "max_model_len": info.max_model_len,
        "max_rows": info.max_rows,
        "problem": backend.health(),
        "draining": context.gate.draining,
        "open": context.gate.open,
        "capacity": context.gate.limits.capacity,
        "engines": [msgspec.structs.asdict(stats) for stats in backend.stats()],
        "counters": backend.counters(),
    }


def _number(request: Request, name: str, default: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e12:
        raise HttpError(400, f"{name} must be a number that is not negative.", param=name)
    return value


WEB = Api(add_routes, keyless=frozenset(PATHS), unlogged=frozenset({*PATHS, "/v1/engine", "/v1/card", "/v1/requests"}))
