"""Answers for APIs other than OpenAI's. Owns: turning a chat's deltas into one output's events and its end.

Every API with messages translates its requests into OpenAI's request model, from which the chat is opened. What comes
back is read here, once for all of them. Must not know: any API's shapes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.request import TokenLogprob
from tokenmill.server.assistant_turn import check_wish
from tokenmill.server.bodies import translated
from tokenmill.server.context import Context
from tokenmill.server.errors import renaming_fields
from tokenmill.server.findings import Names
from tokenmill.server.openai.chat import Chat, Reader, open_chat, render
from tokenmill.server.openai.schemas import ChatRequest
from tokenmill.server.openai.tools import tool_wish
from tokenmill.server.request_job import Job
from tokenmill.text.messages.message import Event, Message
from tokenmill.text.messages.span import control_marks


@dataclass(slots=True)
class StepOutput:
    """What one engine step added: events of the message, tokens, and the finish reason if it ended."""

    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


Fields = Callable[[], dict[str, Any]]


async def open_translated(
    context: Context, fields: Fields, job: Job, base: str, read: Reader | None = None, *, names: Names
) -> Chat:
    """A chat for the fields of OpenAI's request that `fields` makes; None counts as absent. `read`: makes the prompt
    without the template. `names`: the API's names of fields that may be wrong."""
    with renaming_fields(names):
        body = await context.bodies.run_in_thread(job.size, lambda: translated(ChatRequest, fields()))
        chat = await open_chat(context, body, job, base, read)
    chat.kind = "other"
    return chat


async def count_translated(context: Context, fields: Fields, size: int, *, names: Names) -> int:
    """The number of tokens in such a chat's prompt. `size`: of the body in which it came."""
    with renaming_fields(names):
        body = await context.bodies.run_in_thread(size, lambda: translated(ChatRequest, fields()))
        context.check_model(body.model)
        check_wish(tool_wish(body), control_marks(context.backend.info.tokenizer))  # as an answer would be refused
        return len((await render(context, body, size, counted=True))[1])


async def listen(chat: Chat) -> AsyncIterator[StepOutput]:
    """The only output of a chat, step by step. The last step has a finish_reason. Steps that have piled up are given as
    one, unless this would hide which log-probabilities belong to which text."""
    parser = None if chat.turn.plain else chat.turn.parser()
    async for batch in chat.job.batches():
        deltas = [delta for _, delta in batch]
        for together in [[delta] for delta in deltas] if chat.body.logprobs else [deltas]:
            heard = StepOutput()
            for delta in together:
                ended = delta.finish_reason is not None
                if parser is None:
                    heard.events += [Event("content", delta.text)] if delta.text else []
                else:
                    heard.events += parser.feed(delta.text) + (parser.finish() if ended else [])
                heard.token_ids += delta.token_ids
                heard.logprobs += delta.logprobs or ()
                if ended:
                    heard.finish_reason = chat.ended(delta.finish_reason, parser.count if parser else 0)
                    heard.stop_reason = delta.stop_reason
            yield heard


async def hear_all(chat: Chat) -> tuple[Message, StepOutput]:
    """The whole message in one."""
    message, whole = Message(), StepOutput()
    async for heard in listen(chat):
        message.add(heard.events)
        whole.events += heard.events
        whole.token_ids += heard.token_ids
        whole.logprobs += heard.logprobs
        whole.finish_reason, whole.stop_reason = heard.finish_reason, heard.stop_reason
    return message, whole
