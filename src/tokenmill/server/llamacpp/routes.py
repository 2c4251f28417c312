"""llama.cpp's endpoints. Owns: their paths, and what is said about the server. Must not know: how answers are made.

`/tokenize`, `/detokenize` and `/health` are shared with other APIs: their bodies and answers hold both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

import tokenmill
from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, blaming, quoted, renaming_fields
from tokenmill.server.llamacpp import answers, texts
from tokenmill.server.llamacpp.schemas import (
    Adapted,
    CompletionRequest,
    EmbeddingRequest,
    InfillRequest,
    TemplateRequest,
)
from tokenmill.server.model_lookup import Streams
from tokenmill.server.openai import embeddings, schemas, tokens
from tokenmill.server.openai.completions import Read
from tokenmill.server.routing import Api, Work, body_size, get, json_answer, post, read_body
from tokenmill.server.translated_completion import open_translated_completion

GENERATING = ("/completion", "/completions", "/infill")
EMBEDDING = ("/embedding", "/embeddings")


def add_routes(app: FastAPI, context: Context) -> None:
    """/completion, /infill, /embedding, /apply-template, /props, /slots and /lora-adapters."""

    async def complete(request: Request, context: Context) -> Response:
        """Continue one or several prompts."""
        async with Work(context, request) as work:
            body = await work.read(CompletionRequest)
            prompts = [await _one(work.context, body, prompt) for prompt in body.prompts()[0]]
            return await _answer(work, body, lambda: body.fields(prompts))

    async def infill(request: Request, context: Context) -> Response:
        """Write between two texts."""
        async with Work(context, request) as work:
            body = await work.read(InfillRequest)
            with renaming_fields({"suffix": "input_suffix"}), blaming("input_prefix"):
                return await _infill(work, body)

    async def embed(request: Request, context: Context) -> Response:
        """Unit vectors, each in a list of its own."""
        async with Work(context, request) as work:
            body = await work.read(EmbeddingRequest)
            asked = schemas.EmbeddingRequest.model_validate({"input": body.content})
            with blaming("content", "input"):
                found = await embeddings.embed(context, asked, work.job, work.base())
            return json_answer([{"index": e["index"], "embedding": [e["embedding"]]} for e in found["data"]])

    async def apply(request: Request, context: Context) -> Response:
        """Render a conversation as a prompt."""
        size = body_size(request)
        body = await read_body(context, request, TemplateRequest)
        text, _ = await context.text.chat(lambda: tokens.talk(context, body), size=size, any_length=True)
        return json_answer({"prompt": text})

    for path in GENERATING[:2]:
        post(app, path, complete, CompletionRequest)
    post(app, "/infill", infill, InfillRequest)
    for path in EMBEDDING:
        post(app, path, embed, EmbeddingRequest)
    post(app, "/apply-template", apply, TemplateRequest)
    _add_telling(app, context)


def _add_telling(app: FastAPI, context: Context) -> None:
    """Add the paths that describe the server."""

    async def props(request: Request, context: Context) -> Response:
        """Get the model, its template and its defaults."""
        return json_answer(_props(context))

    async def slots(request: Request, context: Context) -> Response:
        """Get the rows as slots: how many of them work, but not on what."""
        busy, rows = sum(engine.running for engine in context.backend.stats()), _rows(context)
        failing = request.query_params.get("fail_on_no_slot", "0")
        if failing not in ("0", "1"):
            raise HttpError(400, "fail_on_no_slot must be 0 or 1.", param="fail_on_no_slot")
        if failing == "1" and busy >= rows:
            raise HttpError(503, "No slot is free now; try again.", retry_after=1)
        more = {"n_ctx": context.backend.info.max_model_len, "speculative": False}
        return json_answer([{"id": i, "is_processing": i < busy, **more} for i in range(rows)])

    async def adapters(request: Request, context: Context) -> Response:
        """Get the served adapters. A request names one as its model, or in `lora` by its place in this list."""
        listed = enumerate(context.backend.info.adapters)
        return json_answer([{"id": i, "path": name, "scale": 0.0} for i, name in listed])

    get(app, "/props", props)
    get(app, "/slots", slots)
    get(app, "/lora-adapters", adapters)


LLAMACPP = Api(
    add_routes,
    generating=frozenset((*GENERATING, *EMBEDDING)),
    prefixes=(*GENERATING, *EMBEDDING, "/apply-template", "/props", "/slots", "/lora-adapters"),
    error=answers.error_body,
    any_type=True,
    renamed={"/chat/completions": "/v1/chat/completions"},
    streams=Streams(asked=frozenset(GENERATING), failed=lambda found: b"data: " + answers.error_body(found) + b"\n\n"),
)


async def _answer(
    work: Work, asked: Adapted, fields: Callable[[], dict[str, Any]], read: Callable[[], Any] | None = None
) -> Response:
    """A completion with these fields. `read`: makes the prompt in another way."""

    def chosen() -> dict[str, Any]:
        found, info = fields(), work.context.backend.info
        found["logit_bias"] = texts.biases(found.get("logit_bias"), info.tokenizer)
        adapter = asked.adapter(tuple(info.adapters))
        if adapter is not None:
            name = adapter or info.names[0]
            if found.setdefault("model", name) != name:
                raise ParameterError(f"lora chooses {quoted(name)}, and model names another one.", param="lora")
        return found

    work.job.silent = asked.silent
    opened = await open_translated_completion(work, chosen, read=read)
    made = answers.Answers(opened, silent=asked.silent, chosen=asked.response_fields or ())
    if opened.body.stream:
        return work.stream(made.events())
    return await work.whole(made.whole)


async def _one(context: Context, body: CompletionRequest, prompt: texts.Prompt) -> texts.Prompt:
    """A prompt as one text or as ids."""
    if not texts.is_mixed(prompt):
        return prompt
    framed = (body.model_extra or {}).get("add_special_tokens") is not False
    return await context.text.read_pieces(prompt, framed=framed)


async def _infill(work: Work, body: InfillRequest) -> Response:
    text = work.context.text
    ends = text.fill_ends()

    def fields() -> dict[str, Any]:
        found = body.fields()
        if not found.get("ignore_eos"):
            found["stop_token_ids"] = [*(found.get("stop_token_ids") or ()), *ends]
        return found

    async def read() -> Read:
        others = [(each.filename, each.text) for each in body.input_extra]
        gap, framed = (body.input_prefix, body.input_suffix), body.fields().get("add_special_tokens") is not False
        return [await text.fill(gap, body.prompt, others, framed=framed)]

    return await _answer(work, body, fields, read)


def _rows(context: Context) -> int:
    """The rows of all engines of this model."""
    return context.backend.info.max_rows * len(context.backend.stats())


def _props(context: Context) -> dict[str, Any]:
    info = context.backend.info
    tokenizer = info.tokenizer
    names = tokenizer.special_strings if tokenizer is not None else {}
    template = context.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    return {
        "default_generation_settings": {"n_ctx": info.max_model_len, "params": dict(info.generation)},
        "total_slots": _rows(context),
        "model_alias": info.names[0],
        "model_path": info.root,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template if isinstance(template, str) else "",
        "bos_token": names.get("bos_token") or "",
        "eos_token": names.get("eos_token") or "",
        "build_info": f"tokenmill {tokenmill.__version__}",
        "is_sleeping": False,  # a sleeping one was woken to answer this
    }
