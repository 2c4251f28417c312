"""Items: the pieces of a conversation in the Responses API. Owns: what they mean as chat messages, and the full form in
which they are kept and listed.

Must not know: requests, HTTP, where items are kept.
"""

from __future__ import annotations

import uuid
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.server.errors import quoted

Item = dict[str, Any]
Messages = list[dict[str, Any]]
_TEXTS = ("input_text", "output_text", "text", "refusal")
ROLES = ("user", "assistant", "system", "developer")
"""Those of the API. A tool's results are items of their own."""
_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
SUMMARY = "Summary of the conversation so far:\n"


def messages_of(items: list[Item], place: str = "input") -> Messages:
    """Input items as messages of a chat. Calls and reasoning join the assistant's message to which they belong, and a
    summary joins the user's message that follows. `place`: where in a request the items lie."""
    found: Messages = []
    summary = ""
    for number, item in enumerate(items):
        where = f"{place}.{number}"
        kind = item.get("type", "message")
        before, summary = summary, ""
        match kind:
            case "message":
                message = {"role": _role(item, where), "content": _content(item.get("content"), where)}
                if before and message["role"] == "user":
                    found[-1]["content"] += "\n\n" + message["content"]
                else:
                    _join(found, message) if message["role"] == "assistant" else found.append(message)
            case "function_call":
                function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
                call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
                _join(found, {"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                if item.get("output") is None:
                    raise ParameterError(f"{where}.output is missing.", param=f"{where}.output")
                output = _content(item["output"], where, "output")
                found.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output})
            case "reasoning":
                _join(found, {"role": "assistant", "content": "", "reasoning": _thought(item, where)})
            case "compaction":
                summary = SUMMARY + _string(item, "encrypted_content", where)
                found.append({"role": "user", "content": summary})
            case _:
                raise ParameterError(f"Items of type {quoted(kind)} are not supported in this version.", param=where)
    return found


def check_results(messages: Messages) -> None:
    """Refuse a result of a call that the conversation does not have, in OpenAI's words."""
    called: set[str] = set()
    for message in messages:
        called.update(call["id"] for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            name = message["tool_call_id"][:100]
            raise ParameterError(f"No tool call found for function call output with call_id {name}.", param="input")


def full_items(items: list[Item], place: str = "input") -> list[Item]:
    """The same items with all fields that the API's own types require. Items that `messages_of` refuses are refused
    here."""
    messages_of(items, place)
    return [_full(item) for item in items]


def _full(item: Item) -> Item:
    kind: str = item.get("type", "message")
    found: Item = {"type": kind, "id": f"{_PREFIX[kind]}_{uuid.uuid4().hex}"}
    match kind:
        case "message":
            role = item["role"]
            found |= {"role": role, "content": _parts(item.get("content"), said=role == "assistant")}
        case "function_call":
            found |= {name: item[name] for name in ("call_id", "name", "arguments")}
        case "function_call_output":
            output = item.get("output")
            found |= {
                "call_id": item["call_id"],
                "output": _parts(output) if isinstance(output, list) else output or "",
            }
        case "reasoning":
            content = [{"type": "reasoning_text", "text": str(p.get("text", ""))} for p in item.get("content") or ()]
            summary = item.get("summary")
            summaries = [p for p in summary if isinstance(p, dict)] if isinstance(summary, list) else []
            found["summary"] = [{"type": "summary_text", "text": str(p.get("text", ""))} for p in summaries]
            found["content"] = content
        case "compaction":
            return {**found, "encrypted_content": item["encrypted_content"]}
    return {**found, "status": "completed"}


def _parts(content: Any, *, said: bool = False) -> list[dict[str, Any]]:
    """Content as parts. `said`: by the assistant."""
    given = [{"text": content or ""}] if content is None or isinstance(content, str) else content
    found: list[dict[str, Any]] = []
    for part in given:
        text = str(part.get("text") or part.get("refusal") or "")
        if part.get("type") == "refusal" and said:
            found.append({"type": "refusal", "refusal": text})
        elif said:
            found.append({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        else:
            found.append({"type": "input_text", "text": text})
    return found


def _join(found: Messages, message: dict[str, Any]) -> None:
    """Reasoning and calls of one turn are items of their own in this API, and one message in a chat."""
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


def _content(content: Any, where: str, field: str = "content") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ParameterError(f"{where}: {field} must be text or a list of parts.", param=where)
    for part in content:
        if part.get("type") not in _TEXTS:
            raise ParameterError(
                f"Content of type {quoted(part.get('type'))} is not supported in this version.", param=where
            )
        if not isinstance(part.get("refusal") if part.get("text") is None else part["text"], str):
            raise ParameterError(f"{where}: a part of type {part['type']} needs a text.", param=where)
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _thought(item: Item, where: str) -> str:
    found = [part.get("text") or "" for part in objects(item, "content", where)]
    if not all(isinstance(text, str) for text in found):
        raise ParameterError(f"{where}: a part of content needs a text.", param=where)
    return "".join(found)


def objects(item: Item, name: str, where: str) -> list[dict[str, Any]]:
    """A list that may be absent."""
    found = item.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(part, dict) for part in found):
        raise ParameterError(f"{where}.{name} must be a list of objects.", param=f"{where}.{name}")
    return found


def _role(item: Item, where: str) -> str:
    role = _string(item, "role", where)
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise ParameterError(f"{where}.role must be one of {known}, not {quoted(role)}.", param=f"{where}.role")
    return role


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ParameterError(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    return value
