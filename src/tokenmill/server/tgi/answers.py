"""TGI's answers. Owns: tokens with their probabilities, details, and why a text ended.

Must not know: engines, sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from tokenmill.core.request import CompletionOutput, TextDelta, TokenLogprob
from tokenmill.server.errors import HttpError
from tokenmill.server.openai.completions import Completion
from tokenmill.server.request_job import Gathered, PromptTask
from tokenmill.text.codec import Tokenizer
from tokenmill.text.stream_decoder import StreamDecoder

encode = msgspec.json.Encoder().encode
KINDS = {400: "validation", 422: "validation", 429: "overloaded", 503: "overloaded"}


def error_body(found: HttpError) -> bytes:
    """{"error": ..., "error_type": ...}"""
    return encode({"error": found.message, "error_type": KINDS.get(found.status, "generation")})


def whole(completion: Completion, gathered: Gathered, parameters: Any, prompt: str) -> dict[str, Any]:
    """The text, with `details` its tokens. With best_of, the likeliest candidate comes first."""
    ((task, accumulator),) = gathered
    result = accumulator.output()
    outputs = sorted(result.outputs, key=lambda out: -_mean(out))
    head = prompt if parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": head + outputs[0].text}
    if parameters.details or parameters.decoder_input_details:
        tokens = Tokens(completion, parameters.top_n_tokens or 0)
        details = _details(tokens, task, outputs[0])
        details["prefill"] = tokens.prompt(task, result.prompt_logprobs) if parameters.decoder_input_details else []
        if len(outputs) > 1:
            details["best_of_sequences"] = [
                {"generated_text": head + out.text, **_details(tokens, task, out), "prefill": []} for out in outputs[1:]
            ]
        answer["details"] = details
    return answer


async def events(completion: Completion, parameters: Any, prompt: str) -> AsyncIterator[bytes]:
    """One event per token. The last one has the whole text and the figures."""
    tokens = Tokens(completion, parameters.top_n_tokens or 0)
    text, count = prompt if parameters.return_full_text else "", 0
    texts: Texts | None = None
    async for batch in completion.job.batches():
        for task, delta in batch:
            text += delta.text
            rows = delta.logprobs or []
            texts = texts or tokens.texts(task)
            last = len(rows) - 1
            for place, (row, token) in enumerate(zip(rows, delta.token_ids, strict=True)):
                count += 1
                said = texts.next(token, ends=delta.finish_reason is not None and place == last)
                event = {"index": count, **tokens.one(row, token, said), "generated_text": None, "details": None}
                if delta.finish_reason is not None and place == last:
                    event |= _ending(text, delta, task, count)
                yield b"data:" + encode(event) + b"\n\n"
            if delta.finish_reason is not None and not rows:
                empty = {"id": 0, "text": "", "logprob": 0.0, "special": True}
                event = {"index": count, "token": empty, "top_tokens": [], **_ending(text, delta, task, count)}
                yield b"data:" + encode(event) + b"\n\n"


class Texts:
    """The text of each token in turn. Clients join the texts, so a character comes with its last token."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> None:
        self.decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt_ids, skip_special_tokens=False)

    def next(self, token: int, *, ends: bool) -> str:
        """The text that is certain after this token. `ends`: there is no further token."""
        if self.decoder is None:
            return ""
        return self.decoder.push([token]) + (self.decoder.flush() if ends else "")


class Tokens:
    """Writes tokens as TGI does."""

    def __init__(self, completion: Completion, top: int) -> None:
        self.tokenizer: Tokenizer | None = completion.context.backend.info.tokenizer
        self.top = top

    def texts(self, task: PromptTask) -> Texts:
        """The text of each token of an output, beginning with its first token."""
        return Texts(self.tokenizer, task.request.prompt_ids)

    def one(self, row: dict[int, TokenLogprob], token: int, said: str) -> dict[str, Any]:
        """A token with its text, and the likeliest alternatives."""
        likely = sorted((entry.rank, other) for other, entry in row.items() if entry.rank <= self.top)
        return {
            "token": {**self._named(token, row[token]), "text": said},
            "top_tokens": [self._named(t, row[t]) for _, t in likely],
        }

    def all(self, task: PromptTask, rows: Sequence[dict[int, TokenLogprob]], ids: Sequence[int]) -> dict[str, Any]:
        """The tokens of one output."""
        texts, last = self.texts(task), len(ids) - 1
        pieces = [texts.next(token, ends=place == last) for place, token in enumerate(ids)]
        found = [self.one(*each) for each in zip(rows, ids, pieces, strict=False)]
        tokens: dict[str, Any] = {"tokens": [each["token"] for each in found]}
        return tokens | ({"top_tokens": [each["top_tokens"] for each in found]} if self.top else {})

    def prompt(self, task: PromptTask, rows: Sequence[dict[int, TokenLogprob] | None] | None) -> list[dict[str, Any]]:
        """The prompt's tokens. The first one has no probability."""
        found = []
        for token, row in zip(task.request.prompt_ids, rows or (), strict=False):
            text = self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer is not None else ""
            found.append({"id": token, "text": text, "logprob": None if row is None else row[token].logprob})
        return found

    def _named(self, token: int, entry: TokenLogprob) -> dict[str, Any]:
        special = self.tokenizer is not None and token in self.tokenizer.special_ids
        return {"id": token, "text": entry.decoded_token or "", "logprob": entry.logprob, "special": special}


def reason(finish: str | None, stop: Any) -> str:
    """Why the output ended."""
    if finish == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


def _details(tokens: Tokens, task: PromptTask, out: CompletionOutput) -> dict[str, Any]:
    return {
        "finish_reason": reason(out.finish_reason, out.stop_reason),
        "generated_tokens": len(out.token_ids),
        "seed": _seed(task),
        **tokens.all(task, out.logprobs or [], out.token_ids),
    }


def _ending(text: str, delta: TextDelta, task: PromptTask, count: int) -> dict[str, Any]:
    details = {
        "finish_reason": reason(delta.finish_reason, delta.stop_reason),
        "generated_tokens": count,
        "seed": _seed(task),
        "input_length": len(task.request.prompt_ids),
    }
    return {"generated_text": text, "details": details}


def _seed(task: PromptTask) -> int | None:
    """What gives the same text again. None: nothing was sampled."""
    return task.request.seed if task.request.params.temperature else None


def _mean(out: CompletionOutput) -> float:
    rows = out.logprobs or []
    found = [row[token].logprob for row, token in zip(rows, out.token_ids, strict=False)]
    return sum(found) / len(found) if found else 0.0
