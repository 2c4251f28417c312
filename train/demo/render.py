"""How a conversation becomes text. Owns: the chat format (must equal chat_template.jinja) and loss weights per part."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

Segment = tuple[str, float]
DEFAULT_SYSTEM = "You are a helpful assistant."
TOOL_HEAD = "You can call these tools:\n<tools>\n"
TOOL_TAIL = '\n</tools>\nTo call a tool, write <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
QUIET = 0.1


@dataclass
class Case:
    """One task: a conversation whose last message is the answer, or a plain text split into prompt and continuation."""

    suite: str
    must: str = ""
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    prompt: str = ""
    continuation: str = ""
    check: str = "regex"
    expect: object = None
    tag: str = ""
    think: bool = False


def call_text(calls: list[dict]) -> str:
    """Tool calls in the Hermes form."""
    return "\n".join(f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls)


def system_text(system: str | None, tools: list[dict] | None) -> str:
    """The system turn's text: the given prompt and the tools, one JSON line each."""
    head = system or ""
    if not tools:
        return head
    listed = "\n".join(json.dumps(t, ensure_ascii=False) for t in tools)
    return (head + "\n\n" if head else "") + TOOL_HEAD + listed + TOOL_TAIL


def learned(text: str, weight: float) -> list[Segment]:
    """The text in segments of its weight; what lies between two control marks (a slip of a story) has none."""
    if "\x03" not in text:
        return [(text, weight)]
    out = []
    for part in text.split("\x03"):
        slip, mark, rest = part.partition("\x04")
        out += [(slip, 0.0), (rest, weight)] if mark else [(part, weight)]
    return [segment for segment in out if segment[0]]


def chat_segments(messages: list[dict], tools: list[dict] | None) -> list[Segment]:
    """The whole conversation as segments; only assistant text has full weight."""
    out: list[Segment] = []
    rest = messages
    system = None
    if rest and rest[0]["role"] == "system":
        system, rest = rest[0]["content"], rest[1:]
    if system is not None or tools:
        out.append((f"<|im_start|>system\n{system_text(system, tools)}<|im_end|>\n", QUIET))
    for message in rest:
        role = message["role"]
        if role == "assistant":
            out.append(("<|im_start|>assistant\n", QUIET))
            out += learned(message["content"] + "<|im_end|>", message.get("weight", 1.0))
            out.append(("\n", QUIET))
        elif role == "tool":
            out.append(
                (f"<|im_start|>tool\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n", QUIET)
            )
        else:
            out.append((f"<|im_start|>{role}\n{message['content']}<|im_end|>\n", QUIET))
    return out


def chat_prompt(messages: list[dict], tools: list[dict] | None, think: bool = False) -> str:
    """The text that a server would feed the model before the answer."""
    text = "".join(t for t, _ in chat_segments(messages, tools)) + "<|im_start|>assistant\n"
    return text + "<think>\n" if think else text


def case_segments(case: Case) -> list[Segment]:
    """A training sample of a case, end mark included."""
    if case.messages:
        return [*chat_segments(case.messages, case.tools), ("<|endoftext|>", QUIET)]
    return learned(case.prompt + case.continuation + "<|endoftext|>", 1.0)


def case_prompt(case: Case) -> str:
    """The evaluation prompt of a case: everything before its answer."""
    if case.messages:
        return chat_prompt(case.messages[:-1], case.tools, case.think)
    return case.prompt
