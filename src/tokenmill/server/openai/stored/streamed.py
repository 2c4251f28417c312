"""Turns a stream of chunks back into one completion. Owns: putting deltas together.

Exactly what the client was sent is stored, including the ids of calls. Must not know: HTTP, how chunks are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

Choice = dict[str, Any]
_TOGETHER = ("content", "reasoning", "reasoning_content")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def completion_of(data: bytes) -> dict[str, Any] | None:
    """The completion that these events add up to. None: they hold an error, or nothing."""
    choices: dict[int, Choice] = {}
    head: dict[str, Any] = {}
    for chunk in _chunks(data):
        if "error" in chunk:
            return None
        head |= {name: value for name, value in chunk.items() if name not in ("choices", "object")}
        for given in chunk["choices"]:
            _add(choices.setdefault(given["index"], _empty(given["index"])), given)
    if not choices or any(choice["finish_reason"] is None for choice in choices.values()):
        return None
    found = [_closed(choices[index]) for index in sorted(choices)]
    return {"service_tier": None, "system_fingerprint": None, **head, "object": "chat.completion", "choices": found}


def _chunks(data: bytes) -> Iterable[dict[str, Any]]:
    for line in data.split(b"\n\n"):
        if line.startswith(b"data: {"):
            yield _decode(line[len(b"data: ") :])


def _empty(index: int) -> Choice:
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None, "calls": {}, "pieces": {}}


def _add(choice: Choice, given: dict[str, Any]) -> None:
    """Add one chunk's part. Text is joined at the end."""
    delta = given.get("delta") or {}
    choice["message"]["role"] = delta.get("role") or choice["message"]["role"]
    for name in _TOGETHER:
        if delta.get(name):
            choice["pieces"].setdefault(name, []).append(delta[name])
    for call in delta.get("tool_calls") or ():
        known = choice["calls"].setdefault(call["index"], {"id": "", "type": "function", "name": "", "pieces": []})
        function = call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] = function.get("name") or known["name"]
        known["pieces"].append(function.get("arguments") or "")
    rows = (given.get("logprobs") or {}).get("content")
    if rows:
        choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"]["content"] += rows
    for name in ("finish_reason", "stop_reason"):
        if given.get(name) is not None:
            choice[name] = given[name]
    if "token_ids" in given:
        choice.setdefault("token_ids", []).extend(given["token_ids"] or ())


def _closed(choice: Choice) -> Choice:
    message = choice["message"] | {name: "".join(pieces) for name, pieces in choice.pop("pieces").items()}
    calls = choice.pop("calls")
    if calls:
        message["tool_calls"] = [_call(calls[number]) for number in sorted(calls)]
    elif message["content"] is None:
        message["content"] = ""
    return {**choice, "stop_reason": choice.get("stop_reason"), "message": message}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["pieces"])}
    return {"id": call["id"], "type": call["type"], "function": function}
