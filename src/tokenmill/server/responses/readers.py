"""Endpoints that read a conversation and store nothing. Owns: counting its tokens, and compaction.

Must not know: how answers are made.
"""

from __future__ import annotations

import uuid
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.responses.compaction import compacted, fields_for_summary
from tokenmill.server.responses.runs import find_earlier
from tokenmill.server.responses.schemas import NAMES, CompactRequest, TalkRequest, read_talk
from tokenmill.server.routing import Work, body_size, json_answer, post, read_body, tenant
from tokenmill.server.translated_chat import count_translated, hear_all, open_translated


def add_readers(app: FastAPI, context: Context) -> None:
    """Add the endpoints that count and compact."""

    async def count(request: Request, context: Context) -> Response:
        """Count the tokens in a response's input."""
        size = body_size(request)
        body = await read_body(context, request, TalkRequest)
        body.check()
        earlier = find_earlier(context.store, body, tenant(request))
        size += earlier.size
        talk = await context.bodies.run_in_thread(size, lambda: read_talk(body, earlier.messages, earlier.items))
        number = await count_translated(context, lambda: body.fields(talk.messages), size, names=NAMES)
        return json_answer({"object": "response.input_tokens", "input_tokens": number})

    async def compact(request: Request, context: Context) -> Response:
        """Make a long conversation short enough to continue."""
        async with Work(context, request) as work:
            given = await work.read(CompactRequest)
            body = given.talk()
            body.check()
            earlier = find_earlier(context.store, body, tenant(request))
            work.job.size += earlier.size
            size = work.job.size
            talk = await context.bodies.run_in_thread(size, lambda: read_talk(body, earlier.messages))
            asked = partial(fields_for_summary, body, talk.messages)
            taken = await count_translated(context, lambda: asked(1), size, names=NAMES)
            room = context.backend.info.max_model_len - taken
            name = work.job.called = f"resp_{uuid.uuid4().hex}"
            chat = await open_translated(context, lambda: asked(room), work.job, work.base(), names=NAMES)
            said, _ = await hear_all(chat)
            usage = await context.bodies.run_in_thread(len(said.reasoning), partial(chat.usage, said.reasoning))
            return json_answer(compacted(name, body.items(), said, usage))

    post(app, "/v1/responses/compact", compact, CompactRequest)
    post(app, "/v1/responses/input_tokens", count, TalkRequest)
