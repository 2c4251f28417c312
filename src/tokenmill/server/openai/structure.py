"""All ways to ask for structured output. Owns: OpenAI's response_format, and the field names of vLLM, SGLang and
llama.cpp.

All become `structured_outputs`, as the engine takes it. Two that disagree are refused. Must not know: grammars.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.server.ceilings import check_ceilings
from tokenmill.server.doubled_names import refuse_doubled_names
from tokenmill.server.errors import renaming_fields
from tokenmill.server.openai.schemas import ResponseFormat, SamplingFields
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse
from tokenmill.structured.lowering import SWITCHES

T = TypeVar("T")
_DIRECT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_NO_GRAMMAR = ("grammar", "")
"""So llama.cpp and its clients write that there is none."""
_OURS = "structured_outputs"
_SWITCHES = frozenset(("json_object", *SWITCHES))
"""Fields in which clients send false to mean "no". (A schema that is false would be one that no value fits.)"""


def structure(body: SamplingFields) -> dict[str, Any] | None:
    """The structured_outputs of a request, or None."""
    found = _asked(body)
    if not found:
        if body.guided_whitespace_pattern is not None:
            raise ParameterError(
                "guided_whitespace_pattern has no effect without a schema beside it.", param="guided_whitespace_pattern"
            )
        return None
    for name, one in found:
        _check_size(name, one)
    first_name, first = found[0]
    for name, other in found[1:]:
        if other != first:
            raise ParameterError(f"Give {first_name} or {name}, not both.", param=name)
    if body.guided_whitespace_pattern is not None:
        first = {**first, "whitespace_pattern": body.guided_whitespace_pattern}
    return first


def structured_by(body: SamplingFields) -> str | None:
    """The first field that asks for a structure."""
    return next((name for name, _ in _asked(body)), None)


def blaming_structure(body: SamplingFields) -> AbstractContextManager[None]:
    """Inside this context, an error about a structure names the field that holds it, which may be `tools`."""
    name = structured_by(body) or ("tools" if getattr(body, "tools", None) else _OURS)
    return nullcontext() if name == _OURS else renaming_fields({_OURS: name})


def _asked(body: SamplingFields) -> list[tuple[str, dict[str, Any]]]:
    """Every field that asks for a structure, with what it asks for."""
    asked = body.structured_outputs or {}
    given = {k: v for k, v in asked.items() if v is not None and (v is not False or k not in _SWITCHES)}
    if "json" in given:
        given["json"] = _plain_json(_OURS, given["json"])
    found = [(_OURS, given)] if body.structured_outputs is not None else []
    for name, kind in _DIRECT.items():
        value = getattr(body, name, None)
        if value is not None and (name, value) != _NO_GRAMMAR:
            found.append((name, {kind: _plain_json(name, value) if kind == "json" else value}))
    form = _response_format(body.response_format)
    if form is not None:
        found.append(("response_format", form))
    return found


def _check_size(name: str, given: dict[str, Any]) -> None:
    """Refuse a structure that is too large, or that cannot be written, before it is sent to an engine."""
    try:
        size = len(msgspec.json.encode(given))
    except RecursionError:
        size = 2 * MAX_SPEC_BYTES + 1
    except UnicodeEncodeError:
        raise ParameterError(
            f"{name} holds half a character (\\ud800 to \\udfff), which is not text.", param=name
        ) from None
    if size > 2 * MAX_SPEC_BYTES:  # the size as written; the engine checks the exact limit when it lowers the structure
        refuse(f"it is larger than {MAX_SPEC_BYTES >> 10} KiB, or nested too deeply.")


def _plain_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    _check_size(name, {name: value})
    counts = check_ceilings(value.encode("utf-8", "replace"))
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise ParameterError(f"{name} is not valid JSON.", param=name) from None
    refuse_doubled_names(value, found, counts, name)
    return found


def _response_format(form: ResponseFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.schema_ is not None and form.value is not None:
        raise ParameterError("Give response_format.schema or value, not both.", param="response_format.value")
    if form.type == "regex":
        return {"regex": _value(form, str, "a pattern")}
    if form.type in ("json", "json_object"):
        schema = form.schema_
        if schema is None and (form.type == "json" or form.value is not None):
            schema = _value(form, dict, "a schema")
        return {"json_object": True} if schema is None else {"json": schema}
    if form.type == "structural_tag":
        if form.format is not None:
            return {"structural_tag": {"type": "structural_tag", "format": form.format}}
        if form.structures is None or form.triggers is None:
            raise ParameterError(
                "response_format structural_tag needs format, or structures and triggers.", param="response_format"
            )
        return {"structural_tag": {"structures": form.structures, "triggers": form.triggers}}
    schema = form.json_schema.schema_ if form.json_schema is not None else form.schema_
    if schema is None and form.json_schema is None and form.value is not None:
        schema = _value(form, dict, "an object").get("schema")
    if not isinstance(schema, dict):
        raise ParameterError("response_format json_schema needs json_schema.schema.", param="response_format")
    return {"json": schema}


def _value(form: ResponseFormat, kind: type[T], what: str) -> T:
    if not isinstance(form.value, kind):
        text = f"response_format {form.type} needs {what} in value."
        raise ParameterError(text, param="response_format")
    return form.value
