"""Ollama's endpoints that change which models there are: pull, create, copy, delete, and files for them. Owns: their
paths, and what is told of stored models.

Off unless --allow-model-changes. Must not know: how models are kept, engines.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tokenmill.checkpoint.blobs import Incoming, read_digest
from tokenmill.checkpoint.entry import Entry
from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.modelfile import read_modelfile
from tokenmill.checkpoint.modelfile_parameters import listed
from tokenmill.checkpoint.pull import Progress, Tell, drop_files, pull_hub, pull_local
from tokenmill.checkpoint.store import NoSuchModelError, Store
from tokenmill.checkpoint.stored import location
from tokenmill.checkpoint.stored_names import may_be_name, short_name
from tokenmill.core.errors import ModelError, ParameterError, UserError
from tokenmill.core.files import read_object
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError
from tokenmill.server.ollama.answers import moment
from tokenmill.server.ollama.create import ModelRecipe, Reach, copy_model, create, from_modelfile, is_demo, modelfile_of
from tokenmill.server.ollama.schemas import CopyRequest, CreateRequest, DeleteRequest, PullRequest, Streaming
from tokenmill.server.ollama.store_changes import Changes, Work, in_thread
from tokenmill.server.ollama.stored_files import MAX_CONFIG, StoredFiles, read_stored, text_of_header
from tokenmill.server.routing import add_route, json_answer, post, read_body
from tokenmill.server.sse import LineStream

BLOBS = "/api/blobs/"
PUSH = "Nothing is uploaded from here: a model is a folder or file of this machine, and the hub's own tools send those."


def add_model_routes(app: FastAPI, context: Context, changes: Changes) -> None:
    """/api/pull, create, copy, delete, push and blobs."""

    async def pull(request: Request) -> Response:
        """Store a model from the hub, or from the folder that clients may use."""
        store = changes.check(request)
        body = await read_body(context, request, PullRequest)
        if may_be_name(body.named()):
            changes.check_free(body.named())
        return await _answer(changes, body, partial(_pull, changes, store, body.named()))

    async def make(request: Request) -> Response:
        """Make a model from another one, and store it."""
        store = changes.check(request)
        body = await read_body(context, request, CreateRequest)
        changes.check_free(body.named())
        recipe = await in_thread(partial(recipe_of, body))
        return await _answer(changes, body, partial(_create, changes, store, recipe))

    async def copy(request: Request) -> Response:
        """Store a model under another name."""
        store = changes.check(request)
        body = await read_body(context, request, CopyRequest)
        changes.check_free(body.destination)
        if not is_demo(body.source):
            changes.check_known(body.source)
        await in_thread(lambda: copy_model(store, body.source, body.destination))
        await changes.sync()
        return Response(b"", 200)

    async def delete(request: Request) -> Response:
        """Delete a stored model."""
        store = changes.check(request)
        body = await read_body(context, request, DeleteRequest)
        changes.check_known(body.named())
        await in_thread(partial(_delete, store, body.named()))
        await changes.sync()
        return Response(b"", 200)

    async def push(request: Request) -> Response:
        """Refused: this server does not push models."""
        raise HttpError(501, PUSH)

    async def have_blob(request: Request) -> Response:
        """Is this file stored?"""
        store, digest = changes.check(request), read_digest(request.path_params["digest"])
        return Response(b"", 200 if await in_thread(store.blob(digest).is_file) else 404)

    async def take_blob(request: Request) -> Response:
        """Store a file under the digest of its bytes."""
        return await receive(changes.check(request), context, request)

    post(app, "/api/pull", pull, PullRequest)
    post(app, "/api/create", make, CreateRequest)
    post(app, "/api/copy", copy, CopyRequest)
    post(app, "/api/delete", delete, DeleteRequest)
    add_route(app, ("DELETE",), "/api/delete", delete, documented=False)
    add_route(app, ("POST",), "/api/push", push, documented=False)
    add_route(app, ("HEAD",), BLOBS + "{digest}", have_blob, documented=False)
    add_route(app, ("POST",), BLOBS + "{digest}", take_blob, documented=False)


async def receive(store: Store, context: Context, request: Request) -> Response:
    """Store the body as it arrives, if its digest is the one that was given."""
    digest, most = read_digest(request.path_params["digest"]), context.config.store.max_blob_bytes
    length = request.headers.get("content-length", "")
    expected = int(length) if length.isdigit() and len(length) < 19 else None
    if await in_thread(store.blob(digest).is_file):
        return Response(b"", 200)
    incoming: Incoming = await in_thread(lambda: Incoming(store, digest, most, expected))
    request.scope["state"].get("widen", int)(most)
    try:
        parts = request.stream()
        while True:
            async with asyncio.timeout(context.config.patience.read_timeout):
                piece = await anext(parts, None)
            if piece is None:
                break
            await in_thread(partial(incoming.write, piece))
        await in_thread(incoming.finish)
    except TimeoutError:
        raise HttpError(408, "The file did not arrive in time.") from None
    except ClientDisconnect:
        return Response(b"", 499)
    finally:
        await asyncio.shield(asyncio.to_thread(incoming.close))
    return Response(b"", 201)


async def _answer(changes: Changes, body: Streaming, work: Work) -> Response:
    """The progress as it comes, or only the end."""
    if not body.stream:
        return json_answer(await changes.whole(work))
    return LineStream(await changes.lines(work), lambda: None)


def _pull(changes: Changes, store: Store, name: str, tell: Tell) -> None:
    path = changes.find(name)
    if path is not None:
        tell(Progress("pulling manifest"))
        pull_local(store, path, name if may_be_name(name) and not name.endswith(".gguf") else None)
    elif "/" in name:
        pull_hub(store, name, None, changes.hub, tell)
    else:
        raise NoSuchModelError(
            f"pull model manifest: file does not exist: {name[:100]!r} is not a name on the hub (OWNER/NAME), and "
            "nothing in the folder that --model-folder names."
        )


def _create(changes: Changes, store: Store, recipe: ModelRecipe, tell: Tell) -> None:
    create(store, recipe, Reach(changes.find, changes.hub), tell)


def _delete(store: Store, name: str) -> None:
    entry = store.remove(name)
    if entry is not None:
        drop_files(store, entry)


def recipe_of(body: CreateRequest) -> ModelRecipe:
    """The recipe in a client's request."""
    name = body.named()
    if body.modelfile is not None:
        parts = ("from_", "files", "adapters", "template", "license", "system", "parameters", "messages")
        both = [part.rstrip("_") for part in parts if getattr(body, part)]
        if both:
            raise ParameterError(f"Give modelfile or {both[0]}, not both.", param="modelfile")
        return from_modelfile(name, read_modelfile(body.modelfile))
    license = [body.license] if isinstance(body.license, str) else list(body.license or ())
    return ModelRecipe(
        name,
        body.from_ or "",
        files=dict(body.files or {}),
        parameters=dict(body.parameters or {}),
        system=body.system,
        template=body.template,
        adapter_files=dict(body.adapters or {}),
        license=[text for text in license if text],
        messages=[{"role": message.role, "content": message.content} for message in body.messages or ()],
    )


# ---------------------------------------------------------------- what is told


def told(store: Store, entry: Entry) -> dict[str, Any]:
    """A stored model in a list."""
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": moment(entry.changed),
        "size": entry.size,
        "digest": entry.digest,
        "details": details(store, entry),
    }


def details(store: Store, entry: Entry) -> dict[str, Any]:
    """Family, size and format, as the files state them."""
    files, facts = _facts(store, entry)
    family = str(facts.get("family") or "unknown")
    return {
        "parent_model": entry.parent,
        "format": entry.format,
        "family": family,
        "families": [family],
        "parameter_size": _count(files.parameters if files is not None else 0),
        "quantization_level": (files.level if files is not None else "") or "unknown",
    }


def show_stored(store: Store, entry: Entry) -> dict[str, Any]:
    """The answer of /api/show for a stored model."""
    files, facts = _facts(store, entry)
    family = str(facts.get("family") or "unknown")
    info: dict[str, Any] = {"general.architecture": family}
    if files is not None:
        info |= files.model_info(family)
    if facts.get("context"):
        info[f"{family}.context_length"] = facts["context"]
    return {**around(entry), "details": details(store, entry), "model_info": info, "capabilities": ["completion"],
            "modified_at": moment(entry.changed)}  # fmt: skip


def around(entry: Entry) -> dict[str, Any]:
    """What a model's manifest holds besides the weights."""
    words = entry.words
    found: dict[str, Any] = {
        "modelfile": f"# {short_name(entry.name)}\n{modelfile_of(entry)}",
        "parameters": listed(entry.parameters),
        "template": words.written or words.template,
    }
    for name, value in (("system", words.system), ("license", "\n".join(words.license)), ("messages", words.messages)):
        if value:
            found[name] = value
    return found


def _facts(store: Store, entry: Entry) -> tuple[StoredFiles | None, dict[str, Any]]:
    try:
        where, _ = location(store, entry.source)
    except UserError:
        return None, {}
    return _read_files(where, entry.changed)


@lru_cache(maxsize=256)
def _read_files(where: str, changed: float) -> tuple[StoredFiles | None, dict[str, Any]]:
    """Read what the headers of a model's files state."""
    path = Path(where)
    try:
        if path.is_dir() and not (path / "config.json").exists():
            path = next(iter(sorted(path.glob("*.gguf"))), path)
        if path.is_file():
            metadata = open_gguf(path).metadata
            family = text_of_header(metadata.get("general.architecture"))
            return read_stored(str(path)), _told(family, metadata.get(f"{family}.context_length"))
        config = read_object(path / "config.json", MAX_CONFIG)
        found = _told(text_of_header(config.get("model_type")), config.get("max_position_embeddings"))
    except (ModelError, OSError):
        found = {}
    return read_stored(where), found


def _told(family: str, context: object) -> dict[str, Any]:
    return {"family": family, "context": context if type(context) is int and 0 < context < 1 << 63 else None}


def _count(weights: float) -> str:
    """1234567 -> 1.2M"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if weights >= size:
            return f"{weights / size:.1f}{unit}"
    return str(round(weights))
