"""What test_server_strict_types.py and other tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

CALLS = {"async", "caller", "namespace", "created_by"}
OMITTED: dict[str, set[str]] = {
    # Parts of items that stand for what is not here; clients send items back as they are, and old ones know no more.
    "ResponseOutputMessage": {"phase"},
    "Message": {"phase"},
    "ResponseFunctionToolCall": CALLS,
    "ResponseFunctionToolCallItem": CALLS,
    "ResponseFunctionToolCallOutputItem": {"caller", "created_by", "name", "namespace"},
    "ResponseReasoningItem": {"encrypted_content"},
    "ResponseCompactionItem": {"created_by"},
    "ResponseInputText": {"prompt_cache_breakpoint"},
    "FunctionTool": {"allowed_callers", "async", "defer_loading", "output_schema"},
    "Reasoning": {"context", "generate_summary", "mode"},
    "ResponseError": {"misalignment", "param", "type"},
    "InputTokensDetails": {"cache_write_tokens_details"},
}


@cache
def reader(kind: Any) -> TypeAdapter[Any]:
    """Made once: the types of events are large unions."""
    return TypeAdapter(kind)


def strictly(kind: Any, value: Any) -> Any:
    """The value as this type; raises for a wrong type, and for a field that is absent."""
    found = reader(kind).validate_json(json.dumps(value), strict=True)
    for model in models_in(found):
        name = type(model).__name__
        left = type(model).model_fields.keys() - model.model_fields_set
        spelled = {type(model).model_fields[field].alias or field for field in left}
        assert spelled <= OMITTED.get(name, set()), (name, spelled)
    return found


def models_in(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for field in type(value).model_fields:
            yield from models_in(getattr(value, field))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from models_in(each)
    elif isinstance(value, dict):
        yield from models_in(list(value.values()))


def typed(kind: Any, value: Any) -> Any:
    """The value as this type, with all fields that the type needs."""
    return reader(kind).validate_json(json.dumps(value), strict=True)
