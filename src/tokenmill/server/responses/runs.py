"""One response from its request to its end. Owns: what it continues, what is kept of it, and its events, whether a
waiting client, a stream, a socket or nobody listens.

Must not know: paths, how answers are made.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.server.context import Context
from tokenmill.server.errors import describe_error, renaming_fields
from tokenmill.server.request_job import Job
from tokenmill.server.responses.answers import Events, GrowingResponse
from tokenmill.server.responses.conversation import Conversation, encoded_items
from tokenmill.server.responses.kept_responses import KeptResponse, RecentResponse
from tokenmill.server.responses.schemas import NAMES, ResponsesRequest, Talk, TalkRequest, joined, read_talk
from tokenmill.server.store import Store
from tokenmill.server.translated_chat import listen, open_translated

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Earlier:
    """The conversation that a request continues: messages of a response, or items of a conversation, both encoded."""

    messages: bytes = b"[]"
    items: bytes = b"[]"
    conversation: Conversation | None = None

    @property
    def size(self) -> int:
        """The bytes that are read again."""
        return len(self.messages) + len(self.items)


@dataclass(slots=True)
class Run:
    """A response that has been sent to the engine."""

    store: Store
    job: Job
    growing: GrowingResponse
    kept: KeptResponse
    conversation: Conversation | None = None
    silent: bool = False
    """Only read the input, and generate nothing."""


def find_earlier(store: Store, body: TalkRequest, owner: str, recent: RecentResponse | None = None) -> Earlier:
    """The conversation that the request continues. Raises 404 if it is not there, and refuses a response whose answer
    has not ended: the next one would silently begin without it. `recent`: a response that is not
    stored, but still known."""
    if body.previous_response_id:
        if recent is not None and recent.name == body.previous_response_id and store.holds(recent):
            return Earlier(recent.messages)
        with renaming_fields({KeptResponse.param: "previous_response_id"}):
            kept = store.find(KeptResponse, body.previous_response_id, owner)
        if kept.busy:
            raise ParameterError(
                "The earlier response is still being generated; continue it when it has ended.",
                param="previous_response_id",
            )
        return Earlier(kept.messages)
    if body.conversation_id:
        with renaming_fields({Conversation.param: "conversation"}):
            conversation = store.find(Conversation, body.conversation_id, owner)
        return Earlier(items=conversation.encoded(), conversation=conversation)
    return Earlier()


async def open_run(
    context: Context,
    job: Job,
    body: ResponsesRequest,
    base: str,
    recent: RecentResponse | None = None,
    *,
    silent: bool = False,
) -> Run:
    """Read, check, store and send. Errors are raised before the answer begins. `silent`: only the input is read."""
    body.check()
    job.silent = silent
    store, owner, name = context.store, job.tenant, f"resp_{uuid.uuid4().hex}"
    job.called = name
    earlier = find_earlier(store, body, owner, recent)
    job.size += earlier.size
    talk = await _read(context, job, body, earlier)
    if earlier.conversation is not None:
        earlier.conversation.check_count(len(body.items()))
        store.check(earlier.conversation, len(talk.items))
    least = {"max_completion_tokens": 1} if silent else {}
    chat = await open_translated(context, lambda: body.fields(talk.messages) | least, job, base, names=NAMES)
    chat.kind = "responses"
    growing = GrowingResponse(chat, body, name)
    kept = KeptResponse(owner, name, bool(body.background), talk.items, talk.encoded, partial(encode, growing.response))
    if body.store is not False:
        store.add(kept)
    if earlier.conversation is not None:
        earlier.conversation.writers += 1
    return Run(store, job, growing, kept, earlier.conversation, silent)


async def _read(context: Context, job: Job, body: TalkRequest, earlier: Earlier) -> Talk:
    return await context.bodies.run_in_thread(job.size, lambda: read_talk(body, earlier.messages, earlier.items))


async def run_to_end(run: Run) -> None:
    """Run to the end, and store every event."""
    async for _ in events(run):
        pass


async def events(run: Run) -> AsyncIterator[list[bytes]]:
    """The run's events, step by step. However the run ends, the stored response ends with it, and before its last event
    is sent: whoever reads that may continue it at once."""
    growing, kept = run.growing, run.kept
    try:
        yield _tell(run, growing.begin())
        async for heard in listen(growing.chat):
            take = growing.pass_over if run.silent else growing.take
            last = heard.finish_reason is not None  # the reasoning is counted with the last delta
            size = len(growing.said.reasoning) if last else 0
            told = _tell(run, await growing.chat.context.bodies.run_in_thread(size, partial(take, heard)))
            if last:
                end_run(run, joined(kept.messages, growing.message()) if not run.silent else kept.messages)
            yield told
    except Exception as error:
        told = _tell(run, growing.fail(describe_error(error)))
        end_run(run)
        yield told
    finally:
        _cancel(run)


def end_run(run: Run, messages: bytes | None = None) -> None:
    """End the run. `messages`: with a complete answer, which is added to the conversation; whoever continues a response
    that broke off goes on from what its output shows. It may be called twice."""
    kept, conversation = run.kept, run.conversation
    if kept.ended:
        return
    said = run.growing.message()
    broken_off = messages is None and any(value for name, value in said.items() if name != "role")
    kept.end(joined(kept.messages, said) if broken_off else messages)
    run.store.weigh(kept)
    if conversation is None:
        return
    conversation.writers -= 1
    if messages is not None and run.store.holds(conversation):
        items = msgspec.json.decode(kept.items) + run.growing.lasting
        conversation.add(encoded_items(items))
        run.store.weigh(conversation)


def clean_up(run: Run) -> None:
    """Clean up after a run, even one that never began."""
    run.job.close()
    _cancel(run)


def _cancel(run: Run) -> None:
    """End a run that has not ended by itself. Whoever follows it is told, even if it is stored no longer."""
    if not run.kept.ended:
        run.kept.tell([_event(event) for event in run.growing.cancel()])
        end_run(run)


def _tell(run: Run, found: Events) -> list[bytes]:
    """Encode new events once, for all readers."""
    encoded = [_event(event) for event in found]
    if run.store.holds(run.kept):
        run.kept.tell(encoded)
        run.store.weigh(run.kept)
    return encoded


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
