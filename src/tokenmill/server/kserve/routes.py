"""KServe's endpoints. Owns: their paths and answers. Must not know: engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

import tokenmill
from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError
from tokenmill.server.kserve.schemas import NAMES, TEXT, GenerateRequest, InferRequest
from tokenmill.server.model_lookup import Streams, find_by_name
from tokenmill.server.openai.completions import Completion
from tokenmill.server.request_job import Gathered
from tokenmill.server.routing import Api, Work, get, json_answer, post
from tokenmill.server.switch.listing import known_name, trouble, trouble_of_all
from tokenmill.server.translated_completion import open_translated_completion

encode = msgspec.json.Encoder().encode
OUT = "text_output"
MODEL = "/v2/models/{model}"
VERSION = "1"
"""The version of every model, which paths may name."""


def error_body(found: HttpError) -> bytes:
    """{"error": "..."}"""
    return encode({"error": found.message})


def add_routes(app: FastAPI, context: Context) -> None:
    """/v2: the server, its health, its models, and inference."""

    async def server(request: Request) -> Response:
        """Describe the server."""
        return json_answer({"name": "tokenmill", "version": tokenmill.__version__, "extensions": ["generate"]})

    async def live(request: Request) -> Response:
        """Is the process up?"""
        return json_answer({"live": True})

    async def ready(request: Request) -> Response:
        """Does the server take requests?"""
        up = not context.gate.draining and trouble_of_all(context.shared) is None
        return json_answer({"ready": up}, 200 if up else 503)

    async def model(request: Request) -> Response:
        """Describe a model's tensors."""
        name = known_name(context.shared, request, request.path_params["model"])
        tensors = [{"name": n, "datatype": "BYTES", "shape": [-1]} for n in (TEXT, OUT)]
        about = {"name": name, "versions": [VERSION], "platform": "tokenmill"}
        return json_answer({**about, "inputs": tensors[:1], "outputs": tensors[1:]})

    async def model_ready(request: Request) -> Response:
        """Does this model take requests?"""
        name = known_name(context.shared, request, request.path_params["model"])
        up = not context.gate.draining and trouble(find_by_name(context.shared, request, name)) is None
        return json_answer({"name": name, "ready": up}, 200 if up else 503)

    async def infer(request: Request, context: Context) -> Response:
        """Continue texts."""
        async with Work(context, request) as work:
            body = await work.read(InferRequest)
            wanted = body.wanted((OUT, "finish_reason"))
            name = context.check_model(request.path_params["model"])
            await _open(work, body.read, several=True)
            head = {"model_name": name, "model_version": VERSION, "id": body.id or work.base()}

            def make(gathered: Gathered) -> Any:
                outs = [out for _, result in gathered for out in result.output().outputs]
                texts, reasons = [out.text for out in outs], [out.finish_reason for out in outs]
                outputs = [_tensor(OUT, texts), _tensor("finish_reason", reasons)]
                return {**head, "outputs": [each for each in outputs if each["name"] in wanted]}

            return await work.whole(make)

    async def generate(request: Request, context: Context) -> Response:
        """Continue one text."""
        async with Work(context, request) as work:
            body = await work.read(GenerateRequest)
            name = context.check_model(request.path_params["model"])
            await _open(work, body.read)

            def make(gathered: Gathered) -> Any:
                ((_, result),) = gathered
                (out, *_rest) = result.output().outputs
                found = {"model_name": name, "model_version": VERSION, OUT: out.text}
                return {**found, "finish_reason": out.finish_reason, "id": body.id or work.base()}

            return await work.whole(make)

    async def generate_stream(request: Request, context: Context) -> Response:
        """The same, piece by piece."""
        async with Work(context, request) as work:
            body = await work.read(GenerateRequest)
            name = context.check_model(request.path_params["model"])
            opened = await _open(work, body.read, stream=True)
            return work.stream(
                _pieces(opened, {"model_name": name, "model_version": VERSION, "id": body.id or work.base()})
            )

    for path, handler in {"/v2": server, "/v2/health/live": live, "/v2/health/ready": ready}.items():
        get(app, path, handler)
    for path in (MODEL, f"{MODEL}/versions/{VERSION}"):
        get(app, path, model)
        get(app, f"{path}/ready", model_ready)
        post(app, f"{path}/infer", infer, InferRequest)
        post(app, f"{path}/generate", generate, GenerateRequest)
        post(app, f"{path}/generate_stream", generate_stream, GenerateRequest)


KSERVE = Api(
    add_routes,
    prefixes=("/v2/models", "/v2/health"),
    error=error_body,
    streams=Streams(
        always=frozenset({"generate_stream"}), failed=lambda found: b"data: " + error_body(found) + b"\n\n"
    ),
)


Asked = Callable[[], tuple[str | list[str], dict[str, Any]]]


async def _open(work: Work, asked: Asked, *, stream: bool = False, several: bool = False) -> Completion:
    """A completion for these prompts and parameters. `several`: the answer may hold more than one text."""

    def fields() -> dict[str, Any]:
        prompts, parameters = asked()
        work.judge("kserve.Parameters", parameters)
        if parameters.pop("stream", stream) is not stream:
            other = "generate" if stream else "generate_stream"
            raise ParameterError(f"stream is not what this path does: use {other}.", param="stream")
        if not several and parameters.get("n", 1) != 1:
            raise ParameterError("n must be 1 here: the answer has room for one text (infer has more).", param="n")
        return {**parameters, "prompt": prompts}

    return await open_translated_completion(work, fields, NAMES)


async def _pieces(opened: Completion, head: dict[str, Any]) -> AsyncIterator[bytes]:
    async for batch in opened.job.batches():
        for _, delta in batch:
            piece = {**head, OUT: delta.text, "finish_reason": delta.finish_reason}
            yield b"data: " + encode(piece) + b"\n\n"


def _tensor(name: str, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data}
