"""Where reasoning stands in what a model will say. Owns: control tokens by text, and the engine's ReasoningSpan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.request import ReasoningSpan
from tokenmill.text.codec import Tokenizer
from tokenmill.text.messages.describe import Thinking
from tokenmill.text.messages.detect import closed_thinking, find_format, opens_thinking, thinks_by_itself


def control_marks(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Control tokens by text."""
    if tokenizer is None:
        return {}
    named = ((tokenizer.id_to_token(i), i) for i in sorted(tokenizer.control_ids | tokenizer.special_ids))
    return {text: number for text, number in named if text}


def reasoning_span(thinking: Thinking, inside: bool, marks: Mapping[str, int]) -> ReasoningSpan:
    """`inside`: the prompt has begun the reasoning."""
    opened, close = "" if inside else thinking.open.strip(), thinking.close.strip()
    tokens = {mark: number for mark, number in marks.items() if mark in opened or mark in close}
    return ReasoningSpan(open=opened, close=close, tokens=tokens)


def text_of(message: Any) -> str:
    """A message's text, which an answer may continue."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))


def span_after(prompt: str, tokenizer: Tokenizer, continued: str = "") -> ReasoningSpan | None:
    """The span of the answer to a rendered chat; None where the model will not reason. `continued`: the text that the
    answer continues."""
    template = tokenizer.chat_template
    thinking = find_format(template).thinking
    inside = opens_thinking(prompt, thinking, continued)
    if thinking is None or thinking.answer:
        return None
    if not inside and (closed_thinking(prompt, thinking) or not thinks_by_itself(template, thinking)):
        return None
    return reasoning_span(thinking, inside, control_marks(tokenizer))
