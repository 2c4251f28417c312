"""Endpoints of the Responses API. Owns: their paths, and runs with and without a waiting client.

Must not know: how answers are made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, error_object
from tokenmill.server.model_lookup import Streams
from tokenmill.server.pages import list_page, read_page
from tokenmill.server.responses.conversations import PATH as CONVERSATIONS
from tokenmill.server.responses.conversations import add_conversations
from tokenmill.server.responses.kept_responses import KeptResponse
from tokenmill.server.responses.readers import add_readers
from tokenmill.server.responses.runs import Run, clean_up, events, open_run, run_to_end
from tokenmill.server.responses.schemas import ResponsesRequest
from tokenmill.server.responses.socket import SocketConversation
from tokenmill.server.routing import Api, Work, add_route, delete, get, json_answer, judge_without_body, post, tenant
from tokenmill.server.sse import EventStream
from tokenmill.server.websockets.socket import Patience
from tokenmill.server.websockets.upgrade import upgraded

PATH = "/v1/responses"


def add_routes(app: FastAPI, context: Context) -> None:
    """Create, get, follow, cancel, delete, and list the input of responses."""
    tasks: set[asyncio.Task[None]] = set()

    async def create(request: Request, context: Context) -> Response:
        """Answer, now or in the background."""
        async with Work(context, request) as work:
            body = await work.read(ResponsesRequest)
            run = await open_run(context, work.job, body, work.base())
            if body.background:
                work.detach()
                return _detached(run, tasks, stream=bool(body.stream))
            work.after.append(partial(clean_up, run))
            if body.stream:
                return work.stream(_foreground(run))
            await run_to_end(run)
            return _answer(run)

    async def connect(request: Request) -> Response:
        """Answer over a WebSocket."""
        context.gate.peek()
        if "model" in request.query_params:
            raise HttpError(400, "Each message names its model, the address does not.", param="model")
        config = context.config
        patience = Patience(config.limits.max_body_bytes, config.patience.read_timeout)
        return upgraded(request, patience, context.bodies, SocketConversation(context, request))

    async def read(request: Request) -> Response:
        """Get a stored response, or with `stream=true` its events after `starting_after`."""
        kept = context.store.find(KeptResponse, request.path_params["response_id"], tenant(request))
        stream, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
        if stream not in ("true", "false"):
            raise HttpError(400, "stream must be true or false.", param="stream")
        if stream == "false":
            if after is not None:
                raise HttpError(400, "starting_after has no effect without stream = true.", param="starting_after")
            return _shown(kept)
        if after is not None and not re.fullmatch("[0-9]{1,9}", after):
            raise HttpError(400, "starting_after must be an event's number.", param="starting_after")
        return EventStream(kept.follow(-1 if after is None else int(after)), _nothing)

    async def cancel(request: Request) -> Response:
        """Cancel a background response."""
        judge_without_body(context, request)
        kept = context.store.find(KeptResponse, request.path_params["response_id"], tenant(request))
        if not kept.background:
            raise HttpError(
                400, "Cannot cancel a synchronous response: only those with background = true.", param="response_id"
            )
        if kept.task is not None and not kept.ended:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        return _shown(kept)

    async def forget(request: Request) -> Response:
        """Delete a response."""
        name = request.path_params["response_id"]
        context.store.delete(KeptResponse, name, tenant(request))
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def items(request: Request) -> Response:
        """List the input of a response, the newest item first."""
        kept = context.store.find(KeptResponse, request.path_params["response_id"], tenant(request))
        page = read_page(request.query_params)

        def shown() -> Response:
            return json_answer(list_page(msgspec.json.decode(kept.items), page, lambda item: str(item["id"]), dict))

        return await context.bodies.run_in_thread(len(kept.items), shown)

    post(app, PATH, create, ResponsesRequest)
    get(app, PATH, connect, documented=False)
    add_readers(app, context)
    get(app, f"{PATH}/{{response_id}}", read)
    get(app, f"{PATH}/{{response_id}}/input_items", items)
    delete(app, f"{PATH}/{{response_id}}", forget)
    add_route(app, ("POST",), f"{PATH}/{{response_id}}/cancel", cancel)
    add_conversations(app, context)


def _failed(found: HttpError) -> bytes:
    """The only event of a stream that fails before its response begins."""
    said = error_object(found)["error"]
    told = {"type": "error", "sequence_number": 0, "code": str(said["code"]), "message": said["message"]}
    return b"event: error\ndata: " + msgspec.json.encode({**told, "param": said["param"]}) + b"\n\n"


RESPONSES = Api(
    add_routes,
    generating=frozenset({PATH, f"{PATH}/compact"}),
    prefixes=(PATH, CONVERSATIONS),
    streams=Streams(asked=frozenset({PATH}), failed=_failed),
)


def _detached(run: Run, tasks: set[asyncio.Task[None]], *, stream: bool) -> Response:
    """Let the run continue without its client."""
    task = run.kept.task = asyncio.get_running_loop().create_task(run_to_end(run))
    tasks.add(task)  # the event loop itself keeps only weak references
    task.add_done_callback(tasks.discard)
    task.add_done_callback(lambda _: clean_up(run))
    return EventStream(run.kept.follow(), _nothing) if stream else json_answer(run.growing.response)


async def _foreground(run: Run) -> AsyncIterator[bytes]:
    async for told in events(run):
        if told:
            yield b"".join(told)


def _answer(run: Run) -> Response:
    """The whole response. While the client waits, a failure is an HTTP error."""
    if run.growing.failure is not None:
        raise run.growing.failure
    return json_answer(run.growing.response)


def _shown(kept: KeptResponse) -> Response:
    return Response(kept.show(), media_type="application/json")


def _nothing() -> None:
    """The run continues without its reader."""
