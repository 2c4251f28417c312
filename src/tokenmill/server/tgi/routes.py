"""TGI's endpoints, and vLLM's first one. Owns: their paths. Must not know: how answers are made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

import tokenmill
from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.model_lookup import Streams
from tokenmill.server.openai.completions import Completion
from tokenmill.server.request_job import Gathered
from tokenmill.server.routing import Api, Work, get, json_answer, post
from tokenmill.server.text_workers import THREADS
from tokenmill.server.tgi import answers
from tokenmill.server.tgi.schemas import NAMES, AnyRequest, TgiRequest, VllmRequest, form_of
from tokenmill.server.translated_completion import open_translated_completion

encode = msgspec.json.Encoder().encode


def add_routes(app: FastAPI, context: Context) -> None:
    """/generate, /generate_stream, /info, and / for those who post there."""

    async def generate(request: Request, context: Context) -> Response:
        """Continue a prompt, in TGI's form (`inputs`) or vLLM's first one (`prompt`)."""
        async with Work(context, request) as work:
            body: TgiRequest | VllmRequest = await work.read(form_of)
            if isinstance(body, VllmRequest):
                return await _vllm(work, body)
            if body.stream:
                raise ParameterError("stream is not available on this path: use /generate_stream.", param="stream")
            return await _tgi(work, body, stream=False)

    async def generate_stream(request: Request, context: Context) -> Response:
        """The same, token by token."""
        async with Work(context, request) as work:
            body = await work.read(TgiRequest)
            if "stream" in body.model_fields_set and not body.stream:
                raise ParameterError("Answers on this path are streams: use /generate for others.", param="stream")
            return await _tgi(work, body, stream=True)

    async def root(request: Request, context: Context) -> Response:
        """Continue a prompt for clients that post to /: a list of one answer, or a stream."""
        async with Work(context, request) as work:
            body = await work.read(TgiRequest)
            return await _tgi(work, body, stream=body.stream, listed=not body.stream)

    async def info(request: Request, context: Context) -> Response:
        """Get the served model and its limits."""
        return json_answer(_info(context))

    post(app, "/generate", generate, AnyRequest)
    post(app, "/generate_stream", generate_stream, TgiRequest)
    post(app, "/", root, TgiRequest)
    get(app, "/info", info)


TGI = Api(
    add_routes,
    generating=frozenset({"/", "/generate", "/generate_stream"}),
    prefixes=("/", "/generate", "/info"),
    error=answers.error_body,
    streams=Streams(
        asked=frozenset({"/"}),
        always=frozenset({"/generate_stream"}),
        failed=lambda found: b"data:" + answers.error_body(found) + b"\n\n",
    ),
)


async def _tgi(work: Work, body: TgiRequest, *, stream: bool, listed: bool = False) -> Response:
    opened = await open_translated_completion(work, lambda: body.parameters.fields(body.inputs, stream=stream), NAMES)
    if stream:
        return work.stream(answers.events(opened, body.parameters, body.inputs))
    if body.parameters.return_full_text:
        work.job.check_repeated(len(body.inputs), work.job.count)

    def make(gathered: Gathered) -> Any:
        found = answers.whole(opened, gathered, body.parameters, body.inputs)
        return [found] if listed else found

    return await work.whole(make)


async def _vllm(work: Work, body: VllmRequest) -> Response:
    """{"text": [prompt + output, ...]}, or one line of that per step."""
    own = {"prompt": body.prompt, "use_beam_search": body.use_beam_search}
    opened = await open_translated_completion(work, lambda: {**own, **(body.model_extra or {})})
    work.job.check_repeated(len(body.prompt), work.job.count)
    if body.stream:
        return work.lines(_grown(opened, body.prompt))

    def make(gathered: Gathered) -> Any:
        ((_, accumulator),) = gathered
        return {"text": [body.prompt + out.text for out in accumulator.output().outputs]}

    return await work.whole(make)


def _info(context: Context) -> dict[str, Any]:
    """/info."""
    info, limits = context.backend.info, context.config.limits
    facts = info.details
    return {
        "model_id": info.names[0],
        "model_sha": None,
        "model_dtype": f"torch.{facts.get('dtype', 'float32')}",
        "model_device_type": str(facts.get("device", "cpu")).split(":")[0],
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": limits.max_num_queued_reqs,
        "max_best_of": limits.max_n,
        "max_stop_sequences": limits.max_stop,
        "max_input_tokens": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "max_client_batch_size": 1,
        "validation_workers": THREADS,
        "router": "tokenmill",
        "version": tokenmill.__version__,
        "sha": None,
        "docker_label": None,
    }


async def _grown(opened: Completion, prompt: str) -> AsyncIterator[bytes]:
    """All texts so far, after each step."""
    texts: dict[int, str] = {}
    async for batch in opened.job.batches():
        for _, delta in batch:
            texts[delta.index] = texts.get(delta.index, prompt) + delta.text
        yield encode({"text": [texts[i] for i in sorted(texts)]}) + b"\n"
