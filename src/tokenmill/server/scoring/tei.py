"""TEI's endpoints (text-embeddings-inference): vectors, similarities, and its form of /rerank. Owns: their answers.

Must not know: how scores and vectors are computed.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, blaming
from tokenmill.server.openai import embeddings
from tokenmill.server.openai.schemas import EmbeddingRequest
from tokenmill.server.routing import Api, Work, json_answer, post
from tokenmill.server.scoring import scores
from tokenmill.server.scoring.schemas import EmbedRequest, Scored, SimilarityRequest, TeiRerankRequest

PATHS = ("/embed", "/similarity")
KINDS = {424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Overloaded"}


def error_body(found: HttpError) -> bytes:
    """{"error": ..., "error_type": ...}"""
    return msgspec.json.encode({"error": found.message, "error_type": KINDS.get(found.status, "Validation")})


def add_tei(app: FastAPI, context: Context) -> None:
    """/embed and /similarity."""

    async def embed(request: Request, context: Context) -> Response:
        """Unit vectors of texts as a bare list."""
        async with Work(context, request) as work:
            body = await work.read(EmbedRequest)
            fields = {"input": body.inputs, "dimensions": body.dimensions}
            asked = EmbeddingRequest.model_validate({**fields, **_cut(body)})
            with blaming("inputs", "input"):
                found = await embeddings.embed(context, asked, work.job, work.base())
            return json_answer([entry["embedding"] for entry in found["data"]])

    async def similarity(request: Request, context: Context) -> Response:
        """The similarity of each sentence to the first one."""
        async with Work(context, request) as work:
            inputs = (await work.read(SimilarityRequest)).inputs
            pairs = [(inputs.source_sentence, sentence) for sentence in inputs.sentences]
            with blaming("inputs.sentences", scores.DOCUMENTS):
                found = await scores.cosines(context, work.job, work.base(), pairs, Scored.model_validate({}))
            return json_answer([round(value, 8) for value in found])

    post(app, "/embed", embed, EmbedRequest)
    post(app, "/similarity", similarity, SimilarityRequest)


TEI = Api(add_tei, generating=frozenset(PATHS), prefixes=(*PATHS, "/predict"), error=error_body)


async def rerank(context: Context, work: Work, body: TeiRerankRequest) -> Response:
    """Texts by relevance, as a bare list, the best first."""
    asked = Scored.model_validate(_cut(body))
    pairs = [(body.query, text) for text in body.texts]
    with blaming("texts", scores.DOCUMENTS):
        values = await scores.cosines(context, work.job, f"rerank-{work.base()}", pairs, asked)
    found = [round(value, 8) for value in values]
    order = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n or len(found)]
    return json_answer([_ranked(i, found[i], body) for i in order])


def _ranked(index: int, score: float, body: TeiRerankRequest) -> dict[str, Any]:
    shown = {"text": body.texts[index]} if body.return_text else {}
    return {"index": index, **shown, "score": score}


def _cut(body: EmbedRequest | TeiRerankRequest) -> dict[str, Any]:
    """The fields that cut a text to what fits."""
    side = body.truncation_direction.lower()
    return {"truncate_prompt_tokens": -1, "truncation_side": side} if body.truncate else {}
