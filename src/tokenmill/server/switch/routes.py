"""Loading and unloading models by hand, on the paths of llama.cpp's router. Owns: those paths, and who may use them.

They are off unless --models-control allows them, and closed to keys that may only use models.
Must not know: how models are loaded.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context, Model
from tokenmill.server.errors import HttpError
from tokenmill.server.many_models.entry import Entry
from tokenmill.server.model_lookup import find_by_name, holding_model
from tokenmill.server.rights import check_may_manage
from tokenmill.server.routing import Api, json_answer, post, read_body
from tokenmill.server.switch.listing import status
from tokenmill.server.switch.schemas import ModelRequest

LOAD, UNLOAD = "/models/load", "/models/unload"


def add_routes(app: FastAPI, context: Context) -> None:
    """Add the paths that load and unload."""

    async def asked(request: Request) -> Entry[Model]:
        shared = context.shared
        if not shared.config.models.models_control:
            raise HttpError(404, "Models cannot be loaded or unloaded by hand here: --models-control allows it.")
        entry = find_by_name(shared, request, (await read_body(context, request, ModelRequest)).model)
        check_may_manage(shared, request)
        return entry

    async def load(request: Request) -> Response:
        """Load a model. The answer comes when it is loaded."""
        async with holding_model(context.shared, await asked(request)) as (entry, _):
            pass
        return _told(entry)

    async def unload(request: Request) -> Response:
        """Unload a model when its open requests have ended. The answer comes when it is gone."""
        entry = await asked(request)
        if entry.spec.pin:
            raise HttpError(400, f"{entry.name!r} is pinned: it stays loaded.", param="model")
        await context.shared.models.unload(entry)
        return _told(entry)

    post(app, LOAD, load, ModelRequest)
    post(app, UNLOAD, unload, ModelRequest)


def _told(entry: Entry[Any]) -> Response:
    return json_answer({"success": True, "model": entry.name, **status(entry)})


MODELS = Api(add_routes, prefixes=(LOAD, UNLOAD))
