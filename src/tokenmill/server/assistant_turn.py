"""What a request wants of the assistant's turn. Owns: turning tools and reasoning into parameters for the engine, and
the reader of the model's text. Every API with messages uses it.

Must not know: HTTP, any one API's shapes, formats by name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.server.errors import quoted
from tokenmill.text.codec import Tokenizer
from tokenmill.text.messages.calls import MAX_NAME
from tokenmill.text.messages.describe import MessageFormat, Thinking
from tokenmill.text.messages.detect import closed_thinking, opens_thinking, thinks_by_itself
from tokenmill.text.messages.families import PLAIN
from tokenmill.text.messages.message import Message
from tokenmill.text.messages.parser import MessageParser
from tokenmill.text.messages.span import control_marks, reasoning_span
from tokenmill.text.messages.structural_tags import Tree, const, held_calls, literals, triggered_calls

Template = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class ToolWish:
    """The tools of a request: functions by name, with the schema of their parameters. `choice`: none, auto or required;
    `named`: the one that must be called."""

    tools: Mapping[str, Any] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def wanted(self) -> bool:
        """Are calls allowed?"""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Is a call required?"""
        return self.wanted and (self.choice == "required" or self.named is not None)


@dataclass(frozen=True, slots=True)
class Turn:
    """How to read the model's answer."""

    form: MessageFormat
    tools: Mapping[str, Any] | None = None
    thinking: bool = False
    drop: tuple[str, ...] = ()
    most: int | None = None
    named: bool = False

    @property
    def plain(self) -> bool:
        """Is the text the whole message, without calls or reasoning?"""
        return self.form == MessageFormat() or (self.tools is None and self.form.thinking is None)

    def parser(self) -> MessageParser:
        """A parser for one output."""
        return MessageParser(self.form, tools=self.tools, thinking=self.thinking, drop=self.drop, most=self.most)

    def read(self, text: str) -> Message:
        """Read a complete output."""
        parser, message = self.parser(), Message()
        message.add(parser.feed(text))
        message.add(parser.finish())
        return message

    def finish_reason(self, given: str | None, calls: int) -> str | None:
        """`tool_calls` for a turn that ended with calls chosen by the model. A call of a named function keeps
        `stop`."""
        return "tool_calls" if given == "stop" and calls and not self.named else given

    def call_id(self, given: str | None, start: str = "call_") -> str:
        """A call's id: the model's own, or a new one in this API's form (nine characters if the template demands
        that)."""
        if given:
            return given
        short = self.form.calls is not None and self.form.calls.name.startswith("mistral")
        return secrets.token_hex(5)[:9] if short else f"{start}{secrets.token_hex(12)}"


def plan_turn(
    form: MessageFormat,
    wish: ToolWish,
    params: SamplingParams,
    prompt: str,
    *,
    tokenizer: Tokenizer | None,
    template: Template,
    separate: bool = True,
    continued: str = "",
) -> tuple[Turn, SamplingParams]:
    """How to read the turn, and the parameters for the engine. `separate`: reasoning is separated from the answer.
    `continued`: the text that the answer continues."""
    marks = control_marks(tokenizer)
    check_wish(wish, marks)
    if wish.wanted and not wish.forced and form.calls is None:
        raise ParameterError(
            "This model's chat template shows no format for tool calls: name one with --tool-call-parser, or use "
            "tool_choice 'required'.",
            param="tools",
        )
    thinking = form.thinking
    inside = opens_thinking(prompt, thinking, continued)
    may = inside or (thinks_by_itself(template, thinking) and not closed_thinking(prompt, thinking))
    span = thinking if may else None
    structure, calls = params.structured_outputs, form.calls
    if wish.wanted:
        structure, calls = _structure(form, wish, structure, span, inside, marks)
    elif structure is not None and span is not None and span.answer:
        tree, more = _as_tree(structure)
        structure = _tagged(_lead(span, inside, span.answer, tree), more)
    if isinstance(structure, dict) and (tag := _tag_of(structure)) is not None:
        structure = {**structure, "structural_tag": _with_tokens(tag, marks)}
    if structure is not None and calls is not None and calls.ends_thinking:
        calls = replace(calls, ends_thinking=False)  # the structure begins where reasoning ends by its own mark
    reads = MessageFormat(thinking if separate else None, calls)
    turn = Turn(reads, wish.tools if wish.wanted else None, inside and separate)
    turn = replace(turn, most=None if wish.parallel and wish.named is None else 1, named=wish.named is not None)
    changes: dict[str, Any] = {"structured_outputs": structure}
    if span is not None and (structure is not None or params.thinking_token_budget is not None):
        # If the format has a head for answers, the structure says itself how reasoning precedes it.
        changes["reasoning"] = reasoning_span(span, inside, marks) if structure is None or not span.answer else None
        if span.answer and structure is not None and params.thinking_token_budget is not None:
            raise ParameterError(
                "thinking_token_budget cannot be combined with a structure in this model's format.",
                param="thinking_token_budget",
            )
    if not turn.plain and tokenizer is not None and params.skip_special_tokens:
        hidden = {text for text, number in marks.items() if number in tokenizer.special_ids}
        if any(text in marker for marker in reads.markers() for text in hidden):
            changes["skip_special_tokens"] = False
            turn = replace(turn, drop=tuple(sorted(hidden)))
    return turn, msgspec.structs.replace(params, **changes)


def check_wish(wish: ToolWish, marks: Mapping[str, int]) -> None:
    """Refuse names and choices that no turn could have. marks: the model's control tokens."""
    for name in wish.tools if wish.wanted else ():
        if len(name) > MAX_NAME:
            raise ParameterError(
                f"tools names a function with {len(name)} characters; at most {MAX_NAME} can be read.", param="tools"
            )
        if (mark := next((mark for mark in marks if mark in name), None)) is not None:
            raise ParameterError(
                f"tools names a function {quoted(name)}: {mark} is a control token of this model, which no name can "
                "hold.",
                param="tools",
            )
    if wish.named is not None and wish.named not in wish.tools:
        raise ParameterError(
            f"tool_choice names {quoted(wish.named)}, which is not among the tools.", param="tool_choice"
        )
    if wish.choice == "required" and not wish.tools:
        raise ParameterError("tool_choice needs tools.", param="tool_choice")


def _structure(
    form: MessageFormat,
    wish: ToolWish,
    given: dict[str, Any] | None,
    span: Thinking | None,
    inside: bool,
    marks: Mapping[str, int],
) -> tuple[dict[str, Any] | None, Any]:
    """The structure that holds the model to its tools, and the format that its calls will have."""
    most = None if wish.parallel and wish.named is None else 1
    tools = wish.tools if wish.named is None else {wish.named: wish.tools[wish.named]}
    if wish.forced:
        tree, calls = held_calls(form.calls or PLAIN, tools, most=most)
        return _tagged(_lead(span, inside, "", tree)), calls
    loose = {name: schema if name in wish.strict else {"type": "object"} for name, schema in tools.items()}
    assert form.calls is not None
    if given is not None:
        tree, calls = held_calls(form.calls, loose, most=most)
        body, more = _as_tree(given)
        _check_tokens(more.get("special_tokens"), literals(tree), marks)
        answer = _lead(span, inside, span.answer if span is not None else "", body)
        return _tagged({"type": "or", "elements": [answer, _lead(span, inside, "", tree)]}, more), calls
    if not wish.strict:
        return None, form.calls
    held = triggered_calls(form.calls, loose)
    if held is None:
        raise ParameterError(
            f"strict tools cannot be enforced in this model's format ({form.calls.name}) while calling is optional: "
            "use tool_choice 'required', or leave strict out.",
            param="tools",
        )
    return _tagged(held), form.calls


def _tagged(tree: Tree, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """more: what a person's own tag says besides its format."""
    return {"structural_tag": {**(more or {}), "type": "structural_tag", "format": tree}}


def _check_tokens(given: Any, calls: list[str], marks: Mapping[str, int]) -> None:
    """A tree has one table of tokens, so a person's must not change the texts of calls."""
    for text, number in given.items() if isinstance(given, dict) else ():
        if marks.get(text) != number and text and any(text in literal for literal in calls):
            raise ParameterError(
                f"structural_tag: special_tokens makes {quoted(text)} a token, which is text in this model's tool "
                "calls.",
                param="structured_outputs",
            )


def _lead(span: Thinking | None, inside: bool, head: str, body: Tree) -> Tree:
    """Reasoning before an answer, spelled out for formats that have a head for both."""
    if span is None or not span.answer:
        return body
    thought: Tree = {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "" if inside else span.open, "content": {"type": "any_text"}, "end": span.close},
            const(span.lead),
        ],
    }
    first = thought if inside else {"type": "optional", "content": thought}
    return {"type": "sequence", "elements": [first, *([const(head)] if head else []), body]}


def _as_tree(structure: dict[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """A structure as a part of a tree, and what else it says."""
    given = {k: v for k, v in structure.items() if v is not None and v is not False}
    if set(given) == {"json"}:
        return {"type": "json_schema", "json_schema": given["json"]}, {}
    if set(given) == {"json_object"}:
        return {"type": "json_schema", "json_schema": {"type": "object"}}, {}
    if set(given) == {"regex"}:
        return {"type": "regex", "pattern": given["regex"]}, {}
    if set(given) == {"choice"} and isinstance(given["choice"], list):
        return {"type": "or", "elements": [const(c) for c in given["choice"]]}, {}
    tag = _tag_of(given) if set(given) == {"structural_tag"} else None
    if tag is not None and "format" in tag:
        return tag["format"], {name: value for name, value in tag.items() if name not in ("type", "format")}
    raise ParameterError(
        f"{', '.join(sorted(given))} cannot be combined with tools or this model's format; json, regex, choice and a "
        "structural_tag with a format can.",
        param="structured_outputs",
    )


def _tag_of(structure: Mapping[str, Any]) -> dict[str, Any] | None:
    """The structural tag of a structure, which may be given as JSON text."""
    tag = structure.get("structural_tag")
    if isinstance(tag, str):
        with contextlib.suppress(ValueError, RecursionError):
            tag = json.loads(tag)
    return tag if isinstance(tag, dict) else None


def _with_tokens(tag: dict[str, Any], marks: Mapping[str, int]) -> dict[str, Any]:
    """Add the ids of the control tokens that a tree's texts contain."""
    texts = literals(tag.get("format"))
    used = {mark: number for mark, number in marks.items() if any(mark in text for text in texts)}
    given = tag.get("special_tokens") or {}
    return {**tag, "special_tokens": {**used, **given}} if used and isinstance(given, dict) else tag
