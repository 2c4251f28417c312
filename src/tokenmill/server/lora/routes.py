"""Loading and unloading adapters while the server runs. Owns: vLLM's two paths, and who may name which folder.

These paths are off unless --lora-folder names the one folder whose adapters may be loaded. Must not know: how adapters
are read.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.core.errors import UserError
from tokenmill.server.adapters import NoSuchAdapterError, folder_of
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError
from tokenmill.server.lora.schemas import LoadAdapterRequest, UnloadAdapterRequest
from tokenmill.server.rights import check_may_manage
from tokenmill.server.routing import Api, post, read_body

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def add_routes(app: FastAPI, context: Context) -> None:
    """Load and unload."""

    async def load(request: Request, context: Context) -> Response:
        """Serve an adapter under a name of its own."""
        traffic, root = _traffic(context, request), context.config.limits.lora_folder
        body = await read_body(context, request, LoadAdapterRequest)
        context.check_model(body.model)
        models, name = context.shared.models, body.lora_name
        _check_not_stored(context, name)
        other = models.find(name)
        others = {*models.spellings.of(name)} - {name}
        hidden = any(models.find(each) is not None for each in others)  # it would stand for another model
        taken = other is not None and other.book is not traffic.book
        if hidden or taken or models.coming.elsewhere(name, traffic.book):
            raise HttpError(400, f"The name {name!r} is served already: choose another one.", param="lora_name")
        try:
            with models.coming.held(name, traffic.book):
                path = await asyncio.to_thread(folder_of, root, body.lora_path)
                await traffic.load(name, path, instead=body.load_inplace)
        except NoSuchAdapterError as error:
            raise HttpError(404, str(error), param=error.param) from None
        except UserError as error:
            raise HttpError(400, _without(root, str(error)), param=error.param) from None
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload(request: Request, context: Context) -> Response:
        """Unload an adapter. New requests are refused at once, open ones end first."""
        traffic = _traffic(context, request)
        body = await read_body(context, request, UnloadAdapterRequest)
        _check_not_stored(context, body.lora_name)
        try:
            traffic.unload(body.lora_name)
        except NoSuchAdapterError as error:
            raise HttpError(404, str(error), param=error.param) from None
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    post(app, LOAD, load, LoadAdapterRequest)
    post(app, UNLOAD, unload, UnloadAdapterRequest, ("lora_name",))


def _traffic(context: Context, request: Request) -> Any:
    """The fleet's adapters, if this client may change them."""
    traffic = getattr(context.backend, "adapters", None)
    if traffic is None or context.config.limits.lora_folder is None:
        raise HttpError(404, "Adapters cannot be loaded or unloaded here: --lora-folder allows it, for one folder.")
    check_may_manage(context.shared, request)
    return traffic


def _check_not_stored(context: Context, name: str) -> None:
    """Refuse to change what a stored model is made of."""
    entry = context.shared.models.find(name)
    if entry is not None and entry.spec.stored and name in entry.spec.adapters:
        why = "is a stored model with an adapter of its own: /api/create changes it, /api/delete removes it."
        raise HttpError(400, f"{name!r} {why}", param="lora_name")


def _without(root: str | None, text: str) -> str:
    """An error about a file, without the file's place on this machine. Files are named by their whole path, whatever
    `root` is relative to."""
    home = str(Path(root or ".").resolve()).rstrip("/")
    return re.sub(rf"(?<![^\s'\"(]){re.escape(home)}/", "", text)


ADAPTERS = Api(add_routes, prefixes=(LOAD, UNLOAD))
