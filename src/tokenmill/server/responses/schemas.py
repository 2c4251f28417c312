"""Requests of the Responses API. Owns: their fields and bounds, and what they mean in the words of chat completions.

Must not know: engines, HTTP, what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import MAX_STOP
from tokenmill.server.errors import quoted
from tokenmill.server.fields import MOST_MESSAGES, MOST_TOOLS, Inside, Label, Metadata, few
from tokenmill.server.openai.schemas import Penalty, StopString
from tokenmill.server.responses.conversation_items import (
    Item,
    Messages,
    check_results,
    full_items,
    messages_of,
    objects,
)

PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "logit_bias", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
    *("priority", "cache_salt"),
)
"""Fields that chat completions read under the same names. OpenAI has a few of them here, vLLM all."""
LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
MOST_ITEMS = 20
"""Most items that one request may add to a conversation, as in OpenAI's API."""


NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "structured_outputs": "text.format",
    "tools.*.function": "tools.*",
    "tool_choice.function": "tool_choice",
}
"""Names of chat completions' fields -> this API's names, for errors."""


class Reasoning(BaseModel):
    """How much to think."""

    model_config = LOOSE
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class Text(BaseModel):
    """The form that the text must have."""

    model_config = LOOSE
    format: Annotated[dict[str, Any], Inside("responses.Format")] | None = None


class ConversationName(BaseModel):
    """A conversation by its id."""

    model_config = LOOSE
    id: str = Field(max_length=256)


class TalkRequest(BaseModel):
    """POST /v1/responses/input_tokens, and the fields that responses share with it: a conversation, and what precedes
    it."""

    model_config = LOOSE
    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[dict[str, Any]], few(MOST_MESSAGES, 1), Inside("responses.Item")] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    conversation: Annotated[str, Field(max_length=256)] | ConversationName | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: Annotated[list[dict[str, Any]], few(MOST_TOOLS), Inside("responses.Tool")] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[dict[str, Any], Inside("responses.ToolChoice")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that this request continues."""
        given = self.conversation
        return given.id if isinstance(given, ConversationName) else given

    def check(self) -> None:
        """Refuse what cannot be done."""
        if self.previous_response_id and self.conversation:
            raise ParameterError("Give previous_response_id or conversation, not both.", param="conversation")
        if self.input is None and not self.previous_response_id and not self.conversation:
            raise ParameterError("input is missing.", param="input")

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input or []

    def fields(self, messages: Messages) -> dict[str, Any]:
        """The request as fields of a chat completion over these messages."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        found: dict[str, Any] = {
            "model": self.model,
            "messages": first + messages,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "response_format": _format(self.text),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.truncation == "auto":
            found["truncate_prompt_tokens"] = -1
        if self.tools:
            found["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            found["tool_choice"] = _choice(self.tool_choice)
        return found


class ResponsesRequest(TalkRequest):
    """POST /v1/responses."""

    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    max_output_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop: StopString | Annotated[list[StopString], few(MAX_STOP)] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=4096)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[str], few(16)] | None = None
    metadata: Metadata | None = None
    stream_options: Annotated[dict[str, Any], Inside("responses.StreamOptions")] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    timeout: float | None = Field(None, gt=0, le=86_400)

    def check(self) -> None:
        """Refuse what cannot be done."""
        super().check()
        if self.background and self.store is False:
            raise ParameterError("background can only be used when `store` is true.", param="background")
        known = {"message.output_text.logprobs", "reasoning.encrypted_content"}
        if unknown := sorted(set(self.include or ()) - known):
            raise ParameterError(f"include does not know {quoted(unknown[0])} in this version.", param="include")

    @property
    def logprobs(self) -> bool:
        """Does the client want log-probabilities?"""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def fields(self, messages: Messages) -> dict[str, Any]:
        """The request as fields of a chat completion over these messages."""
        found = super().fields(messages) | {
            "max_completion_tokens": self.max_output_tokens,
            **{name: getattr(self, name) for name in PASSED},
        }
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return found


class CompactRequest(BaseModel):
    """POST /v1/responses/compact."""

    model_config = LOOSE
    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[dict[str, Any]], few(MOST_MESSAGES, 1), Inside("responses.Item")] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    timeout: float | None = Field(None, gt=0, le=86_400)

    def talk(self) -> TalkRequest:
        """The conversation to be compacted."""
        given = self.model_dump(include={"model", "input", "instructions", "previous_response_id"})
        return TalkRequest.model_construct(**given)


class CreateConversation(BaseModel):
    """POST /v1/conversations."""

    model_config = LOOSE
    items: Annotated[list[dict[str, Any]], few(MOST_ITEMS), Inside("responses.Item")] | None = None
    metadata: Metadata | None = None


class UpdateConversation(BaseModel):
    """POST /v1/conversations/{conversation_id}."""

    model_config = LOOSE
    metadata: Metadata


class CreateItems(BaseModel):
    """POST /v1/conversations/{conversation_id}/items."""

    model_config = LOOSE
    items: Annotated[list[dict[str, Any]], few(MOST_ITEMS, 1), Inside("responses.Item")]


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: all its messages, the same encoded, and the new input encoded."""

    messages: Messages
    encoded: bytes
    items: bytes


def read_talk(body: TalkRequest, before: bytes = b"[]", items_before: bytes = b"[]") -> Talk:
    """The conversation that a request continues: messages of an earlier response, or items of a conversation."""
    items = full_items(body.items())
    earlier = msgspec.json.decode(items_before)
    messages = msgspec.json.decode(before) + messages_of(earlier + body.items())
    if not messages:
        raise ParameterError("The conversation is empty: input is missing.", param="input")
    check_results(messages)
    return Talk(messages, msgspec.json.encode(messages), msgspec.json.encode(items))


def joined(messages: bytes, more: dict[str, Any]) -> bytes:
    """An encoded list with one more entry."""
    comma = b"," if len(messages) > len(b"[]") else b""
    return messages[:-1] + comma + msgspec.json.encode(more) + b"]"


def _format(text: Text | None) -> dict[str, Any] | None:
    """text.format as response_format. The schema lies one level higher here."""
    given = text.format if text is not None else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_schema":
        inner = {name: given.get(name) for name in ("name", "description", "schema", "strict") if name in given}
        return {"type": "json_schema", "json_schema": inner}
    return given


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools":
        allowed = objects(given, "tools", "tool_choice")
        tools = [{"type": tool.get("type", "function"), "function": {"name": tool.get("name")}} for tool in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    return given
