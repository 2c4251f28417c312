"""From one `structured_outputs` to a grammar's text. Owns: which kinds there are, and their switches.

What is not enforced is refused, never ignored. Must not know: tokens, caches, processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.structured import grammar
from tokenmill.structured.limits import refuse

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback")


def lower_spec(spec: Any, reasoning: Mapping[str, Any] | None = None) -> str:
    """The grammar engine's text of a structure; with `reasoning` (close, open, tokens) it begins after that."""
    text = to_grammar(spec)
    if reasoning is None:
        return text
    return grammar.after_thinking(text, reasoning["close"], reasoning["open"], reasoning["tokens"])


def to_grammar(spec: Any) -> str:
    """The grammar engine's text for {"json": ...}, {"regex": ...}, ...; refuses all that it does not enforce."""
    if not isinstance(spec, dict):
        refuse("it must be an object, such as {'json': schema}.")
    said = {k: v for k, v in spec.items() if v is not None and not k.startswith("_")}
    given = {k: v for k, v in said.items() if v is not False or k == "json"}  # a schema that no value fits
    unknown = sorted(set(given) - {*KINDS, *SWITCHES})
    kinds = [k for k in KINDS if k in given]
    if unknown or len(kinds) != 1:
        what = f"{' or '.join(kinds)}, not both" if kinds else "nothing is asked for"
        what = f"{', '.join(map(repr, unknown))} is unknown" if unknown else what
        refuse(f"{what}; give one of {', '.join(KINDS)}.")
    for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
        if given.get(name, True) is not True:
            refuse(f"{name} must be true or false.")
    kind = kinds[0]
    switches = [s for s in SWITCHES[:3] if s in given]
    if switches and kind not in ("json", "json_object", "structural_tag"):
        refuse(f"{switches[0]} applies to JSON only, not to {kind}.")
    style = grammar.json_style(
        "disable_any_whitespace" in given, given.get("whitespace_pattern"), "disable_additional_properties" in given
    )
    value = given[kind]
    if kind == "json":
        return grammar.from_schema(plain_schema(value), style)
    if kind == "json_object":
        return grammar.from_schema({"type": "object"}, style)
    if kind == "structural_tag":
        return grammar.from_tags(value, style)
    return {"regex": grammar.from_regex, "choice": grammar.from_choice, "grammar": grammar.from_grammar}[kind](value)


def plain_schema(value: Any) -> Any:
    """A schema as JSON text or data; pydantic models give theirs."""
    made = getattr(value, "model_json_schema", None)
    return made() if made is not None else value
