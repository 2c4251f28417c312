"""How relevance and labels are computed. Owns: cosines of embeddings, likelihoods of short answers.

A likelihood is the sum of an answer's log-probabilities after the question, over the answers that there are; every
answer is one engine request that scores its own prompt. Must not know: HTTP, shapes of answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.server.context import Context
from tokenmill.server.job import Job
from tokenmill.server.openai.sampling import truncate
from tokenmill.server.text import Talk

MOST_REQUESTS = 4096
RELEVANCE = "Given a query, find the documents that answer it."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


async def cosines(context: Context, job: Job, base: str, pairs: Sequence[tuple[str, str]], body: Any) -> list[float]:
    """Of each pair's embeddings; every text is computed once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    _grow(job, len(texts))
    prompts = []
    for text in texts:
        said, ids = await context.text.read(text, any_length=body.truncate_prompt_tokens is not None)
        prompts.append((said, truncate(ids, body, context.backend.info.max_model_len, 1)))
    vectors = dict(zip(texts, await job.embed(base, prompts, "last", priority=body.priority), strict=True))
    found = [sum(a * b for a, b in zip(vectors[left], vectors[right], strict=True)) for left, right in pairs]
    return [max(-1.0, min(1.0, value)) for value in found]  # unit vectors, rounded


async def relevance(context: Context, job: Job, base: str, pairs: Sequence[tuple[str, str]], body: Any) -> list[float]:
    """How likely "yes" is against "no" for each pair of query and document."""
    asked = body.instruction or RELEVANCE
    questions = [
        [
            {"role": "system", "content": JUDGE},
            {"role": "user", "content": f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"},
        ]
        for query, document in pairs
    ]
    return [shares[0] for shares in await likelihoods(context, job, base, questions, ["yes", "no"], body.priority)]


async def likelihoods(
    context: Context,
    job: Job,
    base: str,
    questions: Sequence[list[dict[str, Any]]],
    answers: Sequence[str],
    priority: int,
) -> list[list[float]]:
    """For each question, the share of each answer; an answer's end is not counted."""
    _grow(job, len(questions) * len(answers))
    tokenizer = context.backend.info.tokenizer
    if tokenizer is None:
        raise ParameterError("This server has no tokenizer, so answers cannot be scored.", param="labels")
    ends = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    prompts: list[tuple[str | None, list[int]]] = []
    options = {"chat_template": context.chat_template, "chat_template_kwargs": {"enable_thinking": False}}
    for messages in questions:
        _, ids = await context.text.chat(partial(_talk, messages, options))
        prompts += [(None, ids + end) for end in ends]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    await job.start(base, prompts, params, priority=priority)
    sums = []
    for place, (task, accumulator) in enumerate(await job.gather()):
        rows = accumulator.output().prompt_logprobs or []
        tail = ends[place % len(ends)]
        pairs = zip(rows[-len(tail) :], task.request.prompt_ids[-len(tail) :], strict=True)
        sums.append(sum(row[token].logprob for row, token in pairs if row is not None))
    return [_shares(sums[i : i + len(ends)]) for i in range(0, len(sums), len(ends))]


def _talk(messages: list[dict[str, Any]], options: dict[str, Any]) -> Talk:
    return messages, dict(options)


def _shares(sums: Sequence[float]) -> list[float]:
    most = max(sums)
    weights = [math.exp(value - most) for value in sums]
    return [weight / sum(weights) for weight in weights]


def _grow(job: Job, count: int) -> None:
    if count > MOST_REQUESTS:
        raise ParameterError(f"This asks for {count} scores at once; {MOST_REQUESTS} is the most.", param="documents")
    if count > 1:
        job.grow(count - 1)
