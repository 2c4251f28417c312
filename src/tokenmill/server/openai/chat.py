"""POST /v1/chat/completions. Owns: making a prompt from messages, and whole answers in chat shape.

Must not know: engines, sockets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.server.assistant_turn import Turn, plan_turn
from tokenmill.server.context import Context
from tokenmill.server.errors import blaming
from tokenmill.server.openai.logprobs import TokenNames, chat_logprobs, prompt_rows
from tokenmill.server.openai.sampling import all_of_them, sampling_params, truncate, within
from tokenmill.server.openai.schemas import ChatRequest, Message
from tokenmill.server.openai.structure import blaming_structure
from tokenmill.server.openai.tools import call_objects, tool_wish
from tokenmill.server.opening_messages import with_opening
from tokenmill.server.request_job import TOKEN, Gathered, Job
from tokenmill.text.messages.message import Message as Said
from tokenmill.text.messages.span import text_of


@dataclass(slots=True)
class Chat:
    """A chat request that has been read and sent to the engine."""

    context: Context
    body: ChatRequest
    job: Job
    id: str
    model: str
    prompt: str
    turn: Turn
    created: int = field(default_factory=lambda: int(time.time()))
    kind: str = "chat_completions"
    """The API that the request came through, for metrics."""

    @property
    def role(self) -> str:
        """The answer's role: the assistant, or the role of the message that is continued."""
        return self.body.messages[-1].role if self.body.continue_final_message else self.context.options.response_role

    @property
    def echoed(self) -> str:
        """With `echo`: the last message's text, if the answer continues it."""
        last = self.body.messages[-1]
        if not self.body.echo or last.role != self.role:
            return ""
        return last.content if isinstance(last.content, str) else ""

    def usage(self, *reasoning: str) -> dict[str, Any]:
        """The usage object with the number of reasoning tokens. `reasoning`: the reasoning text of each output."""
        found = self.job.usage()
        tokenizer = self.context.backend.info.tokenizer
        if any(reasoning) and tokenizer is not None:
            count = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in reasoning)
            details = found.setdefault("completion_tokens_details", {})
            details["reasoning_tokens"] = min(count, found["completion_tokens"])
        return found

    def ended(self, reason: str | None, calls: int) -> str | None:
        """The finish reason to report for a complete output with this many calls."""
        if self.turn.tools is not None:
            self.context.metrics.read_calls(self.kind, found=calls > 0, streamed=bool(self.body.stream))
        return self.turn.finish_reason(reason, calls)

    @property
    def top(self) -> int:
        """How many alternatives the answer lists for each token."""
        return self.body.top_logprobs or 0

    @property
    def names(self) -> TokenNames:
        """Writes tokens in answers."""
        return TokenNames(self.context.backend.info.tokenizer, bool(self.body.return_tokens_as_token_ids))


Reader = Callable[[], Awaitable[tuple[str, list[int]]]]


async def open_chat(context: Context, body: ChatRequest, job: Job, base: str, read: Reader | None = None) -> Chat:
    """Render, tokenise, check and send a chat. Errors are raised before the answer begins. `read` makes the prompt
    without the template."""
    model = context.check_model(body.model)
    _check(context, body)
    if body.max_tokens not in (None, body.max_completion_tokens) and body.max_completion_tokens is not None:
        raise ParameterError("Give max_completion_tokens or max_tokens, not both.", param="max_tokens")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    most = _usual_length(context) if asked is None else asked
    all_of_them(body, ("top_logprobs", "prompt_logprobs"), context.backend.info.vocab_size)
    wish = tool_wish(body)
    params = sampling_params(
        body,
        context.backend.info.generation,
        context.limits,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        detokenize=context.backend.info.tokenizer is not None,
    )
    job.grow(params.num_sequences, params.multiplying)
    with blaming("messages"):
        text, ids = await (render(context, body, job.size) if read is None else read())
    planned = partial(
        plan_turn,
        context.form,
        wish,
        params,
        text,
        tokenizer=context.backend.info.tokenizer,
        template=_template(context, body),
        separate=body.separate_reasoning,
        continued=text_of(template_message(body.messages[-1])) if body.continue_final_message else "",
    )
    turn, params = await context.bodies.run_in_thread(job.size, planned)
    room = context.backend.info.max_model_len
    # What is cut where nobody says how long the answer may be leaves room for one.
    ids = truncate(ids, body, room, most if asked is not None else min(most or room // 4, room // 2))
    if asked is None:
        params = within(params, room - len(ids))
    chat = Chat(context, body, job, f"chatcmpl-{base}", model, text, turn)
    each = len(chat.echoed)
    if body.stream:
        each += (len(text) if body.return_prompt_text else 0) + (TOKEN * len(ids) if body.return_token_ids else 0)
    job.check_repeated(each, params.n)
    with blaming("messages"), blaming_structure(body):
        await job.start(f"chatcmpl-{base}", [(text, ids)], params, priority=body.priority, salt=body.cache_salt or "")
    return chat


def _usual_length(context: Context) -> int | None:
    """The length of an answer in the model's own generation settings."""
    limit = context.backend.info.generation.get("max_new_tokens")
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


async def render(context: Context, body: ChatRequest, size: int, *, counted: bool = False) -> tuple[str, list[int]]:
    """A conversation's prompt as text and ids. `size`: bytes of the request's body. `counted`: the ids are only
    counted, and the model does not compute them."""
    return await context.text.chat(
        lambda: (
            with_opening(context.config.messages.opening, [template_message(m) for m in body.messages]),
            _template_options(context, body),
        ),
        size=size,
        add_special_tokens=body.add_special_tokens,
        any_length=counted or body.truncate_prompt_tokens is not None,
    )


def _check(context: Context, body: ChatRequest) -> None:
    if body.top_logprobs is not None and body.top_logprobs != 0 and not body.logprobs:
        raise ParameterError("top_logprobs needs logprobs = true.", param="top_logprobs")
    if body.chat_template is not None and not context.options.trust_request_chat_template:
        raise ParameterError(
            "chat_template is not accepted from requests here (--trust-request-chat-template allows them).",
            param="chat_template",
        )


def _template(context: Context, body: ChatRequest) -> Any:
    tokenizer = context.backend.info.tokenizer
    return body.chat_template or context.chat_template or (tokenizer.chat_template if tokenizer is not None else None)


def _template_options(context: Context, body: ChatRequest) -> dict[str, Any]:
    kwargs = {**(context.options.default_chat_template_kwargs or {}), **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:  # templates use different names for this
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        for switch in ("enable_thinking", "thinking"):
            kwargs.setdefault(switch, body.reasoning_effort != "none")
    return {
        "chat_template": body.chat_template or context.chat_template,
        "chat_template_kwargs": kwargs,
        "tools": [t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None,
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }


def template_message(message: Message) -> dict[str, Any]:
    """A message in the form that templates expect: text parts in one form, and one name for reasoning."""
    found = message.model_dump(exclude_none=True, exclude={"content", "reasoning_content"})
    if message.reasoning_content is not None:
        found.setdefault("reasoning", message.reasoning_content)
    if isinstance(message.content, list):
        thoughts = "".join(p.thinking or "" for p in message.content if not isinstance(p, str) and p.type == "thinking")
        if thoughts:
            found["reasoning"] = found.get("reasoning", "") + thoughts
        found["content"] = [
            {"type": "text", "text": part if isinstance(part, str) else part.text or part.refusal or ""}
            for part in message.content
            if isinstance(part, str) or part.type != "thinking"
        ]
    elif message.content is not None or found.get("reasoning"):
        found["content"] = message.content or ""
    return found


# ---------------------------------------------------------------- whole


def whole_answer(chat: Chat, gathered: Gathered) -> dict[str, Any]:
    """The `chat.completion` object."""
    task, accumulator = gathered[0]
    result = accumulator.output()
    choices = []
    reasoning = []
    for out in result.outputs:
        message = chat.turn.read(out.text)
        reasoning.append(message.reasoning)
        choice: dict[str, Any] = {
            "index": out.index,
            "message": _message(chat, message),
            "logprobs": chat_logprobs(out.logprobs or [], chat.top, chat.names) if chat.body.logprobs else None,
            "finish_reason": chat.ended(out.finish_reason, len(message.calls)),
            "stop_reason": out.stop_reason,
            "token_ids": out.token_ids if chat.body.return_token_ids else None,
        }
        choices.append(choice)
    answer: dict[str, Any] = {
        "id": chat.id,
        "object": "chat.completion",
        "created": chat.created,
        "model": chat.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": chat.context.fingerprint,
        "usage": chat.usage(*reasoning),
        "prompt_logprobs": prompt_rows(result.prompt_logprobs),
        "prompt_token_ids": task.request.prompt_ids if chat.body.return_token_ids else None,
    }
    if chat.body.return_prompt_text:
        answer["prompt_text"] = chat.prompt
    if chat.context.options.enable_per_request_metrics:
        answer["metrics"] = chat.job.timings()
    return answer


def _message(chat: Chat, said: Said) -> dict[str, Any]:
    """An assistant's message; content is null if there are only calls."""
    content = chat.echoed + said.content
    message: dict[str, Any] = {"role": chat.role, "content": content or (None if said.calls else ""), "refusal": None}
    if said.calls:
        message["tool_calls"] = call_objects(chat.turn, said)
    if said.reasoning and chat.body.include_reasoning:
        message["reasoning"] = message["reasoning_content"] = said.reasoning
    return message
