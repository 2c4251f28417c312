"""Vectors, scores and labels offline. Owns: the requests that they need, in an LLM's batch, and vLLM's output types.

`scores.py` turns results into scores, for the server as well. Must not know: threads, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from tokenmill.core.errors import ParameterError, SequenceError
from tokenmill.core.params import PoolingParams
from tokenmill.core.pooled import (
    AS_STATED,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.interfaces.llm_arguments import about
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.prompts import Prompt, PromptReader
from tokenmill.engine.interfaces.scores import (
    ANSWERS,
    answer_logprob,
    check_count,
    check_ends,
    check_labels,
    cosine,
    label_question,
    pair_up,
    relevance_question,
    shares,
    shorten,
)

Make = Callable[..., Request]
"""(text, ids, params, **fields) -> a request with an id of its own."""
Drive = Callable[[list[Request], str | None], list[Accumulator]]
"""(requests, pooling) -> their results; pooling: how to make vectors, None for text."""
LONGEST = -1
"""The value of truncate_prompt_tokens that means: as many tokens as the context holds."""


class Pooler:
    """Prompts to vectors, scores and labels, over one LLM's way of running requests."""

    def __init__(self, reader: PromptReader, context: int, make: Make, drive: Drive) -> None:
        self.reader, self.context, self.make, self.drive = reader, context, make, drive

    def embed(
        self, prompts: Sequence[Prompt], params: PoolingParams, adapters: Sequence[int] | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Unit vectors, in order. adapters: of each prompt, in place of the one for all."""
        sampling = sampling_of(params, self.context)
        requests = []
        for place, prompt in enumerate(prompts):
            with about(place, len(prompts)):
                text, ids, salt = self.reader.read(prompt, sampling)
                own = {} if adapters is None else {"adapter": adapters[place]}
                requests.append(self.make(text, ids, sampling, salt=salt, **own))
        found = []
        for place, done in enumerate(self.drive(requests, AS_STATED if params.pooling is None else params.pooling)):
            if done.pooled is None:
                raise SequenceError(f"Prompt {place} has no embedding: {done.outputs[0].stop_reason}")
            vector = EmbeddingOutput(embedding=shorten(done.pooled, params.dimensions))
            ids = done.request.prompt_ids
            found.append(EmbeddingRequestOutput(request_id=done.request.id, prompt_token_ids=ids, outputs=vector))
        return found

    def score(
        self, first: Any, second: Any, params: PoolingParams, method: str, instruction: str | None
    ) -> list[ScoringRequestOutput]:
        """How well texts match: one with all, or pair by pair."""
        pairs = pair_up(_texts(first), _texts(second))
        if method == "embedding" and instruction is None:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            check_count(len(texts))
            vectors = dict(zip(texts, self.embed(texts, params), strict=True))
            made = [(vectors[left], vectors[right]) for left, right in pairs]
            return [
                ScoringRequestOutput(
                    request_id=left.request_id,
                    prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                    outputs=ScoringOutput(score=cosine(left.embedding, right.embedding)),
                )
                for left, right in made
            ]
        if method != "likelihood":
            raise ParameterError(
                "method must be 'embedding', or 'likelihood', which alone reads an instruction.", param="method"
            )
        if params.truncate_prompt_tokens is not None:
            raise ParameterError("truncate_prompt_tokens needs method='embedding'.", param="truncate_prompt_tokens")
        asked = self._likelihoods([relevance_question(a, b, instruction) for a, b in pairs], ANSWERS)
        return [
            ScoringRequestOutput(request_id=name, prompt_token_ids=ids, outputs=ScoringOutput(score=found[0]))
            for name, ids, found in asked
        ]

    def classify(
        self, prompts: Any, labels: Sequence[str], instruction: str | None
    ) -> list[ClassificationRequestOutput]:
        """How likely each of these labels is, by the language model."""
        check_labels(labels)
        questions = [label_question(text, labels, instruction) for text in _texts(prompts)]
        return [
            ClassificationRequestOutput(
                request_id=name, prompt_token_ids=ids, outputs=ClassificationOutput(probs=found)
            )
            for name, ids, found in self._likelihoods(questions, labels)
        ]

    def _likelihoods(
        self, questions: Sequence[list[dict[str, Any]]], answers: Sequence[str]
    ) -> list[tuple[str, list[int], list[float]]]:
        """For each question: a request's name, the question's ids, and the share of each answer."""
        check_count(len(questions) * len(answers))
        tokenizer = self.reader.tokenizer
        if tokenizer is None:
            raise ParameterError("this engine has no tokenizer, so answers cannot be scored.", param="labels")
        ends = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        check_ends(ends)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        asked, requests = [], []
        for messages in questions:
            _, ids = self.reader.chat(messages, None, chat_template_kwargs={"enable_thinking": False})
            asked.append(ids)
            requests += [self.make(None, ids + end, params, scored_from=len(ids)) for end in ends]
        sums = []
        for place, done in enumerate(self.drive(requests, None)):
            rows = done.output().prompt_logprobs or []
            sums.append(answer_logprob(rows, done.request.prompt_ids, ends[place % len(ends)]))
        names = [request.id for request in requests[:: len(ends)]]
        return list(zip(names, asked, shares(sums, len(ends)), strict=True))


def pooling_params_of(given: PoolingParams | None, **more: Any) -> PoolingParams:
    """The checked parameters of a call; `more`: its own arguments, which come first."""
    params = given or PoolingParams()
    if not isinstance(params, PoolingParams):
        raise ParameterError("pooling_params must be one PoolingParams for all prompts.", param="pooling_params")
    params = msgspec.structs.replace(params, **{name: value for name, value in more.items() if value is not None})
    params.check()
    return params


def sampling_of(params: PoolingParams, context: int) -> SamplingParams:
    """What a request for a vector samples, and how its prompt is cut."""
    cut = context if params.truncate_prompt_tokens == LONGEST else params.truncate_prompt_tokens
    return SamplingParams(max_tokens=1, truncate_prompt_tokens=cut)


def as_tensor(found: EmbeddingRequestOutput) -> PoolingRequestOutput:
    """The same vector as `encode` gives it."""
    data = PoolingOutput(data=torch.tensor(found.embedding))
    return PoolingRequestOutput(request_id=found.request_id, prompt_token_ids=found.prompt_token_ids, outputs=data)


def _texts(given: Any) -> list[Any]:
    """The texts, given alone or in dicts, one or several."""
    many = [given] if isinstance(given, (str, dict)) else list(given) if isinstance(given, (list, tuple)) else []
    found = [each.get("prompt", each.get("text")) if isinstance(each, dict) else each for each in many]
    if not found or not all(isinstance(text, str) and text for text in found):
        raise ParameterError("scores and labels are of texts: give a text, or a list of texts.", param="prompts")
    return found
