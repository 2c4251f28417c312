"""OpenAI's endpoints. Owns: their paths. Must not know: how answers are made (one file per endpoint beside this)."""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, error_object
from tokenmill.server.model_lookup import Streams
from tokenmill.server.openai import chat, chat_stream, completions, embeddings, tokens
from tokenmill.server.openai.schemas import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    TokenizeRequest,
)
from tokenmill.server.openai.stored.store_chat import answer_and_store, kept_base
from tokenmill.server.routing import Api, Work, body_size, get, json_answer, post, read_body, tenant
from tokenmill.server.sse import DONE, event
from tokenmill.server.switch.listing import find_listed, list_models


def add_routes(app: FastAPI, context: Context) -> None:
    """Chat, completions, embeddings, models, and what reads tokens."""

    async def chat_completions(request: Request, context: Context) -> Response:
        """Answer a conversation."""
        async with Work(context, request) as work:
            body = await work.read(ChatRequest)
            work.job.tells_cuts = True
            base = work.base(body.request_id)
            opened = await chat.open_chat(context, body, work.job, kept_base(base) if body.store else base)
            if body.store:
                return await answer_and_store(work, opened)
            if body.stream:
                return work.stream(chat_stream.ChatStream(opened).chunks())
            return await work.whole(partial(chat.whole_answer, opened))

    async def text_completions(request: Request, context: Context) -> Response:
        """Continue one or several prompts."""
        async with Work(context, request) as work:
            body = await work.read(CompletionRequest)
            work.job.tells_cuts = True
            opened = await completions.open_completion(context, body, work.job, work.base(body.request_id))
            if body.stream:
                return work.stream(completions.CompletionStream(opened).chunks())
            return await work.whole(partial(completions.whole_answer, opened))

    async def make_embeddings(request: Request, context: Context) -> Response:
        """Unit vectors of texts."""
        async with Work(context, request) as work:
            body = await work.read(EmbeddingRequest)
            return json_answer(await embeddings.embed(context, body, work.job, work.base(body.request_id)))

    async def pool(request: Request, context: Context) -> Response:
        """The same vectors, in vLLM's form."""
        async with Work(context, request) as work:
            body = await work.read(PoolingRequest)
            return json_answer(
                embeddings.pooled(await embeddings.embed(context, body, work.job, work.base(body.request_id)))
            )

    async def invoke(request: Request, context: Context) -> Response:
        """Answer a chat, a completion or embeddings, depending on the body's fields: some hosts have only this path."""
        names = await context.bodies.run_in_thread(body_size(request), request.scope["state"]["body"].fields)
        for name, handler in kinds.items():
            if name in names:
                return await handler(request, context)
        raise HttpError(400, f"The body must hold one of {', '.join(kinds)}.")

    kinds = {"messages": chat_completions, "prompt": text_completions, "input": make_embeddings}

    post(app, "/v1/chat/completions", chat_completions, ChatRequest)
    post(app, "/v1/completions", text_completions, CompletionRequest)
    post(app, "/v1/embeddings", make_embeddings, EmbeddingRequest)
    post(app, "/pooling", pool, PoolingRequest)
    post(app, "/invocations", invoke, AnyRequest)
    _add_telling(app, context)


def _add_telling(app: FastAPI, context: Context) -> None:
    """Add models, timelines, and what reads tokens."""
    created = int(time.time())

    async def models(request: Request) -> Response:
        """List the served models."""
        return json_answer(tokens.model_list(list_models(context.shared, request), created))

    async def model(request: Request) -> Response:
        """Get one served model."""
        return json_answer(
            tokens.model_card(find_listed(context.shared, request, request.path_params["name"]), created)
        )

    async def timeline(request: Request) -> Response:
        """Get the timeline of a recent request. Only its own key may ask."""
        found = context.history.find(request.path_params["id"], tenant(request))
        if found is None:
            raise HttpError(404, "There is no such request, or its record was dropped.", param="id")
        return json_answer(found)

    async def tokenizer_info(request: Request, context: Context) -> Response:
        """Get the tokenizer's settings."""
        return json_answer(tokens.tokenizer_info(context))

    async def tokenize(request: Request, context: Context) -> Response:
        """Get the token ids of a prompt or a conversation."""
        size = body_size(request)
        body = await read_body(context, request, TokenizeRequest)
        return json_answer(await tokens.tokenize(context, body, size))

    async def detokenize(request: Request, context: Context) -> Response:
        """Get the text of token ids."""
        body = await read_body(context, request, DetokenizeRequest)
        return json_answer(await tokens.detokenize(context, body))

    get(app, "/v1/requests/{id}", timeline)
    get(app, "/tokenizer_info", tokenizer_info)
    get(app, "/v1/models", models)
    get(app, "/models", models)
    get(app, "/v1/models/{name:path}", model)
    post(app, "/tokenize", tokenize, TokenizeRequest)
    post(app, "/detokenize", detokenize, DetokenizeRequest)


OPENAI = Api(
    add_routes,
    generating=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/pooling", "/invocations"}),
    streams=Streams(
        asked=frozenset({"/v1/chat/completions", "/v1/completions", "/invocations"}),
        failed=lambda found: event(error_object(found)) + DONE,
    ),
)
