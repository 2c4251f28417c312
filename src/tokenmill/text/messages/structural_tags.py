"""Descriptions as structural tags: what holds a model to its own format. Owns: writing calls as a tree of formats.

The tree is plain data (structured/tags.py reads it). A family whose arguments are no JSON is held to them where each
parameter is a plain string or JSON; else, and for Python syntax, to the plain form. So are tools with names that the
family's own form would lose. Must not know: grammars, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenmill.text.messages.describe import (
    Args,
    CallFormat,
    Calls,
    Id,
    Lit,
    MessageFormat,
    Name,
    Object,
    Pairs,
    Skip,
    Step,
)
from tokenmill.text.messages.families import PLAIN
from tokenmill.text.messages.parser import parse_message

Tree = dict[str, Any]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT_ONLY = frozenset({"type", "description", "title", "default", "examples"})


def const(text: str) -> Tree:
    """A fixed text."""
    return {"type": "const_string", "value": text}


def held_calls(form: CallFormat, tools: Mapping[str, Any], *, most: int | None) -> tuple[Tree, CallFormat]:
    """At least one call and nothing else -> the tree, and the format that reads it."""
    block = form.blocks[0]
    bodies = [_call(block, name, schema) for name, schema in tools.items()]
    if any(body is None for body in bodies) or not all(_is_read_back(block, name) for name in tools):
        form, block = PLAIN, PLAIN.blocks[0]
        bodies = [_call(block, name, schema) for name, schema in tools.items()]
    calls = [body for body in bodies if body is not None]
    one = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    head = block.open + ("[" if block.array else "")
    tail = ("]" if block.array else "") + ("" if block.ends else block.close)
    most = 1 if block.ends else most
    if block.many or block.array:
        # A lexer that has begun one literal cannot turn to another: where both begin alike they are told apart in one.
        shared = bool(block.between) and block.close.startswith(block.between)
        inner = one if most == 1 else _led_row(one, block.between) if shared else _row(one, block.between)
        return _sequence(const(head), inner, const(tail)), form
    whole = _sequence(const(head), one, const(tail))
    return whole if most == 1 else _row(whole, form.between), form


def triggered_calls(form: CallFormat, tools: Mapping[str, Any]) -> Tree | None:
    """Free text in which each call that begins must be right; None: this format cannot be held to that."""
    block = next((b for b in form.blocks if b.open), None)
    if block is None or block.array or block.many:
        return None  # where several calls share a block, the first of them alone would be held
    tags = []
    for name, schema in tools.items():
        body = _call(block, name, schema)
        if body is None or not _is_read_back(block, name):
            return None
        tags.append({"type": "tag", "begin": block.open, "content": body, "end": "" if block.ends else block.close})
    return {"type": "triggered_tags", "triggers": [block.open.strip()], "tags": tags}


def _is_read_back(block: Calls, name: str) -> bool:
    """Is a call of this function read as one? Formats in which a name stands bare end it at some character."""
    body = _call(block, name, None)
    if body is None:
        return False
    written = "".join("0" if part["type"] == "regex" else part.get("value", "{}") for part in body["elements"])
    text = block.open + (f"[{written}]" if block.array else written) + block.close
    said = parse_message(MessageFormat(None, CallFormat("", (block,))), text, tools={name: None})
    return [call.name for call in said.calls] == [name] and not said.content


def _sequence(*parts: Tree) -> Tree:
    return {"type": "sequence", "elements": [p for p in parts if p.get("value", True)]}


def _row(one: Tree, between: str) -> Tree:
    tag = {"type": "tag", "begin": "", "content": one, "end": ""}
    return {"type": "tags_with_separator", "tags": [tag], "separator": between, "at_least_one": True}


def _led_row(one: Tree, between: str) -> Tree:
    return _sequence(one, {"type": "star", "content": _led(one, between)})


def _led(tree: Tree, text: str) -> Tree:
    """The same tree with a text before its first literal."""
    if tree["type"] == "const_string":
        return const(text + tree["value"])
    if tree["type"] == "or":
        return {**tree, "elements": [_led(part, text) for part in tree["elements"]]}
    if tree["type"] == "sequence":
        return {**tree, "elements": [_led(tree["elements"][0], text), *tree["elements"][1:]]}
    return _sequence(const(text), tree)


def _call(block: Calls, name: str, schema: Any) -> Tree | None:
    parts: list[Tree] = []
    for step in block.steps:
        made = _step(step, name, schema)
        if made is None:
            return None
        parts += made
    return _sequence(*parts)


def _step(step: Step, name: str, schema: Any) -> list[Tree] | None:
    arguments = {"type": "json_schema", "json_schema": NO_ARGUMENTS if schema is None else schema, "title": name}
    if isinstance(step, Lit):
        return [const(step.text)]
    if isinstance(step, Skip):
        return [const(step.written + step.until)]
    if isinstance(step, Id):
        return [const(step.until)]
    if isinstance(step, Args):
        return [arguments]
    if isinstance(step, Name):
        return _name(step, name)
    if isinstance(step, Object):
        head = f"{{{json.dumps(step.name[0])}: {json.dumps(name, ensure_ascii=False)}, {json.dumps(step.args[0])}: "
        return [const(head), arguments, const("}")]
    return _pairs(step, name, schema) if isinstance(step, Pairs) else None


def _name(step: Name, name: str) -> list[Tree]:
    end = "" if step.keep else step.until[0]
    before, found, after = step.written.partition("{index}")
    if not found:
        return [const(step.written.format(name=name) + end)]
    return [const(before.format(name=name)), {"type": "regex", "pattern": "[0-9]{1,2}"}, const(after + end)]


def _pairs(step: Pairs, name: str, schema: Any) -> list[Tree] | None:
    """Parameters in the schema's order; None where one is neither plain text nor JSON."""
    schema = NO_ARGUMENTS if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        return None
    if set(schema) - {"type", "properties", "required", "additionalProperties", "description", "title", "$defs"}:
        return None
    listed, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list) or set(required) - set(listed):
        return None
    if schema.get("additionalProperties", False) not in (False, True) or "$ref" in json.dumps(schema):
        return None
    parts: list[Tree] = []
    for key, value in listed.items():
        made = _pair(step, name, key, value)
        if made is None:
            return None
        parts.append(made if key in required else {"type": "optional", "content": made})
    return parts


def _pair(step: Pairs, name: str, key: str, value: Any) -> Tree | None:
    if key != key.strip() or step.mid.split()[0] in key:
        return None  # its end would not be found
    begin, text_begin = step.open + key + step.mid, step.open + key + (step.text_mid or step.mid)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "string" and not set(value) - _TEXT_ONLY:
        return {"type": "tag", "begin": text_begin, "content": {"type": "any_text"}, "end": step.close}
    choices = value.get("enum") if isinstance(value, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices):
        if any(step.close.strip() in choice for choice in choices):
            return None
        options = {"type": "or", "elements": [const(c) for c in choices]}
        return {"type": "tag", "begin": text_begin, "content": options, "end": step.close}
    if kind in ("integer", "number", "boolean", "object", "array", "null"):
        body = {"type": "json_schema", "json_schema": value, "title": f"{name}.{key}"}
        return {"type": "tag", "begin": begin, "content": body, "end": step.close}
    return None


def literals(tree: Any) -> list[str]:
    """Every fixed text in a tree, for finding the control tokens in them."""
    if isinstance(tree, list):
        return [text for part in tree for text in literals(part)]
    if not isinstance(tree, dict):
        return []
    found: list[str] = []
    for key in ("value", "begin", "end", "separator", "token", "triggers"):
        given = tree.get(key)
        found += [text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)]
    return found + [text for k in ("elements", "content", "tags") for text in literals(tree.get(k))]
