"""A response while it grows. Owns: output items, and their events in OpenAI's order.

Must not know: engines, sockets, where responses are kept.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import msgspec

from tokenmill.server.errors import HttpError
from tokenmill.server.openai.chat import Chat
from tokenmill.server.openai.logprobs import chat_logprobs
from tokenmill.server.prices import cost_field
from tokenmill.server.responses.schemas import ResponsesRequest
from tokenmill.server.translated_chat import StepOutput
from tokenmill.text.messages.message import Event, Message

Events = list[dict[str, Any]]
_ITEM = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
_FAILURES = {408: "server_error", 429: "rate_limit_exceeded"}
"""The API has few words for why a response failed."""
_PART = {"message": "output_text", "reasoning": "reasoning_text"}


class GrowingResponse:
    """The growing response object, and its events with their numbers."""

    def __init__(self, chat: Chat, body: ResponsesRequest, response_id: str) -> None:
        self.chat = chat
        self.base = response_id.removeprefix("resp_")
        self.response = _head(chat, body, response_id)
        self.said = Message()
        self.open: str | None = None
        self.failure: HttpError | None = None
        self._next = 0
        self._rows: list[Any] = []
        self._wanted = body.logprobs

    def begin(self) -> Events:
        """response.created and response.in_progress."""
        self.response["status"] = "in_progress"
        return [self._snapshot("response.created"), self._snapshot("response.in_progress")]

    def take(self, heard: StepOutput) -> Events:
        """Take what one step added. After the last step everything is closed."""
        found: Events = []
        self.said.add(heard.events)
        if self._wanted:
            self._rows += heard.logprobs
        for event in heard.events:
            kind = _ITEM[event.kind]
            if event.kind == "call" or kind != self.open:
                found += self._close()
                found += self._start(kind, event)
            if event.kind != "call" and event.text:
                found.append(self._more(event))
        if self.open not in (None, "message"):  # only a text carries them
            self._rows = []
        if heard.finish_reason is not None:
            found += self._close() if heard.finish_reason != "length" else self._close("incomplete")
            found.append(self._end(heard.finish_reason))
        return found

    def pass_over(self, heard: StepOutput) -> Events:
        """Take what one step added without telling it, except for the end."""
        return [] if heard.finish_reason is None else [self._end("stop")]

    def fail(self, error: HttpError) -> Events:
        """End with an error."""
        self.failure = error
        self._break_off()
        kind = _FAILURES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        self.response |= {"status": "failed", "error": {"code": kind, "message": error.message}}
        return [self._snapshot("response.failed")]

    def cancel(self) -> Events:
        """End, because nobody wants the response any more. The event is called as in OpenAI's webhooks; its streams
        have none."""
        self._break_off()
        self.response["status"] = "cancelled"
        return [self._snapshot("response.cancelled")]

    def _break_off(self) -> None:
        """Nothing more comes of the item that is being said."""
        if self.open is not None:
            self._item["status"] = "incomplete"

    @property
    def lasting(self) -> list[dict[str, Any]]:
        """The output for the next turn. A call that was broken off is no call."""
        output = self.response["output"]
        return [item for item in output if item["type"] != "function_call" or item["status"] == "completed"]

    def message(self) -> dict[str, Any]:
        """What was said, as a chat message for the next turn."""
        found: dict[str, Any] = {"role": "assistant", "content": self.said.content}
        calls = [item for item in self.lasting if item["type"] == "function_call"]
        if calls:
            found["tool_calls"] = [
                {"id": c["call_id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls
            ]
        if self.said.reasoning:
            found["reasoning"] = self.said.reasoning
        return found

    # ------------------------------------------------------------ items

    @property
    def _place(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _item(self) -> dict[str, Any]:
        found: dict[str, Any] = self.response["output"][-1]
        return found

    def _start(self, kind: str, event: Event) -> Events:
        self.open = kind
        number = len(self.response["output"])
        item: dict[str, Any]
        if kind == "function_call":
            call = self.chat.turn.call_id(event.id)
            item = {
                "type": kind,
                "id": f"fc_{self.base}_{number}",
                "call_id": call,
                "name": event.text,
                "arguments": "",
            }
        elif kind == "reasoning":
            item = {"type": kind, "id": f"rs_{self.base}_{number}", "summary": [], "content": []}
        else:
            item = {"type": kind, "id": f"msg_{self.base}_{number}", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self.response["output"].append(item)
        found = [self._event("response.output_item.added", output_index=number, item=copy.deepcopy(item))]
        if kind in _PART:
            item["content"].append(_part(kind))
            found.append(self._of_part("response.content_part.added", part=_part(kind)))
        return found

    def _more(self, event: Event) -> dict[str, Any]:
        if event.kind == "arguments":
            self._item["arguments"] += event.text
            return self._of_item("response.function_call_arguments.delta", delta=event.text)
        part = self._item["content"][0]
        part["text"] += event.text
        if event.kind == "reasoning":
            return self._of_part("response.reasoning_text.delta", delta=event.text)
        return self._of_part("response.output_text.delta", delta=event.text, logprobs=self._logprobs())

    def _close(self, status: str = "completed") -> Events:
        if self.open is None:
            return []
        item, kind, self.open = self._item, self.open, None
        item["status"] = status
        found: Events = []
        if kind == "function_call":
            name, arguments = item["name"], item["arguments"]
            found.append(self._of_item("response.function_call_arguments.done", name=name, arguments=arguments))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            found.append(self._of_part(done, text=part["text"], **more))
            found.append(self._of_part("response.content_part.done", part=copy.deepcopy(part)))
        return [
            *found,
            self._event("response.output_item.done", output_index=self._place, item=copy.deepcopy(item)),
        ]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens since the last text. The part keeps them as well."""
        if not self._rows:
            return []
        found: list[dict[str, Any]] = chat_logprobs(self._rows, self.chat.top, self.chat.names)["content"]
        self._rows = []
        self._item["content"][0]["logprobs"] += found
        return found

    # ------------------------------------------------------------ events

    def _end(self, reason: str) -> dict[str, Any]:
        short = reason == "length"
        self.response["status"] = "incomplete" if short else "completed"
        self.response["completed_at"] = None if short else int(time.time())
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if short else None
        self.response["usage"] = usage_object(self.chat.usage(self.said.reasoning))
        return self._snapshot("response.incomplete" if short else "response.completed")

    def _snapshot(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self.response)  # encoded before anything else changes it

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item["id"], output_index=self._place, **more)

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._next += 1
        return {"type": kind, "sequence_number": self._next - 1, **more}


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def usage_object(found: dict[str, Any]) -> dict[str, Any]:
    """A chat's usage in this API's words. Every prompt is written into the cache, so nothing is counted for that."""
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": found["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": found.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": found["total_tokens"],
        **cost_field(found),
    }


ABSENT = (
    *("access_programs", "image", "input_transformations", "max_tool_calls", "moderation", "prompt"),
    *("prompt_cache_diagnostics", "prompt_cache_options", "tool_usage"),
)
"""Fields of the API's own response for things that do not exist here. They are null."""


def _head(chat: Chat, body: ResponsesRequest, response_id: str) -> dict[str, Any]:
    """A response without output, with the request's fields."""
    params = next(iter(chat.job.tasks.values())).request.params
    thinking, retention = body.reasoning, body.prompt_cache_retention
    conversation = body.conversation_id
    form = body.text.format if body.text else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": chat.created,
        "status": "queued",
        "background": bool(body.background),
        "completed_at": None,
        "conversation": {"id": conversation} if conversation else None,
        "error": None,
        "incomplete_details": None,
        "instructions": _fixed(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": "in_memory" if retention == "in-memory" else retention,
        "reasoning": {"effort": thinking.effort if thinking else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": _fixed({"format": form or {"type": "text"}, "verbosity": None}),
        "tool_choice": _fixed(body.tool_choice or "auto"),
        "tools": _fixed([{**_TOOL, **tool} for tool in body.tools or ()]),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
        **dict.fromkeys(ABSENT),
    }


_TOOL: dict[str, Any] = {"description": None, "parameters": None, "strict": None}


def _fixed(value: Any) -> msgspec.Raw:
    """The request's fields do not change, so they are encoded once."""
    return msgspec.Raw(msgspec.json.encode(value))
