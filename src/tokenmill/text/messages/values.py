"""Values that are not written as JSON, as JSON text. Owns: Python literals, bare-key objects, text by schema type; and
halves of characters, which JSON can escape and no text can hold.

Nothing is evaluated. What cannot be read as a value becomes a string, as it stands. Must not know: formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100
_TOKEN = re.compile(
    r"""(\s+)|[rbuRBU]{0,2}('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([A-Za-z_]\w*)|([^\s'"A-Za-z_(){}\[\],:]+)|(.)""",
    re.DOTALL,
)
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
"""Strings, in which brackets are text, and brackets. The end of all ends a string: each place is looked at once."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(\n)|(.))", re.DOTALL)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": "[", ")": "]"}
_POINT = re.compile(r"(-?)(?=\.?\d)(\d*)\.(\d*)")
_CONTROLS = re.compile("[\x00-\x1f]")
_HALF = re.compile("[\ud800-\udfff]")
_LOOSE = re.compile(r"([^\s,:{}\[\]]+)(\s*:)?|(.)", re.DOTALL)


def text(value: str) -> str:
    """A JSON string."""
    return json.dumps(value, ensure_ascii=False)


def escaped(piece: str) -> str:
    """A piece of a JSON string, without the quotes."""
    return text(piece)[1:-1]


def escaped_controls(piece: str) -> str:
    """A piece of a JSON string in which control characters are escapes, as JSON demands."""
    return _CONTROLS.sub(lambda found: escaped(found[0]), piece)


def is_json(given: str) -> bool:
    """Is it one JSON value (strictly), not nested beyond reason?"""
    depth = most = 0
    for mark in _NESTING.findall(given):
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        most = max(most, depth)
    if most > MAX_DEPTH:
        return False
    try:
        json.loads(given, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def without_halves(given: str) -> str:
    """The text with U+FFFD in place of every half of a character."""
    return _HALF.sub("\ufffd", given)


def read_arguments(given: str) -> dict[str, Any]:
    """A call's arguments as an object. Empty if the model wrote something else, or nested it beyond reason."""
    found = json.loads(given) if is_json(given) else None
    return _whole(found) if isinstance(found, dict) else {}


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {without_halves(k): _whole(v) for k, v in value.items()} if isinstance(value, dict) else value


def _refuse(name: str) -> Any:
    raise ValueError(name)


def from_python(given: str) -> str:
    """A Python literal as JSON; a string of it if it is none."""
    parts: list[str] = []
    strings: list[str] = []

    def join() -> None:
        if strings:
            parts.append(text("".join(strings)))
            strings.clear()

    for space, string, word, number, mark in _TOKEN.findall(given):
        if string:  # neighbours are one string
            strings.append(_ESCAPE.sub(_unescape, string[1:-1]))
            continue
        if not space:
            join()
            if mark in (")", "]", "}") and parts[-1:] == [","]:
                parts.pop()
            parts.append(_WORDS.get(word, word) or _number(number) or _BRACKETS.get(mark, mark))
    join()
    made = "".join(parts)
    return made if is_json(made) else text(given.strip())


def _number(given: str) -> str:
    """A number without a digit before or behind its point, as JSON has it."""
    found = _POINT.fullmatch(given)
    return given if found is None else f"{found[1]}{found[2] or '0'}.{found[3] or '0'}"


def _unescape(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        value = int(code, 16)
        return "\ufffd" if 0xD800 <= value < 0xE000 else chr(value)
    if found[3]:
        return ""
    return _CONTROL.get(found[4], found[4] if found[4] in "\\'\"" else found[0])


def loose_part(given: str) -> str:
    """A piece between brackets and quoted strings of a bare-key object, as JSON."""
    parts = []
    for word, colon, mark in _LOOSE.findall(given):
        if not word:
            parts.append("" if mark.isspace() else mark)
        elif colon:
            parts.append(text(word) + ":")
        else:
            parts.append(word if is_json(word) else text(word))
    return "".join(parts)


def types_of(schema: Any, name: str) -> frozenset[str]:
    """The JSON types that a function's schema allows its parameter; none: nothing is said."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(_types(found.get(name))) if isinstance(found, Mapping) else frozenset()


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    given = schema.get("type")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return [t for t in given if isinstance(t, str)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return ["string" if isinstance(v, str) else "other" for v in values]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return [t for part in schema[keyword] for t in _types(part)]
    return []


def by_type(given: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON, as its types have it."""
    plain = given.strip()
    if "string" in types and not (plain == "null" and "null" in types):
        return text(given)
    if plain in ("True", "False", "None") and not types & {"string"}:
        return _WORDS[plain]
    if is_json(plain):
        return plain
    literal = from_python(plain) if types & {"array", "object"} and not types & {"string"} else ""
    return literal if literal[:1] in ("[", "{") else text(given)
