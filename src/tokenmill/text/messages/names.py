"""Which names a message of a chat may have, in OpenAI's form. Owns: the lists, for messages, parts and calls.

The server's schemas read the same fields. Must not know: HTTP, what the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenmill.core.object_rules import ObjectRules, Refusal
from tokenmill.core.unread_names import Unknown, judge_names, refuse_unknown

_ECHO = "part of an earlier answer, without use in a prompt"
_SPEED = "only about speed: the prefix cache finds equal beginnings by itself"
_PICTURES = Refusal("this model reads only text")
_PARTS = Refusal("send it as a part of content")
_PREFIX = Refusal("use continue_final_message")

PART = ObjectRules(
    "openai.TextPart",
    frozenset({"type", "text", "thinking", "refusal"}),
    {**dict.fromkeys(("annotations", "logprobs"), _ECHO), "cache_control": _SPEED},
    dict.fromkeys(("image_url", "input_audio", "file", "video_url", "audio_url"), _PICTURES),
)
CALL = ObjectRules(
    "openai.ToolCall",
    frozenset({"id", "type", "function"}),
    {"index": _ECHO},
    {"custom": Refusal("tools are functions here")},
    inside={"function": ObjectRules("openai.FunctionCall", frozenset({"name", "arguments"}))},
)
MESSAGE = ObjectRules(
    "openai.Message",
    frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}),
    {**dict.fromkeys(("annotations", "id", "status"), _ECHO), "cache_control": _SPEED},
    {
        **dict.fromkeys(("prefix", "partial"), _PREFIX),
        **dict.fromkeys(("audio", "images"), _PICTURES),
        "function_call": Refusal("use tool_calls"),
        **dict.fromkeys(("refusal", "thinking", "thinking_blocks", "reasoning_details"), _PARTS),
    },
    inside={"content": PART, "tool_calls": CALL},
)


def check_names(messages: Sequence[Any], template: str) -> None:
    """Refuse the first name in a conversation that would be lost: one that the chat template never reads either."""
    rules, unknown = _read_by(MESSAGE, frozenset(re.findall(r"[^\W\d]\w*", template))), Unknown()
    for message in messages:
        if isinstance(message, Mapping):
            judge_names(
                {name: value for name, value in message.items() if value is not None}, rules, unknown, "messages."
            )
    refuse_unknown(unknown)


def _read_by(rules: ObjectRules, words: frozenset[str]) -> ObjectRules:
    """These rules, but whatever is a word of the template is read. Values stay as they are: no schema reads them."""
    inside = {name: _read_by(under, words) for name, under in rules.inside.items()}
    return replace(rules, fields=rules.fields | words, inside=inside, validated=False)
