"""Endpoints of the Responses API. Owns: their paths, and runs with and without a waiting client.

Must not know: how answers are made.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, describe_error
from tokenmill.server.job import Job
from tokenmill.server.responses.answers import Events, Growing
from tokenmill.server.responses.schemas import ResponsesRequest, joined, read_talk
from tokenmill.server.responses.store import Kept, Store
from tokenmill.server.routing import Api, Work, get, json_answer, post, tenant
from tokenmill.server.sse import EventStream
from tokenmill.server.translated_chat import listen, open_translated

encode = msgspec.json.Encoder().encode


def add_routes(app: FastAPI, context: Context) -> None:
    """Create, get, follow, cancel, delete, and list the input of responses."""
    store = Store()
    tasks: set[asyncio.Task[None]] = set()

    async def create(request: Request) -> Response:
        """Answer, now or in the background."""
        async with Work(context, request) as work:
            body = await work.read(ResponsesRequest)
            body.check()
            context.metrics.kept.set_function(lambda: store.size)
            name, before = f"resp_{uuid.uuid4().hex}", b"[]"
            if body.previous_response_id:
                before = store.find(body.previous_response_id, tenant(request)).messages
            work.job.size += len(before)
            talk = await context.bodies.run_in_thread(work.job.size, lambda: read_talk(body, before))
            chat = await open_translated(context, lambda: body.fields(talk.messages), work.job, work.base())
            chat.kind = "responses"
            growing = Growing(chat, body, name)
            show = partial(encode, growing.response)
            kept = Kept(tenant(request), name, bool(body.background), talk.items, talk.encoded, show)
            if body.store is not False:
                store.add(kept)
            if body.background:
                work.detach()
                kept.task = asyncio.get_running_loop().create_task(_write_answer(store, growing, kept))
                tasks.add(kept.task)  # the loop itself keeps weak references only
                kept.task.add_done_callback(tasks.discard)
                kept.task.add_done_callback(lambda _: _settle(work.job, growing, kept))
                return EventStream(kept.follow(), _nothing) if body.stream else json_answer(growing.response)
            if body.stream:
                return work.stream(_foreground(store, growing, kept))
            await _write_answer(store, growing, kept)
            return _answer(growing)

    async def read(request: Request) -> Response:
        """A kept response, or with `stream=true` its events after `starting_after`."""
        kept = store.find(request.path_params["response_id"], tenant(request))
        if request.query_params.get("stream") != "true":
            return _shown(kept)
        after = request.query_params.get("starting_after")
        if after is not None and not re.fullmatch("[0-9]{1,9}", after):
            raise HttpError(400, "starting_after must be an event's number.", param="starting_after")
        return EventStream(kept.follow(-1 if after is None else int(after)), _nothing)

    async def cancel(request: Request) -> Response:
        """End a background response."""
        kept = store.find(request.path_params["response_id"], tenant(request))
        if not kept.background:
            raise HttpError(400, "Only responses with background = true can be cancelled.", param="response_id")
        if kept.task is not None and not kept.ended:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        return _shown(kept)

    async def delete(request: Request) -> Response:
        """Forget a response."""
        name = request.path_params["response_id"]
        store.delete(name, tenant(request))
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def items(request: Request) -> Response:
        """What a response was asked."""
        kept = store.find(request.path_params["response_id"], tenant(request))

        def listed() -> Response:
            found = [{"id": f"item_{i}", **item} for i, item in enumerate(msgspec.json.decode(kept.items))]
            edges = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
            return json_answer({"object": "list", "data": found, "has_more": False, **edges})

        return await context.bodies.run_in_thread(len(kept.items), listed)

    post(app, "/v1/responses", create, ResponsesRequest)
    get(app, "/v1/responses/{response_id}", read)
    get(app, "/v1/responses/{response_id}/input_items", items)
    app.add_api_route("/v1/responses/{response_id}", delete, methods=["DELETE"], response_class=Response)
    app.add_api_route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"], response_class=Response)


RESPONSES = Api(add_routes, generating=frozenset({"/v1/responses"}))


async def _write_answer(store: Store, growing: Growing, kept: Kept) -> None:
    """To the end, with every event kept."""
    async for _ in _events(store, growing, kept):
        pass


async def _foreground(store: Store, growing: Growing, kept: Kept) -> AsyncIterator[bytes]:
    async for events in _events(store, growing, kept):
        if events:
            yield b"".join(events)


async def _events(store: Store, growing: Growing, kept: Kept) -> AsyncIterator[list[bytes]]:
    """What happens, step by step; whatever happens, the kept response ends with it."""
    whole: bytes | None = None
    try:
        yield _tell(store, kept, growing.begin())
        async for heard in listen(growing.chat):
            yield _tell(store, kept, growing.take(heard))
        whole = joined(kept.messages, growing.message())
    except asyncio.CancelledError:
        growing.cancel()
        raise
    except Exception as error:
        yield _tell(store, kept, growing.fail(describe_error(error)))
    finally:
        if growing.response["status"] == "in_progress":
            growing.cancel()
        kept.end(whole)
        store.weigh(kept)


def _tell(store: Store, kept: Kept, events: Events) -> list[bytes]:
    """What has happened, encoded once for everybody who reads it."""
    told = [_event(event) for event in events]
    if store.holds(kept):
        kept.tell(told)
        store.weigh(kept)
    return told


def _settle(job: Job, growing: Growing, kept: Kept) -> None:
    """A background run is over, perhaps before it began."""
    job.close()
    if not kept.ended:
        growing.cancel()
        kept.end()


def _answer(growing: Growing) -> Response:
    """The whole response; a failure is an HTTP error while somebody waits."""
    if growing.failure is not None:
        raise growing.failure
    return json_answer(growing.response)


def _shown(kept: Kept) -> Response:
    return Response(kept.show(), media_type="application/json")


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"


def _nothing() -> None:
    """The run goes on without its reader."""
