"""Anthropic's endpoints. Owns: their paths. Must not know: how answers are made."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.anthropic import answers
from tokenmill.server.anthropic.models import models_answer
from tokenmill.server.anthropic.schemas import NAMES, CountRequest, MessagesRequest
from tokenmill.server.context import Context
from tokenmill.server.model_lookup import Streams
from tokenmill.server.routing import Api, Work, body_size, get_with_header, json_answer, post, read_body
from tokenmill.server.translated_chat import count_translated, open_translated

HEADER = b"anthropic-version"
"""A header that this API's clients send with every request."""


def add_routes(app: FastAPI, context: Context) -> None:
    """/v1/messages, /v1/messages/count_tokens, and /v1/models for Anthropic's clients."""
    created = int(time.time())

    async def messages(request: Request, context: Context) -> Response:
        """Answer a conversation."""
        async with Work(context, request) as work:
            body = await work.read(MessagesRequest)
            name = work.job.called = f"msg_{work.base()}"
            chat = await open_translated(context, body.fields, work.job, work.base(), names=NAMES)
            return (
                work.stream(answers.events(chat, name)) if body.stream else json_answer(await answers.whole(chat, name))
            )

    async def count(request: Request, context: Context) -> Response:
        """Count the tokens of a conversation."""
        size = body_size(request)
        body = await read_body(context, request, CountRequest)
        return json_answer({"input_tokens": await count_translated(context, body.prompt, size, names=NAMES)})

    async def models(request: Request) -> Response:
        """List the served models, or get one of them."""
        return models_answer(context, request, created)

    for path in ("/v1/models", "/v1/models/{name:path}"):
        get_with_header(app, path, models, HEADER)
    post(app, "/v1/messages", messages, MessagesRequest)
    post(app, "/v1/messages/count_tokens", count, CountRequest)


ANTHROPIC = Api(
    add_routes,
    generating=frozenset({"/v1/messages"}),
    prefixes=("/v1/messages",),
    error=answers.error_body,
    header=HEADER,
    shared=("/v1/models",),
    streams=Streams(
        asked=frozenset({"/v1/messages"}),
        failed=lambda found: b"event: error\ndata: " + answers.error_body(found) + b"\n\n",
    ),
)
