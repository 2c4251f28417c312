"""Requests of the Responses API. Owns: their fields and bounds, and what they mean in the words of chat completions.

Must not know: engines, HTTP, what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.errors import quoted
from tokenmill.server.fields import MOST_MESSAGES, MOST_METADATA, MOST_TOOLS, Inside, Label, few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Messages = list[dict[str, Any]]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MOST_METADATA)
]
_TEXTS = ("input_text", "output_text", "text", "refusal")


class Reasoning(BaseModel):
    """How much to think."""

    model_config = LOOSE
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class Text(BaseModel):
    """What the text must be."""

    model_config = LOOSE
    format: Annotated[dict[str, Any], Inside("responses.Format")] | None = None


class ResponsesRequest(BaseModel):
    """POST /v1/responses."""

    model_config = LOOSE
    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[dict[str, Any]], few(MOST_MESSAGES, 1), Inside("responses.Item")]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    max_output_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[str], few(16)] | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: Annotated[list[dict[str, Any]], few(MOST_TOOLS), Inside("responses.Tool")] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    stream_options: Annotated[dict[str, Any], Inside("responses.StreamOptions")] | None = None
    user: Label | None = None
    timeout: float | None = Field(None, gt=0, le=86_400)

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        if self.background and self.store is False:
            raise ParameterError("background needs store = true.", param="background")
        known = {"message.output_text.logprobs", "reasoning.encrypted_content"}
        if unknown := sorted(set(self.include or ()) - known):
            raise ParameterError(f"include does not know {quoted(unknown[0])} in this version.", param="include")

    @property
    def logprobs(self) -> bool:
        """Are probabilities of tokens wanted?"""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input

    def fields(self, messages: Messages) -> dict[str, Any]:
        """As fields of a chat completion over these messages."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        found: dict[str, Any] = {
            "model": self.model,
            "messages": first + messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "response_format": _format(self.text),
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.truncation == "auto":
            found["truncate_prompt_tokens"] = -1
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            found["tools"] = [_tool(tool, number) for number, tool in enumerate(self.tools)]
            found["tool_choice"] = _choice(self.tool_choice)
        return found


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: all its messages, the same encoded, and what was asked just now, encoded."""

    messages: Messages
    encoded: bytes
    items: bytes


def read_talk(body: ResponsesRequest, before: bytes) -> Talk:
    """The conversation that a request goes on with."""
    items = body.items()
    messages = msgspec.json.decode(before) + messages_of(items)
    return Talk(messages, msgspec.json.encode(messages), msgspec.json.encode(items))


def joined(messages: bytes, more: dict[str, Any]) -> bytes:
    """An encoded list with one more entry."""
    comma = b"," if len(messages) > len(b"[]") else b""
    return messages[:-1] + comma + msgspec.json.encode(more) + b"]"


def messages_of(items: list[dict[str, Any]]) -> Messages:
    """Input items as messages of a chat; calls and thoughts join the assistant's message that they belong to."""
    found: Messages = []
    for number, item in enumerate(items):
        where = f"input.{number}"
        match item.get("type", "message"):
            case "message":
                message = {"role": _string(item, "role", where), "content": _content(item.get("content"), where)}
                _join(found, message) if message["role"] == "assistant" else found.append(message)
            case "function_call":
                function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
                call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
                _join(found, {"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                said = _content(item.get("output"), where)
                found.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": said})
            case "reasoning":
                thought = "".join(str(part.get("text", "")) for part in _objects(item, "content", where))
                _join(found, {"role": "assistant", "content": "", "reasoning": thought})
            case kind:
                raise ParameterError(f"Items of type {quoted(kind)} are not supported in this version.", param=where)
    return found


def _join(found: Messages, message: dict[str, Any]) -> None:
    """Thoughts and calls of one turn are items of their own here, and one message there."""
    last = found[-1] if found else None
    if (
        last is None
        or last["role"] != "assistant"
        or (message["content"] and (last["content"] or "tool_calls" in last))
    ):
        found.append(message)
        return
    last["content"] += message["content"]
    last["reasoning"] = last.get("reasoning", "") + message.get("reasoning", "")
    if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
        last["tool_calls"] = calls


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ParameterError(f"{where}: content must be text or a list of parts.", param=where)
    for part in content:
        if part.get("type") not in _TEXTS:
            raise ParameterError(
                f"Content of type {quoted(part.get('type'))} is not supported in this version.", param=where
            )
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _objects(item: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """A list that may be absent."""
    found = item.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(part, dict) for part in found):
        raise ParameterError(f"{where}.{name} must be a list of objects.", param=f"{where}.{name}")
    return found


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ParameterError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value


def _format(text: Text | None) -> dict[str, Any] | None:
    """text.format as response_format: the schema lies one level higher here."""
    given = text.format if text is not None else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_schema":
        inner = {name: given.get(name) for name in ("name", "description", "schema", "strict") if name in given}
        return {"type": "json_schema", "json_schema": inner}
    return given


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ParameterError(
            f"Tools of type {quoted(tool.get('type'))} run on the server, and there are none here.",
            param=f"tools.{number}",
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools":
        allowed = _objects(given, "tools", "tool_choice")
        tools = [{"type": "function", "function": {"name": tool.get("name")}} for tool in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    return given
