"""From each kind of structure to the grammar engine's text. Owns: regex, choice, Lark, GBNF and structural tags.

Must not know: tokens, caching, requests. JSON schemas inside grammars are lowered like all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from tokenmill.structured import regex
from tokenmill.structured.classes import Ranges
from tokenmill.structured.compiled_grammar import UNFORCED
from tokenmill.structured.emit import Emitter
from tokenmill.structured.gbnf import read_gbnf
from tokenmill.structured.lexemes import Lexemes
from tokenmill.structured.limits import MAX_LITERAL, MAX_SPEC_BYTES, refuse
from tokenmill.structured.schema import SchemaReader, parse
from tokenmill.structured.shapes import At
from tokenmill.structured.tags import RulePart, TagGrammar, check_fields

MAX_CHOICES = 10_000
MAX_TAGS = 256
WHITESPACE: Ranges = ((9, 10), (13, 13), (32, 32))
USUAL_WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,64}"
"""White space allowed between JSON's tokens by default: one or two blanks, or a line end and indentation. Without a
bound, a model that has lost its way spends all its tokens on white space."""


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """vLLM's switches: no white space, a pattern for white space, and closed objects unless a schema says otherwise."""

    compact: bool = False
    whitespace: str | None = None
    closed: bool = False

    def options(self) -> Any:
        """The options in the engine's form; `lenient` is never set."""
        # One spelling per character: with \u0061 a listed name could come again under rules for unlisted ones.
        spelling = {"json_allowed_escapes": '"\\bfnrt'}
        if self.compact:
            return {**spelling, "whitespace_flexible": False}
        return {**spelling, "whitespace_pattern": USUAL_WHITESPACE if self.whitespace is None else self.whitespace}


def json_style(compact: bool, whitespace: Any, closed: bool) -> JsonStyle:
    """Checked switches."""
    if whitespace is None:
        return JsonStyle(compact, None, closed)
    if compact or not isinstance(whitespace, str):
        refuse("whitespace_pattern must be a regular expression, without disable_any_whitespace.")
    try:
        if not regex.only_chars(whitespace, WHITESPACE):
            refuse("whitespace_pattern may only match spaces, tabs and line ends: anything else is no JSON.")
        return JsonStyle(False, regex.whole(whitespace), closed)
    except regex.RegexError as error:
        refuse(f"whitespace_pattern: {error}.")


def lower(schema: Any, style: JsonStyle) -> dict[str, Any]:
    """The plain schema of the same values; refuses what cannot be enforced."""
    reader = SchemaReader(_of_object(parse(schema)), closed=style.closed)
    return Emitter(reader.algebra).document(At(()))


def _of_object(schema: Any) -> Any:
    """A schema that has properties and leaves out its type asks for an object: examples of other engines rely on that.
    Without the type, any number would fit, too."""
    bare = isinstance(schema, dict) and "properties" in schema and _CHOICES.isdisjoint(schema)
    return {**schema, "type": "object"} if bare else schema


_CHOICES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "not", "if"})
"""What says by itself which values a schema takes."""


def from_schema(schema: Any, style: JsonStyle) -> str:
    """A JSON schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(lower(schema, style)), overrides=style.options())


def _embedded(schema: Any, style: JsonStyle) -> str:
    """A schema as it stands inside of a Lark grammar."""
    return json.dumps(lower(schema, style) | {"x-guidance": style.options()})


def from_regex(pattern: Any) -> str:
    """The whole text matches."""
    _text("regex", pattern)
    try:
        return LLMatcher.grammar_from_regex(regex.whole(pattern))
    except regex.RegexError as error:
        refuse(f"regex: {error}.")


def from_choice(choices: Any) -> str:
    """One of several texts."""
    if (
        not isinstance(choices, list | tuple)
        or not 0 < len(choices) <= MAX_CHOICES
        or not all(isinstance(c, str) and 0 < len(c) <= MAX_LITERAL for c in choices)
    ):
        refuse(f"choice must be a list of 1 to {MAX_CHOICES} strings of 1 to {MAX_LITERAL} characters.")
    texts = [c.encode("utf-8", "replace").decode() for c in dict.fromkeys(choices)]
    if sum(map(len, texts)) > MAX_SPEC_BYTES:
        refuse(f"choice holds more than {MAX_SPEC_BYTES >> 10} KiB.")
    return LLMatcher.grammar_from_regex("|".join(regex.literal(c) for c in texts))


_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]?start\s*(?:\[[^\]\n]*\]\s*)?:(?!:=))")
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/')
_OPTIONS = re.compile(r"(?m)^\s*[?!]?[\w-]+\s*\[([^\]\n]*)\]\s*:")
NO_EFFECT = ("capture", "stop", "stop_capture", "temperature")
"""Options of a rule in Lark that nothing here follows: what they say would be lost without a word."""
SETTINGS = ("no_forcing", "allow_initial_skip", "allow_invalid_utf8", "ignore_once")


def from_grammar(text: Any) -> str:
    """Lark (as llguidance reads it) or GBNF."""
    _text("grammar", text)
    if _LARK.search(text):
        return _lark(text)
    if "::=" not in text:
        refuse("grammar must be Lark (with a rule `start:`) or GBNF (with a rule `root ::=`).")
    try:
        lexemes = Lexemes(read_gbnf(text))
        whole = lexemes.regular()
        return LLMatcher.grammar_from_lark(lexemes.document()) if whole is None else LLMatcher.grammar_from_regex(whole)
    except RecursionError:
        refuse("grammar: it is nested too deeply.")
    except regex.RegexError as error:
        refuse(f"grammar: {error}.")


def _lark(text: str) -> str:
    for found in _OPTIONS.finditer(_TEXTS.sub("", text)):
        for name in re.findall(r"\w+", found[1]):
            if name in NO_EFFECT:
                refuse(f"grammar: the option {name!r} of a rule has no effect here.")
    for _, given, _ in _objects(text, "%llguidance"):
        unknown = sorted(set(given) - set(SETTINGS)) if isinstance(given, dict) else []
        if unknown:
            refuse(f"grammar: %llguidance has no setting {unknown[0]!r}; it has {', '.join(SETTINGS)}.")
    return LLMatcher.grammar_from_lark(f"{_lower_inside(text)}\n{UNFORCED}\n")


def _lower_inside(text: str) -> str:
    """Lower the schemas of `%json {...}` parts; the engine's own options for them are not offered."""
    parts = []
    at = 0
    for begun, schema, end in _objects(text, "%json"):
        parts += [text[at:begun], _embedded(schema, JsonStyle())]
        at = end
    return "".join([*parts, text[at:]])


def _objects(text: str, word: str) -> Iterator[tuple[int, Any, int]]:
    """Where the JSON behind each of these words begins, what it is, and where it ends."""
    at = 0
    for found in re.finditer(rf"{word}\s*", text):
        if found.start() < at:
            continue
        try:
            given, at = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            refuse(f"grammar: {word} must be followed by JSON.")
        yield found.end(), given, at


def from_tags(given: Any, style: JsonStyle) -> str:
    """A tree of formats; or free text, in which each trigger begins a structure: its begin, JSON of its schema, its
    end."""
    spec = _tag_spec(given)
    if "format" in spec:
        check_fields(spec, ("type", "format", "special_tokens"), "structural_tag")
        root = spec["format"]
    else:
        root = _triggered_structures(spec)
    writer = TagGrammar(lambda schema: _embedded(schema, style), spec.get("special_tokens") or {})
    return LLMatcher.grammar_from_lark(writer.document(root))


def _triggered_structures(spec: dict[str, Any]) -> dict[str, Any]:
    """The older form as a tree."""
    check_fields(spec, ("type", "structures", "triggers"), "structural_tag")
    structures, triggers = spec.get("structures"), spec.get("triggers")
    if (
        not isinstance(structures, list)
        or not isinstance(triggers, list)
        or not 0 < len(structures) <= MAX_TAGS
        or not all(isinstance(s, dict) and isinstance(s.get("begin"), str) and "end" in s for s in structures)
    ):
        refuse('structural_tag must be {"structures": [{"begin", "schema", "end"}], "triggers": ["..."]}.')
    tags = []
    for each in structures:
        check_fields(each, ("begin", "schema", "end"), "a structure")
        content = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _tag_spec(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        _text("structural_tag", given)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            refuse("structural_tag is not JSON.")
    if not isinstance(given, dict):
        refuse("structural_tag must be an object.")
    return given


def after_thinking(text: str, close: str, opened: str, tokens: Any) -> str:
    """A grammar that begins after reasoning, which ends with `close`.

    If `opened` is not empty, reasoning begins so, or there is none. White space may stand after it."""
    writer = TagGrammar(lambda schema: "true", tokens or {})
    thought = writer.row([*writer.literal(opened), RulePart("TEXT", "free"), *writer.literal(close)], False)
    start = f"start: {thought} SPACE @body" + (" | @body" if opened else "")
    outer = "\n".join(["%llguidance {}", start, *writer.rules, "TEXT: /(?s:.*)/", "SPACE: /[ \\n\\r\\t]{0,4}/", ""])
    inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    body = {**inner, "name": "body"}
    return json.dumps({"grammars": [{"lark_grammar": outer}, body]})


def _text(name: str, given: Any) -> None:
    if given == "":
        refuse(f"{name} must not be empty.")
    if not isinstance(given, str) or len(given) > MAX_SPEC_BYTES:
        refuse(f"{name} must be a text of at most {MAX_SPEC_BYTES >> 10} KiB.")
