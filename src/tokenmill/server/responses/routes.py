"""Endpoints of the Responses API. Owns: their paths, and runs with and without a waiting client.

Must not know: how answers are made.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, describe_error
from tokenmill.server.job import Job
from tokenmill.server.responses.answers import Growing
from tokenmill.server.responses.schemas import ResponsesRequest, messages_of
from tokenmill.server.responses.store import Kept, Store
from tokenmill.server.routing import Api, Work, get, json_answer, post, tenant
from tokenmill.server.said import listen, open_translated
from tokenmill.server.sse import EventStream

encode = msgspec.json.Encoder().encode


def add_routes(app: FastAPI, context: Context) -> None:
    """Create, get, follow, cancel, delete, and list the input of responses."""
    store = Store()
    tasks: set[asyncio.Task[None]] = set()

    async def create(request: Request) -> Response:
        """Answer, now or in the background."""
        async with Work(context, request) as work:
            body, _ = await work.read(ResponsesRequest)
            body.check()
            before = (
                store.find(body.previous_response_id, tenant(request)).messages if body.previous_response_id else []
            )
            messages = before + messages_of(body.items())
            chat = await open_translated(context, body.fields(messages), work.job, work.base())
            chat.kind = "responses"
            growing = Growing(chat, body, f"resp_{uuid.uuid4().hex}")
            kept = Kept(tenant(request), growing.response, body.items(), messages)
            if body.store is not False:
                store.add(kept)
            if body.background:
                work.detach()
                kept.task = asyncio.get_running_loop().create_task(_run(store, growing, kept))
                tasks.add(kept.task)  # the loop itself keeps weak references only
                kept.task.add_done_callback(tasks.discard)
                kept.task.add_done_callback(lambda _: _settle(work.job, growing, kept))
                return EventStream(_bytes(kept.follow()), _nothing) if body.stream else json_answer(growing.response)
            if body.stream:
                return work.stream(_foreground(store, growing, kept))
            await _run(store, growing, kept)
            return _answer(growing)

    async def read(request: Request) -> Response:
        """A kept response, or with `stream=true` its events after `starting_after`."""
        kept = store.find(request.path_params["response_id"], tenant(request))
        if request.query_params.get("stream") != "true":
            return json_answer(kept.response)
        after = request.query_params.get("starting_after", "-1")
        if not after.lstrip("-").isdigit():
            raise HttpError(400, "starting_after must be an event's number.", param="starting_after")
        return EventStream(_bytes(kept.follow(int(after))), _nothing)

    async def cancel(request: Request) -> Response:
        """End a background response."""
        kept = store.find(request.path_params["response_id"], tenant(request))
        if not kept.response["background"]:
            raise HttpError(400, "Only responses with background = true can be cancelled.", param="response_id")
        if kept.task is not None and not kept.ended:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        return json_answer(kept.response)

    async def delete(request: Request) -> Response:
        """Forget a response."""
        name = request.path_params["response_id"]
        store.delete(name, tenant(request))
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def items(request: Request) -> Response:
        """What a response was asked."""
        kept = store.find(request.path_params["response_id"], tenant(request))
        found = [{"id": f"item_{i}", **item} for i, item in enumerate(kept.items)]
        edges = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
        return json_answer({"object": "list", "data": found, "has_more": False, **edges})

    post(app, "/v1/responses", create, ResponsesRequest)
    get(app, "/v1/responses/{response_id}", read)
    get(app, "/v1/responses/{response_id}/input_items", items)
    app.add_api_route("/v1/responses/{response_id}", delete, methods=["DELETE"], response_class=Response)
    app.add_api_route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"], response_class=Response)


RESPONSES = Api(add_routes, generating=frozenset({"/v1/responses"}))


async def _run(store: Store, growing: Growing, kept: Kept) -> None:
    """To the end, with every event kept."""
    async for _ in _events(store, growing, kept):
        pass


async def _foreground(store: Store, growing: Growing, kept: Kept) -> AsyncIterator[bytes]:
    async for events in _events(store, growing, kept):
        if events:
            yield b"".join([_event(event) for event in events])


async def _events(store: Store, growing: Growing, kept: Kept) -> AsyncIterator[list[dict[str, Any]]]:
    """What happens, step by step; whatever happens, the kept response ends with it."""
    try:
        kept.tell(begun := growing.begin())
        yield begun
        async for heard in listen(growing.chat):
            kept.tell(found := growing.take(heard))
            yield found
        kept.messages = [*kept.messages, growing.message()]
    except asyncio.CancelledError:
        growing.cancel()
        raise
    except Exception as error:
        kept.tell(found := growing.fail(describe_error(error)))
        yield found
    finally:
        if growing.response["status"] == "in_progress":
            growing.cancel()
        kept.end()
        store.weigh(kept)


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


async def _bytes(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async for event in events:
        yield _event(event)


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"


def _nothing() -> None:
    """The run goes on without its reader."""
