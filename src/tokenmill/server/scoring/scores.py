"""How relevance and labels are computed over a service. Owns: the engine requests for them;
engine/interfaces/scores.py evaluates their results. Each answer is one engine request that scores its own prompt. Must
not know: HTTP, shapes of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenmill.core.errors import ParameterError, TooLargeError
from tokenmill.core.pooled import AS_STATED
from tokenmill.core.request import SamplingParams
from tokenmill.engine.interfaces.scores import (
    ANSWERS,
    answer_logprob,
    check_count,
    check_ends,
    cosine,
    relevance_question,
    shares,
)
from tokenmill.server.context import Context
from tokenmill.server.openai.sampling import truncate
from tokenmill.server.request_job import MOST_LOGPROBS, NUMBER, Job
from tokenmill.server.text_workers import Talk

MOST_READ = MOST_LOGPROBS
"""Most tokens in all engine requests of one call."""
Question = Callable[[], list[dict[str, Any]]]
"""Makes the messages of a question."""
DOCUMENTS = "documents"
"""The field to blame if there are too many. Each endpoint has its own name for it."""


async def cosines(context: Context, job: Job, base: str, pairs: Sequence[tuple[str, str]], body: Any) -> list[float]:
    """The cosine of each pair's embeddings. Every text is embedded once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    _grow(job, len(texts))
    prompts = []
    for text in texts:
        said, ids = await context.text.read(text, any_length=body.truncate_prompt_tokens is not None)
        prompts.append((said, truncate(ids, body, context.backend.info.max_model_len, text=False)))
    found = await job.embed(base, prompts, AS_STATED, priority=body.priority)
    vectors = dict(zip(texts, found, strict=True))
    size = NUMBER * len(pairs) * len(found[0])
    return await context.bodies.run_in_thread(
        size, lambda: [cosine(vectors[left], vectors[right]) for left, right in pairs]
    )


async def relevance(context: Context, job: Job, base: str, pairs: Sequence[tuple[str, str]], body: Any) -> list[float]:
    """For each pair of query and document: how likely "yes" is compared with "no"."""
    questions = [partial(relevance_question, query, document, body.instruction) for query, document in pairs]
    return [found[0] for found in await likelihoods(context, job, base, questions, ANSWERS, body.priority)]


async def likelihoods(
    context: Context,
    job: Job,
    base: str,
    questions: Sequence[Question],
    answers: Sequence[str],
    priority: int,
) -> list[list[float]]:
    """For each question, the share of each answer. An answer's end is not counted. Questions are made one at a time,
    because each of them may repeat the largest text of the body."""
    _grow(job, len(questions) * len(answers))
    if context.backend.info.tokenizer is None:
        raise ParameterError("This server has no tokenizer, so answers cannot be scored.", param="labels")
    ends = [(await context.text.read(answer, add_special_tokens=False))[1] for answer in answers]
    check_ends(ends)
    prompts: list[tuple[str | None, list[int]]] = []
    starts: list[int] = []
    read = 0
    options = {"chat_template": context.chat_template, "chat_template_kwargs": {"enable_thinking": False}}
    for question in questions:
        _, ids = await context.text.chat(partial(_talk, question, options), size=job.size)
        read += sum(len(ids) + len(end) for end in ends)
        if read > MOST_READ:
            raise TooLargeError(
                f"The texts have {read} tokens or more, each counted once for each label; the limit is {MOST_READ}. "
                "Send fewer at once.",
                param=DOCUMENTS,
            )
        starts += [len(ids)] * len(ends)
        prompts += [(None, ids + end) for end in ends]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    job.silent = True
    await job.start(base, prompts, params, scored_from=starts, priority=priority)
    sums = []
    for place, (task, accumulator) in enumerate(await job.gather()):
        rows = accumulator.output().prompt_logprobs or []
        sums.append(answer_logprob(rows, task.request.prompt_ids, ends[place % len(ends)]))
    return shares(sums, len(ends))


def _talk(question: Question, options: dict[str, Any]) -> Talk:
    return question(), dict(options)


def _grow(job: Job, count: int) -> None:
    check_count(count)
    job.grow(count, DOCUMENTS)
