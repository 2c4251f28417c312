"""POST /v1/completions. Owns: all forms of prompts (text, ids, batches), echo, and answers in completion shape.

Must not know: engines, sockets.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import CompletionOutput, RequestOutput, TextDelta
from tokenmill.server.context import Context
from tokenmill.server.openai.logprobs import CompletionColumns, Row, TokenNames, prompt_rows
from tokenmill.server.openai.sampling import all_of_them, sampling_params, truncate, within
from tokenmill.server.openai.schemas import CompletionRequest
from tokenmill.server.openai.stream_pace import StreamPace
from tokenmill.server.openai.structure import blaming_structure
from tokenmill.server.request_job import ENTRY, TOKEN, Batch, Gathered, Job, PromptTask
from tokenmill.server.sse import DONE, PlainChunks, event
from tokenmill.text.stream_decoder import StreamDecoder

_SLOT = "\u0000"


@dataclass(slots=True)
class Completion:
    """A completion request that has been read and sent to the engine."""

    context: Context
    body: CompletionRequest
    job: Job
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def columns(self, task: PromptTask) -> CompletionColumns:
        """Empty logprob columns for one choice."""
        tokenizer, body = self.context.backend.info.tokenizer, self.body
        prompt, skip = task.request.prompt_ids, body.skip_special_tokens
        decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt, skip)
        return CompletionColumns(
            TokenNames(tokenizer, bool(body.return_tokens_as_token_ids)), body.logprobs or 0, decoder
        )

    def echo_text(self, task: PromptTask) -> str:
        """The prompt as text."""
        return task.request.prompt or ""

    def place(self, task: PromptTask, index: int) -> int:
        """The choice's index among all prompts' choices."""
        return task.index * task.request.params.n + index

    @property
    def only_echo(self) -> bool:
        """Does the client want only the prompt (max_tokens = 0)?"""
        return self.body.max_tokens == 0


Read = list[tuple[str | None, list[int]]]


async def open_completion(
    context: Context, body: CompletionRequest, job: Job, base: str, reader: Callable[[], Awaitable[Read]] | None = None
) -> Completion:
    """Tokenise, check and send all prompts. Errors are raised before the answer begins. `reader` makes the prompts in
    another way."""
    model = context.check_model(body.model)
    prompts = _prompts(body.prompt)
    if body.max_tokens == 0 and not body.echo:
        raise ParameterError("max_tokens must be at least 1 (0 needs echo).", param="max_tokens")
    if body.suffix and not body.ignore_eos:
        body.stop_token_ids = [*(body.stop_token_ids or ()), *context.text.fill_ends()]
    all_of_them(body, ("logprobs", "prompt_logprobs"), context.backend.info.vocab_size)
    params = sampling_params(
        body,
        context.backend.info.generation,
        context.limits,
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        detokenize=context.backend.info.tokenizer is not None,
    )
    job.grow(len(prompts) * params.num_sequences, "prompt" if params.num_sequences == 1 else params.multiplying)
    if reader is not None:
        read = await reader()
    else:
        read = await (_fill_all if body.suffix else _read_all)(context, body, prompts)
    if "max_tokens" not in body.model_fields_set:
        params = within(params, context.backend.info.max_model_len - max(len(ids) for _, ids in read))
    job.copies, job.silent = params.n, job.silent or body.max_tokens == 0
    each = sum(len(text or "") if body.echo else 0 for text, _ in read)
    each += sum(TOKEN * len(ids) if body.return_token_ids else 0 for _, ids in read)
    job.check_repeated(each, params.n)
    with blaming_structure(body):
        await job.start(f"cmpl-{base}", read, params, priority=body.priority, salt=body.cache_salt or "")
    return Completion(context, body, job, f"cmpl-{base}", model)


async def _read_all(context: Context, body: CompletionRequest, prompts: list[Any]) -> Read:
    """(text, ids) of each prompt, truncated as the request asks."""
    read = []
    for prompt in prompts:
        cut = body.truncate_prompt_tokens is not None
        text, ids = await context.text.read(prompt, add_special_tokens=body.add_special_tokens, any_length=cut)
        kept = truncate(ids, body, context.backend.info.max_model_len, body.max_tokens)
        kept_text = text if len(kept) == len(ids) else None
        if kept_text is None and body.echo:
            kept_text = await context.text.run_in_thread(partial(context.text.decode, kept))
        read.append((kept_text, kept))
    return read


async def _fill_all(context: Context, body: CompletionRequest, prompts: list[Any]) -> Read:
    """The same for prompts that fill the gap between each prompt and the suffix."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ParameterError("suffix needs prompts of text.", param="suffix")
    if body.truncate_prompt_tokens is not None:
        raise ParameterError("truncate_prompt_tokens cannot be combined with suffix.", param="truncate_prompt_tokens")
    return [await context.text.fill((prompt, body.suffix or ""), framed=body.add_special_tokens) for prompt in prompts]


def _prompts(given: Any) -> list[Any]:
    """The list of prompts. A list of integers is one prompt."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


# ---------------------------------------------------------------- whole


def whole_answer(completion: Completion, gathered: Gathered) -> dict[str, Any]:
    """The `text_completion` object with the choices of all prompts."""
    choices = []
    for task, accumulator in gathered:
        result = accumulator.output()
        choices += [_choice(completion, task, result, out) for out in result.outputs]
    answer: dict[str, Any] = {
        "id": completion.id,
        "object": "text_completion",
        "created": completion.created,
        "model": completion.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": completion.context.fingerprint,
        "usage": completion.job.usage(),
    }
    if completion.context.options.enable_per_request_metrics:
        answer["metrics"] = completion.job.timings()
    return answer


def _choice(completion: Completion, task: PromptTask, result: RequestOutput, out: CompletionOutput) -> dict[str, Any]:
    body = completion.body
    text, ids, rows = out.text, out.token_ids, list(out.logprobs or [])
    if completion.only_echo:
        text, ids, rows = "", [], []
    found = None
    if body.logprobs is not None:
        columns, found = completion.columns(task), {}
        if body.echo and result.prompt_logprobs is not None:
            text_before = completion.echo_text(task)
            found = columns.take_prompt(result.prompt_logprobs, result.prompt_token_ids, text_before)
        found = {name: found.get(name, []) + column for name, column in columns.take(rows, ids).items()}
    choice: dict[str, Any] = {
        "index": completion.place(task, out.index),
        "text": (completion.echo_text(task) if body.echo else "") + text,
        "logprobs": found,
        "finish_reason": "length" if completion.only_echo else out.finish_reason,
        "stop_reason": out.stop_reason,
        "prompt_logprobs": prompt_rows(result.prompt_logprobs) if body.prompt_logprobs is not None else None,
        "token_ids": ids if body.return_token_ids else None,
        "prompt_token_ids": task.request.prompt_ids if body.return_token_ids else None,
    }
    return choice


# ---------------------------------------------------------------- streamed


class CompletionStream:
    """Chunks of all choices."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion
        body = completion.body
        self.pace = StreamPace(body, usage_forced=completion.context.options.enable_force_include_usage)
        self.plain: dict[int, PlainChunks] = {}
        self.started: set[int] = set()
        self.columns: dict[int, CompletionColumns] = {}
        self.prompt_rows: dict[int, list[Row | None]] = {}
        rich = body.logprobs is not None or body.return_token_ids or self.pace.usage_always or body.stream_interval
        self.simple = not rich and not completion.only_echo

    async def chunks(self) -> AsyncIterator[bytes]:
        """All events."""
        async for batch in self.completion.job.batches():
            told = partial(self._told, batch)
            data = await self.completion.context.bodies.run_in_thread(self._weight(batch), told)
            if data:
                yield data
        if self.pace.usage_at_end:
            last = {**self._chunk(0, ""), "choices": [], "usage": self.completion.job.usage()}
            if self.completion.context.options.enable_per_request_metrics:
                last["metrics"] = self.completion.job.timings()
            yield event(last)
        yield DONE

    def _weight(self, batch: Batch) -> int:
        """The bytes of prompt scores in this batch: every choice begins with the scores of its prompt."""
        body = self.completion.body
        if not body.echo or body.logprobs is None:
            return 0
        read = sum(delta.prompt_logprobs.count for _, delta in batch if delta.prompt_logprobs is not None)
        first = {self.completion.place(task, delta.index): task for task, delta in batch}
        tokens = sum(len(task.request.prompt_ids) for place, task in first.items() if place not in self.started)
        return ENTRY * (read + (body.logprobs + 1) * tokens)

    def _told(self, batch: Batch) -> bytes:
        return b"".join([self._events(task, delta) for task, delta in batch])

    def _events(self, task: PromptTask, delta: TextDelta) -> bytes:
        index = self.completion.place(task, delta.index)
        if delta.prompt_logprobs is not None:  # they come before the first token, and only with output 0
            self.prompt_rows.setdefault(task.index, [None]).extend(delta.prompt_logprobs)
            if not delta.token_ids and delta.finish_reason is None:
                return b""
        head = b"" if index in self.started else self._first(task, index)
        if self.simple and delta.finish_reason is None:
            if not delta.text:
                return head
            plain = self.plain.get(index)
            if plain is None:
                plain = self.plain[index] = PlainChunks(self._chunk(index, _SLOT))
            return head + plain.chunk(delta.text)
        return head + self._full(task, index, delta)

    def _first(self, task: PromptTask, index: int) -> bytes:
        self.started.add(index)
        body = self.completion.body
        if not body.echo and not body.return_token_ids:
            return b""
        text = self.completion.echo_text(task) if body.echo else ""
        chunk = self._chunk(index, text)
        if body.return_token_ids:
            chunk["choices"][0]["prompt_token_ids"] = task.request.prompt_ids
        if body.echo and body.logprobs is not None:
            ids = task.request.prompt_ids
            rows = self.prompt_rows.get(task.index, [None])
            chunk["choices"][0]["logprobs"] = self._columns(task, index).take_prompt(rows, ids, text)
        return event(self._with_usage(chunk))

    def _columns(self, task: PromptTask, index: int) -> CompletionColumns:
        columns = self.columns.get(index)
        if columns is None:
            columns = self.columns[index] = self.completion.columns(task)
        return columns

    def _full(self, task: PromptTask, index: int, delta: TextDelta) -> bytes:
        body = self.completion.body
        held = self.pace.due(index, delta)
        if not held:
            return b""
        empty = self.completion.only_echo
        ids = [] if empty else [t for d in held for t in d.token_ids]
        chunk = self._chunk(index, "" if empty else "".join(d.text for d in held))
        choice = chunk["choices"][0]
        if body.logprobs is not None:
            rows = [] if empty else [row for d in held for row in d.logprobs or ()]
            choice["logprobs"] = self._columns(task, index).take(rows, ids)
        if body.return_token_ids:
            choice["token_ids"] = ids
        if delta.finish_reason is not None:
            choice["finish_reason"] = "length" if empty else delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return event(self._with_usage(chunk))

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self.pace.usage_always:
            chunk["usage"] = self.completion.job.usage(self.pace.said)
        return chunk

    def _chunk(self, index: int, text: str) -> dict[str, Any]:
        return {
            "id": self.completion.id,
            "object": "text_completion",
            "created": self.completion.created,
            "model": self.completion.model,
            "system_fingerprint": self.completion.context.fingerprint,
            "choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": None}],
        }
