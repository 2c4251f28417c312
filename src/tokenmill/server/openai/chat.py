"""POST /v1/chat/completions. Owns: messages to a prompt, and answers in chat shape, whole or streamed.

Must not know: engines, sockets.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import TextDelta
from tokenmill.server.context import Context
from tokenmill.server.errors import describe_error, error_object
from tokenmill.server.job import Job
from tokenmill.server.openai.logprobs import TokenNames, chat_logprobs, prompt_rows
from tokenmill.server.openai.sampling import sampling_params, truncate
from tokenmill.server.openai.schemas import ChatRequest, Message
from tokenmill.server.openai.unbuilt import CHAT, refuse_unbuilt
from tokenmill.server.sse import DONE, PlainChunks, event

_SLOT = "\u0000"


@dataclass(slots=True)
class Chat:
    """A chat request that has been read and sent to the engine."""

    context: Context
    body: ChatRequest
    job: Job
    id: str
    model: str
    prompt: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def role(self) -> str:
        """Who answers: the assistant, or whoever's message is continued."""
        return self.body.messages[-1].role if self.body.continue_final_message else self.context.options.response_role

    @property
    def echoed(self) -> str:
        """With `echo`: the last message's text, when the answer goes on in the same role."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != self.role:
            return ""
        return last.content if isinstance(last.content, str) else ""

    @property
    def top(self) -> int:
        """Alternatives per token."""
        return self.body.top_logprobs or 0

    @property
    def names(self) -> TokenNames:
        """How tokens are written."""
        return TokenNames(self.context.backend.info.tokenizer, bool(self.body.return_tokens_as_token_ids))


async def open_chat(context: Context, body: ChatRequest, raw: dict[str, Any], job: Job, base: str) -> Chat:
    """Render, tokenise, check and send; raises before anything is answered."""
    refuse_unbuilt(raw, CHAT)
    model = context.check_model(body.model)
    _check(context, body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most is None:
        limit = context.backend.info.generation.get("max_new_tokens")
        most = limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None
    params = sampling_params(
        body,
        context.backend.info.generation,
        context.limits,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        detokenize=context.backend.info.tokenizer is not None,
    )
    if params.num_sequences > 1:
        job.grow(params.num_sequences - 1)
    text, ids = await context.text.chat(
        [template_message(m) for m in body.messages], **_template_options(context, body)
    )
    ids = truncate(ids, body, context.backend.info.max_model_len, most)
    await job.start(f"chatcmpl-{base}", [(text, ids)], params, priority=body.priority, salt=body.cache_salt or "")
    return Chat(context, body, job, f"chatcmpl-{base}", model, text)


def _check(context: Context, body: ChatRequest) -> None:
    if body.top_logprobs is not None and body.top_logprobs > 0 and not body.logprobs:
        raise ParameterError("top_logprobs needs logprobs = true.", param="top_logprobs")
    if body.tools and body.tool_choice != "none":
        raise ParameterError(
            "tools need a tool-call parser, which this version does not have; tool_choice 'none' only shows the "
            "tools to the model.",
            param="tools",
        )
    if body.tool_choice not in (None, "none") and not body.tools:
        if body.tool_choice != "auto":
            raise ParameterError("tool_choice needs tools.", param="tool_choice")
    if not body.include_reasoning:
        raise ParameterError(
            "include_reasoning = false needs a reasoning parser, which this version does not have.",
            param="include_reasoning",
        )
    if body.chat_template is not None and not context.options.trust_request_chat_template:
        raise ParameterError(
            "chat_template is not accepted from requests here (--trust-request-chat-template allows them).",
            param="chat_template",
        )
    if body.priority and not context.backend.info.priorities:
        raise ParameterError("priority needs a server started with --scheduling-policy priority.", param="priority")


def _template_options(context: Context, body: ChatRequest) -> dict[str, Any]:
    kwargs = {**(context.options.default_chat_template_kwargs or {}), **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return {
        "chat_template": body.chat_template or context.chat_template,
        "chat_template_kwargs": kwargs,
        "tools": [t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "add_special_tokens": body.add_special_tokens,
    }


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text parts in one spelling, reasoning under one name."""
    found = message.model_dump(exclude_none=True, exclude={"content", "reasoning_content"})
    if message.reasoning_content is not None:
        found.setdefault("reasoning", message.reasoning_content)
    if isinstance(message.content, list):
        found["content"] = [
            {"type": "text", "text": part if isinstance(part, str) else part.text or part.refusal or ""}
            for part in message.content
            if isinstance(part, str) or part.type != "thinking"
        ]
    elif message.content is not None or not message.tool_calls:
        found["content"] = message.content or ""
    return found


# ---------------------------------------------------------------- whole


async def whole_answer(chat: Chat) -> dict[str, Any]:
    """chat.completion."""
    (task, accumulator) = (await chat.job.gather())[0]
    result = accumulator.output()
    choices = []
    for out in result.outputs:
        choice: dict[str, Any] = {
            "index": out.index,
            "message": {"role": chat.role, "content": chat.echoed + out.text, "refusal": None},
            "logprobs": chat_logprobs(out.logprobs or [], chat.top, chat.names) if chat.body.logprobs else None,
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
        }
        if chat.body.return_token_ids:
            choice["token_ids"] = out.token_ids
        choices.append(choice)
    answer: dict[str, Any] = {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": chat.job.usage(),
        "prompt_logprobs": prompt_rows(result.prompt_logprobs),
    }
    if chat.body.return_token_ids:
        answer["prompt_token_ids"] = task.request.prompt_ids
    if chat.body.return_prompt_text:
        answer["prompt_text"] = chat.prompt
    if chat.context.options.enable_per_request_metrics:
        answer["metrics"] = chat.job.timings()
    return answer


# ---------------------------------------------------------------- streamed


class ChatStream:
    """Chunks of one chat; text-only chunks are three byte strings joined."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        body = chat.body
        options = body.stream_options
        self.usage_at_end = chat.context.options.enable_force_include_usage or bool(options and options.include_usage)
        self.usage_always = bool(options and options.include_usage and options.continuous_usage_stats)
        self.plain: dict[int, PlainChunks] = {}
        self.started: set[int] = set()
        self.held: dict[int, list[TextDelta]] = {}
        self.simple = not (body.logprobs or body.return_token_ids or self.usage_always or body.stream_interval)

    async def chunks(self) -> AsyncIterator[bytes]:
        """All events; an error after the start is an event too, and [DONE] always ends the stream."""
        try:
            async for batch in self.chat.job.batches():
                data = b"".join([self._events(delta) for _, delta in batch])
                if data:
                    yield data
            if self.usage_at_end:
                yield event(self._last())
        except Exception as error:
            found = describe_error(error)
            yield event(error_object(found.status, found.message, found.param))
        yield DONE

    def _events(self, delta: TextDelta) -> bytes:
        index = delta.index
        head = b"" if index in self.started else self._first(index)
        if self.simple and delta.finish_reason is None:
            if not delta.text:
                return head
            plain = self.plain.get(index)
            if plain is None:
                plain = self.plain[index] = PlainChunks(self._chunk(index, {"content": _SLOT}))
            return head + plain.chunk(delta.text)
        return head + self._full(delta)

    def _first(self, index: int) -> bytes:
        self.started.add(index)
        chunk = self._chunk(index, {"role": self.chat.role, "content": ""})
        task = next(iter(self.chat.job.tasks.values()))
        if self.chat.body.return_token_ids:
            chunk["prompt_token_ids"] = task.request.prompt_ids
        if self.chat.body.return_prompt_text:
            chunk["prompt_text"] = self.chat.prompt
        data = event(self._with_usage(chunk))
        if self.chat.echoed:
            data += event(self._with_usage(self._chunk(index, {"content": self.chat.echoed})))
        return data

    def _full(self, delta: TextDelta) -> bytes:
        body = self.chat.body
        held = self.held.setdefault(delta.index, [])
        held.append(delta)
        gathered = sum(len(d.token_ids) for d in held)
        if (
            delta.finish_reason is None
            and gathered < (body.stream_interval or 1)
            and not (gathered == 0 and delta.text)
        ):
            return b""
        self.held[delta.index] = []
        text = "".join(d.text for d in held)
        chunk = self._chunk(delta.index, {"content": text} if text or delta.finish_reason is None else {})
        choice = chunk["choices"][0]
        if body.logprobs:
            rows = [row for d in held for row in d.logprobs or ()]
            choice["logprobs"] = chat_logprobs(rows, self.chat.top, self.chat.names) if rows else None
        if body.return_token_ids:
            choice["token_ids"] = [t for d in held for t in d.token_ids]
        if delta.finish_reason is not None:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return event(self._with_usage(chunk))

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self.usage_always:
            chunk["usage"] = self.chat.job.usage()
        return chunk

    def _last(self) -> dict[str, Any]:
        chunk = {**self._chunk(0, {}), "choices": [], "usage": self.chat.job.usage()}
        if self.chat.context.options.enable_per_request_metrics:
            chunk["metrics"] = self.chat.job.timings()
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.chat.id,
            "object": "chat.completion.chunk",
            "created": self.chat.created,
            "model": self.chat.model,
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
        }
