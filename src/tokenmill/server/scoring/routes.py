"""Endpoints for scores. Owns: their paths and answers. Must not know: how scores are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill.core.errors import ParameterError
from tokenmill.engine.interfaces.scores import check_labels, label_question, pair_up
from tokenmill.server.context import Context
from tokenmill.server.errors import blaming
from tokenmill.server.prices import cost_field
from tokenmill.server.request_job import Job
from tokenmill.server.routing import Api, Work, json_answer, post
from tokenmill.server.scoring import scores, tei
from tokenmill.server.scoring.schemas import (
    RERANK,
    ClassifyRequest,
    RerankRequest,
    Scored,
    ScoreRequest,
    TeiRerankRequest,
    form_of,
    text_of,
)
from tokenmill.server.scoring.scores import DOCUMENTS

SCORE = ("/score", "/v1/score")


def add_routes(app: FastAPI, context: Context) -> None:
    """/rerank, /score and /classify."""

    async def rerank(request: Request, context: Context) -> Response:
        """Sort documents by their relevance to a query."""
        async with Work(context, request) as work:
            body: RerankRequest | TeiRerankRequest = await work.read(form_of)
            if isinstance(body, TeiRerankRequest):
                return await tei.rerank(context, work, body)
            model = context.check_model(body.model)
            documents = [text_of(document) for document in body.documents]
            pairs = [(body.query, document) for document in documents]
            with blaming(DOCUMENTS, "messages"):
                found = await _scores(context, work.job, f"rerank-{work.base()}", pairs, body)
            order = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n or len(found)]
            results = [
                {"index": i, "relevance_score": found[i]}
                | ({"document": {"text": documents[i]}} if body.return_documents else {})
                for i in order
            ]
            return json_answer(
                {"id": f"rerank-{work.base()}", "model": model, "usage": _usage(work.job), "results": results}
            )

    async def score(request: Request, context: Context) -> Response:
        """Score how well texts fit together."""
        async with Work(context, request) as work:
            body = await work.read(ScoreRequest)
            model = context.check_model(body.model)
            with blaming("text_2", DOCUMENTS, "messages"):
                found = await _scores(context, work.job, f"score-{work.base()}", _pairs(body), body)
            data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(found)]
            return json_answer(_list(f"score-{work.base()}", model, data, work.job))

    async def classify(request: Request, context: Context) -> Response:
        """Find the likeliest label of each text."""
        async with Work(context, request) as work:
            body = await work.read(ClassifyRequest)
            model = context.check_model(body.model)
            check_labels(body.labels)
            texts = [body.input] if isinstance(body.input, str) else body.input
            questions = [partial(label_question, text, body.labels, body.instruction) for text in texts]
            base = f"classify-{work.base()}"
            with blaming("input", DOCUMENTS, "messages"):
                found = await scores.likelihoods(context, work.job, base, questions, body.labels, body.priority)
            data = [
                {"index": i, "label": body.labels[probs.index(max(probs))], "probs": probs, "num_classes": len(probs)}
                for i, probs in enumerate(found)
            ]
            return json_answer(_list(base, model, data, work.job))

    for path in RERANK:
        post(app, path, rerank, RerankRequest)
    for path in SCORE:
        post(app, path, score, ScoreRequest)
    post(app, "/classify", classify, ClassifyRequest)


SCORING = Api(add_routes, generating=frozenset({*RERANK, *SCORE, "/classify"}))


async def _scores(context: Context, job: Job, base: str, pairs: Sequence[tuple[str, str]], body: Scored) -> list[float]:
    if body.method == "embedding" and body.instruction is not None:
        raise ParameterError(
            'instruction needs method = "likelihood": texts are compared as they are.', param="instruction"
        )
    if body.method == "likelihood" and body.truncate_prompt_tokens is not None:
        raise ParameterError('truncate_prompt_tokens needs method = "embedding".', param="truncate_prompt_tokens")
    compute = scores.cosines if body.method == "embedding" else scores.relevance
    return [round(value, 8) for value in await compute(context, job, base, pairs, body)]


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """Pairs of one text with all others, or of texts at the same places."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else [text_of(each) for each in body.text_2]
    return pair_up(first, second)


def _list(name: str, model: str, data: list[dict[str, Any]], job: Job) -> dict[str, Any]:
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": {**_usage(job), "completion_tokens": 0, "prompt_tokens_details": None}}


def _usage(job: Job) -> dict[str, Any]:
    found = job.usage()
    tokens = found["prompt_tokens"]
    return {"prompt_tokens": tokens, "total_tokens": tokens, **cost_field(found)}
