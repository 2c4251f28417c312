"""POST /v1/embeddings. Owns: all forms of inputs, and vectors as lists or base64. Must not know: engines."""

from __future__ import annotations

import array
import base64
import sys
import time
from typing import Any

import msgspec

from tokenmill.core.pooled import AS_STATED
from tokenmill.engine.interfaces.scores import shorten
from tokenmill.server.context import Context
from tokenmill.server.errors import blaming
from tokenmill.server.openai.sampling import truncate
from tokenmill.server.openai.schemas import EmbeddingRequest
from tokenmill.server.prices import cost_field
from tokenmill.server.request_job import NUMBER, Job


async def embed(context: Context, body: EmbeddingRequest, job: Job, base: str) -> dict[str, Any]:
    """One vector per input, in order."""
    model = context.check_model(body.model)
    given = body.input
    inputs: Any = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    job.grow(len(inputs), "input")
    with blaming("input"):
        prompts = []
        for prompt in inputs:
            cut = body.truncate_prompt_tokens is not None
            text, ids = await context.text.read(prompt, add_special_tokens=body.add_special_tokens, any_length=cut)
            prompts.append((text, truncate(ids, body, context.backend.info.max_model_len, text=False)))
        vectors = await job.embed(f"embd-{base}", prompts, body.pooling or AS_STATED, priority=body.priority)
    usage = job.usage()

    def written() -> list[dict[str, Any]]:
        each = (_encode(shorten(vector, body.dimensions), body) for vector in vectors)
        return [{"object": "embedding", "index": i, "embedding": found} for i, found in enumerate(each)]

    return {
        "id": f"embd-{base}",
        "object": "list",
        "data": await context.bodies.run_in_thread(NUMBER * len(vectors) * len(vectors[0]), written),
        "model": model,
        "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"], **cost_field(usage)},
    }


def pooled(found: dict[str, Any]) -> dict[str, Any]:
    """The same answer in the shape of vLLM's /pooling."""
    data = [{"index": e["index"], "object": "pooling", "data": e["embedding"]} for e in found["data"]]
    return {**found, "id": found["id"].replace("embd-", "pool-", 1), "created": int(time.time()), "data": data}


def _encode(vector: list[float], body: EmbeddingRequest) -> msgspec.Raw | str:
    """Encode one vector. Encoding thousands in one call would block all other work of the interpreter."""
    if body.encoding_format == "float":
        return msgspec.Raw(msgspec.json.encode(vector))
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
