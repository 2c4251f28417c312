"""Anthropic's requests. Owns: their fields and bounds, and what they mean in OpenAI's words.

Must not know: engines, HTTP.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenmill.core.errors import ParameterError
from tokenmill.server.errors import quoted
from tokenmill.server.fields import (
    MOST_MESSAGES,
    MOST_METADATA,
    MOST_PARTS,
    MOST_TOOLS,
    Inside,
    Label,
    check_text,
    check_tool,
    few,
)

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Block(BaseModel):
    """A piece of content. Its fields depend on `type`."""

    model_config = LOOSE
    type: str
    text: str | None = None
    thinking: str | None = None
    id: Label | None = None
    name: Label | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Label | None = None
    content: str | Annotated[list[dict[str, Any]], few(MOST_PARTS), Inside("anthropic.ResultPart")] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Block:
        if self.type in ("text", "thinking"):
            check_text(self.type, self)
        return self


class Turn(BaseModel):
    """One message."""

    model_config = LOOSE
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], few(MOST_PARTS)]


class Tool(BaseModel):
    """A tool of the client."""

    model_config = LOOSE
    name: Annotated[str, Field(min_length=1, max_length=1024)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        return check_tool(given, "custom", None)


class ToolChoice(BaseModel):
    """Whether a tool must be used, and which one."""

    model_config = LOOSE
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    """Extended thinking."""

    model_config = LOOSE
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
}
"""Names of chat completions' fields -> this API's names, for errors."""


class CountRequest(BaseModel):
    """POST /v1/messages/count_tokens, and the fields that messages share with it."""

    model_config = LOOSE
    model: Annotated[str, Field(min_length=1, max_length=1024)]
    messages: Annotated[list[Turn], few(MOST_MESSAGES, 1)]
    system: str | Annotated[list[Block], few(MOST_PARTS)] | None = None
    tools: Annotated[list[Tool], few(MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def prompt(self) -> dict[str, Any]:
        """The conversation as fields of OpenAI's request."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        _check_calls(self.messages)
        for number, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages.{number}.content")
        found: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":  # the answer continues the text that the client began
            found |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            found["tools"] = [_tool(tool) for tool in self.tools]
        found |= _choice(self.tool_choice)
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            if not on and self.thinking.budget_tokens is not None:
                raise ParameterError("thinking.budget_tokens has no effect where it is disabled.", param="thinking")
            found["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
            found["thinking_token_budget"] = self.thinking.budget_tokens if on else None
        return found


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Positive
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], few(64)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=MOST_METADATA)] | None = None
    output_config: Annotated[dict[str, Any], Inside("anthropic.OutputConfig")] | None = None

    def fields(self) -> dict[str, Any]:
        """The whole request as fields of OpenAI's request."""
        return {
            **self.prompt(),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            **self._output(),
        }

    def _output(self) -> dict[str, Any]:
        config = self.output_config or {}
        form = config.get("format")
        found: dict[str, Any] = {"reasoning_effort": config.get("effort")}
        if form is None:
            return found
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise ParameterError(
                "output_config.format must be {'type': 'json_schema', 'schema': {...}}.", param="output_config.format"
            )
        return {**found, "structured_outputs": {"json": form["schema"]}}


_NEEDED = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
_ROLES = {**dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant"), "tool_result": "user"}
"""The turns that have blocks of these types. In others they would be read as nothing, or as what somebody else said."""


def _check_calls(turns: list[Turn]) -> None:
    """Refuse calls and results in somebody else's turn, those without what says which they are, and a result of a call
    that no earlier turn has, in Anthropic's words."""
    called: set[str | None] = set()
    for number, turn in enumerate(turns):
        for place, block in enumerate([] if isinstance(turn.content, str) else turn.content):
            where = f"messages.{number}.content.{place}"
            if turn.role != (role := _ROLES.get(block.type, turn.role)):
                raise ParameterError(f"{where}: `{block.type}` blocks can only be in `{role}` messages", param=where)
            for field in _NEEDED.get(block.type, ()):
                if getattr(block, field) is None:
                    raise ParameterError(f"{where}.{field}: Field required", param=f"{where}.{field}")
            if block.type == "tool_use":
                called.add(block.id)
            elif block.type == "tool_result" and block.tool_use_id not in called:
                raise ParameterError(
                    f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id}. Each "
                    "`tool_result` block must have a corresponding `tool_use` block in the previous message.",
                    param=where,
                )


def _messages(turn: Turn, place: str) -> list[dict[str, Any]]:
    """One turn as OpenAI's messages. Results of tools become messages of their own, before the user's text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results, texts, calls, thoughts = [], [], [], []
    for number, block in enumerate(turn.content):
        where = f"{place}.{number}"
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                calls.append(
                    {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": arguments}}
                )
            case "tool_result":
                said = "" if block.content is None else _result(block.content, where)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
            case _:
                raise ParameterError(
                    f"Content of type {quoted(block.type)} is not supported in this version.", param=where
                )
    found: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning"] = "".join(thoughts)
    return results + ([found] if texts or calls or thoughts or not results else [])


def _result(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ParameterError("Results of tools can only be text in this version.", param=where)
    if any(not isinstance(part.get("text"), str) for part in content):
        raise ParameterError(f"{where}: a part of type text needs text.", param=where)
    return "".join(part["text"] for part in content)


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    if any(block.type != "text" for block in content):
        raise ParameterError(f"{where} can only be text.", param=where)
    return "\n".join(block.text or "" for block in content)


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.input_schema is None:
        raise ParameterError(
            f"The tool {tool.name!r} has no input_schema: tools that run on the server are not supported.",
            param="tools",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(given: ToolChoice | None) -> dict[str, Any]:
    if given is None:
        return {}
    if given.type == "tool" and not given.name:
        raise ParameterError("tool_choice of type tool needs a name.", param="tool_choice.name")
    named = {"type": "function", "function": {"name": given.name}}
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    return {"tool_choice": kinds[given.type], "parallel_tool_calls": not given.disable_parallel_tool_use}
