"""Every answer and every event of the APIs of OpenAI and Anthropic, against their clients' own types, strictly.

A value must have its exact type, and a field that a type has must be there, null where that is allowed: OMITTED lists
the few that are left out.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic.types as claude
import openai.types as openai
import openai.types.responses as responses
import pytest
from anthropic.pagination import SyncPage
from anthropic.types.shared import ErrorResponse
from openai.pagination import SyncCursorPage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionDeleted
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from openai.types.responses.response_item_list import ResponseItemList

from tests.pure.server.conftest import Served, Starter
from tests.pure.server.server_strict_types_helpers import strictly, typed
from tokenmill.testing.fake_generator import FakeOptions

CALL = '<think>It asks.</think>Well.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "look", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
VERSION = {"anthropic-version": "2023-06-01"}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def asked(served: Served, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> Any:
    answer = await served.client.request(method, path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"] == "application/json" else events(answer.text)


@pytest.fixture
async def served(start: Starter) -> Served:
    return await start(FakeOptions(script=CALL), **PARSERS)


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all that is echoed": {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in-memory",
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "max_output_tokens": 900,
    },
    "tools": {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
    "allowed tools": {
        "tools": [{**TOOL, "strict": False, "description": "Look."}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    },
    "probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "cut short": {"max_output_tokens": 20},
    "not kept": {"store": False},
    "a conversation": {"conversation": "conv_x"},
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_responses_are_what_the_client_s_types_say(served: Served, name: str) -> None:
    body = {"input": "Hi", "tools": [TOOL], **RESPONSES[name]}
    whole = strictly(responses.Response, await asked(served, "POST", "/v1/responses", body))
    assert whole.usage.input_tokens_details.cache_write_tokens == 0 and whole.output
    told = await asked(served, "POST", "/v1/responses", {**body, "stream": True})
    found = [strictly(responses.ResponseStreamEvent, event) for event in told]
    assert type(found[0]).__name__ == "ResponseCreatedEvent" and len(found) > 5
    last = found[-1].response
    assert (last.status == "completed") == (last.completed_at is not None)


async def test_what_is_asked_about_responses_later(served: Served) -> None:
    asked_items = [
        *HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "blue"}]},
        {"role": "assistant", "content": "Blue."},
        {"type": "compaction", "encrypted_content": "short"},
    ]
    made = await asked(served, "POST", "/v1/responses", {"input": asked_items, "background": True})
    strictly(responses.Response, made)
    one = f"/v1/responses/{made['id']}"
    for event in await asked(served, "GET", f"{one}?stream=true"):
        strictly(responses.ResponseStreamEvent, event)
    strictly(responses.Response, await asked(served, "GET", one))
    strictly(responses.Response, await asked(served, "POST", f"{one}/cancel"))
    strictly(ResponseItemList, await asked(served, "GET", f"{one}/input_items"))
    path = "/v1/responses/input_tokens"
    counted = await asked(served, "POST", path, {"input": "Hi", "tools": [TOOL]})
    strictly(responses.InputTokenCountResponse, counted)
    short = strictly(
        responses.CompactedResponse, await asked(served, "POST", "/v1/responses/compact", {"input": asked_items})
    )
    assert short.output[-1].type == "compaction"


async def test_a_response_that_fails_is_one(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.01))
    body = {"input": "Hi", "timeout": 0.05, "max_output_tokens": 2000, "stream": True}
    found = [strictly(responses.ResponseStreamEvent, e) for e in await asked(served, "POST", "/v1/responses", body)]
    assert not found or found[-1].type == "response.failed"


async def test_conversations_are_what_the_client_s_types_say(served: Served) -> None:
    made = await asked(served, "POST", "/v1/conversations", {"items": HI, "metadata": {"a": "b"}})
    strictly(Conversation, made)
    one = f"/v1/conversations/{made['id']}"
    items = [*HI, {"role": "assistant", "content": "Yes."}, {"type": "function_call", "call_id": "c", "name": "look",
             "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "x"}]  # fmt: skip
    strictly(ConversationItemList, await asked(served, "POST", f"{one}/items", {"items": items}))
    await asked(served, "POST", "/v1/responses", {"conversation": made["id"], "input": "Go on", "tools": [TOOL]})
    listed = strictly(ConversationItemList, await asked(served, "GET", f"{one}/items"))
    assert len(listed.data) == 9
    first = f"{one}/items/{listed.first_id}"
    strictly(ConversationItem, await asked(served, "GET", first))
    strictly(Conversation, await asked(served, "DELETE", first))
    strictly(Conversation, await asked(served, "POST", one, {"metadata": {}}))
    strictly(ConversationDeletedResource, await asked(served, "DELETE", one))


@pytest.mark.parametrize("more", [
    {}, {"tools": [CHAT_TOOL]}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"max_tokens": 5},
])  # fmt: skip
async def test_chats_are_what_the_client_s_types_say(served: Served, more: dict[str, Any]) -> None:
    body = {"messages": HI, "store": True, **more}
    made = await asked(served, "POST", "/v1/chat/completions", body)
    typed(ChatCompletion, made)
    for event in await asked(
        served, "POST", "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
    ):
        typed(ChatCompletionChunk, event)
    served.context.store.drop(served.context.store.all(object, "anonymous")[1])  # type: ignore[type-var]
    listed = await asked(served, "GET", "/v1/chat/completions")
    assert len(typed(SyncCursorPage[ChatCompletion], listed).data) == 2
    one = f"/v1/chat/completions/{made['id']}"
    typed(ChatCompletion, await asked(served, "GET", one))
    typed(ChatCompletion, await asked(served, "POST", one, {"metadata": {"a": "b"}}))
    messages = (await asked(served, "GET", f"{one}/messages"))["data"]
    assert {"id", "role", "content", "content_parts", "refusal"} <= messages[0].keys()
    strictly(ChatCompletionDeleted, await asked(served, "DELETE", one))


async def test_the_other_endpoints_of_openai(served: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "logprobs": 2}
    typed(openai.Completion, await asked(served, "POST", "/v1/completions", body))
    for event in await asked(served, "POST", "/v1/completions", {**body, "stream": True}):
        for choice in event["choices"]:  # null until the end, whatever the type of whole answers says
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        typed(openai.Completion, event)
    typed(openai.CreateEmbeddingResponse, await asked(served, "POST", "/v1/embeddings", {"input": ["a", "b"]}))
    for model in (await asked(served, "GET", "/v1/models"))["data"]:
        typed(openai.Model, model)
    typed(openai.Model, await asked(served, "GET", "/v1/models/fake"))


MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [{"name": "look", "input_schema": SCHEMA}]},
    "cut short": {"max_tokens": 20},
    "stopped": {"stop_sequences": ["Well"]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
}


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_are_what_anthropic_s_types_say(served: Served, name: str) -> None:
    body = {"model": "fake", "max_tokens": 500, "messages": HI, **MESSAGES[name]}
    whole = strictly(claude.Message, await asked(served, "POST", "/v1/messages", body))
    told = [e for e in await asked(served, "POST", "/v1/messages", {**body, "stream": True}) if e["type"] != "ping"]
    found = [strictly(claude.RawMessageStreamEvent, event) for event in told]
    assert found[0].type == "message_start" and found[-1].type == "message_stop"
    ended = next(event for event in found if event.type == "message_delta")
    assert ended.delta.stop_reason == whole.stop_reason
    assert ended.usage.output_tokens_details == whole.usage.output_tokens_details


async def test_what_else_anthropic_s_clients_ask(served: Served) -> None:
    body = {"model": "fake", "messages": HI}
    strictly(claude.MessageTokensCount, await asked(served, "POST", "/v1/messages/count_tokens", body))
    strictly(SyncPage[claude.ModelInfo], await asked(served, "GET", "/v1/models", **VERSION))
    strictly(claude.ModelInfo, await asked(served, "GET", "/v1/models/fake", **VERSION))
    strictly(ErrorResponse, await asked(served, "GET", "/v1/models/nope", None, 404, **VERSION))
    strictly(ErrorResponse, await asked(served, "POST", "/v1/messages", {**body, "model": "nope"}, 400))
    wrong = {**body, "model": "nope", "max_tokens": 2}
    strictly(ErrorResponse, await asked(served, "POST", "/v1/messages", wrong, 404))


def test_the_check_finds_what_is_wrong() -> None:
    fine = {"id": "a", "object": "conversation.deleted", "deleted": True}
    strictly(ConversationDeletedResource, fine)
    for wrong in ({**fine, "deleted": 1}, {**fine, "object": "conversation"}, {"id": "a", "deleted": True}):
        with pytest.raises(ValueError, match="validation error"):
            strictly(ConversationDeletedResource, wrong)
    with pytest.raises(AssertionError, match="'Response'"):
        strictly(responses.Response, {
            "id": "a", "created_at": 1, "model": "m", "object": "response", "output": [], "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": [],
        })  # fmt: skip
