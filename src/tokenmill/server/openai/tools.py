"""OpenAI's tools and tool_choice. Owns: reading them into a ToolWish, and calls in OpenAI's shapes.

Must not know: formats, engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.server.assistant_turn import ToolWish, Turn
from tokenmill.server.errors import quoted
from tokenmill.server.openai.schemas import ChatRequest
from tokenmill.server.openai.structure import structured_by
from tokenmill.text.messages.message import Message


def tool_wish(body: ChatRequest) -> ToolWish:
    """The request's tools. A ParameterError names the wrong field."""
    tools: dict[str, Any] = {}
    strict = set()
    for tool in body.tools or ():
        function = tool.function
        if function.name in tools:
            raise ParameterError(f"tools holds {function.name!r} twice.", param="tools")
        tools[function.name] = arguments_schema(function.parameters)
        if function.strict:
            strict.add(function.name)
    choice, named, allowed = _choice(body.tool_choice, tools)
    if not tools:
        if choice not in ("none", "auto") or named is not None or allowed is not None:
            raise ParameterError("tool_choice needs tools.", param="tool_choice")
        return ToolWish()
    if allowed is not None:
        if missing := sorted(set(allowed) - set(tools)):
            raise ParameterError(
                f"tool_choice allows {quoted(missing[0])}, which is not among the tools.", param="tool_choice"
            )
        tools = {name: tools[name] for name in tools if name in allowed}
    parallel = body.parallel_tool_calls is not False
    wish = ToolWish(tools, frozenset(strict & set(tools)), choice, named, parallel)
    if wish.forced and (name := structured_by(body)) is not None:
        raise ParameterError(
            f"{name} has no effect here: tool_choice asks for a call, whose arguments follow the tool's schema. Leave "
            "one of them out.",
            param=name,
        )
    return wish


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments. A function without a schema takes none, so its calls have `{}`."""
    found = parameters or {}
    described = found.keys() - {"type", "title", "description", "$schema", "required"}
    if any(found.get(name) for name in described) or found.get("type", "object") != "object" or found.get("required"):
        return found
    if "additionalProperties" in found:
        return found
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _choice(given: Any, tools: Mapping[str, Any]) -> tuple[str, str | None, list[str] | None]:
    """none, auto or required; the function that must be called; the functions that are allowed. TGI's clients give a
    function by its bare name."""
    if given is None or given in ("none", "auto", "required"):
        return given or "auto", None, None
    if isinstance(given, str):
        if given in tools:
            return "required", given, None
        raise ParameterError(
            "tool_choice: Input should be 'none', 'auto', 'required', the name of a tool, or an object.",
            param="tool_choice",
        )
    kind = given.get("type", "function")
    if (
        kind == "function"
        and isinstance(given.get("function"), dict)
        and isinstance(given["function"].get("name"), str)
    ):
        return "required", given["function"]["name"], None
    if kind == "allowed_tools" and isinstance(given.get("allowed_tools"), dict):
        inner = given["allowed_tools"]
        names = [_name(t) for t in inner.get("tools") or ()] if isinstance(inner.get("tools"), list) else []
        if inner.get("mode") in ("auto", "required") and names and all(names):
            return inner["mode"], None, [n for n in names if n]
    raise ParameterError(
        "tool_choice must be none, auto, required, a function by its name, or allowed_tools with a mode and tools.",
        param="tool_choice",
    )


def _name(tool: Any) -> str | None:
    known = isinstance(tool, dict) and tool.get("type", "function") == "function"
    function = tool.get("function") if known else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def call_objects(turn: Turn, message: Message) -> list[dict[str, Any]]:
    """The `tool_calls` of a complete message."""
    return [
        {"id": turn.call_id(c.id), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in message.calls
    ]
