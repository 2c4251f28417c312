"""The names that a pydantic schema takes, and the objects under them. Must not know: any one API."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from tokenmill.server.fields import Inside


def schema_name(schema: type[BaseModel]) -> str:
    """`openai.ChatRequest`: the API's folder and the class."""
    return f"{schema.__module__.split('.')[-2]}.{schema.__name__}"


def spellings(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every name that a schema reads, with its field."""
    found: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        alias = info.validation_alias or info.alias
        names = [name] if alias is None or schema.model_config.get("populate_by_name") else []
        if isinstance(alias, AliasChoices):
            names += [choice for choice in alias.choices if isinstance(choice, str)]
        elif isinstance(alias, str):
            names.append(alias)
        found |= dict.fromkeys(names, info)
    return found


def parts(info: FieldInfo) -> Iterator[type[BaseModel] | str]:
    """The objects under a field: schemas, or the names that `Inside` gives."""
    marks = [mark.name for mark in info.metadata if isinstance(mark, Inside)]
    yield from marks or _models(info.annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel] | str]:
    if typing.get_origin(annotation) is Annotated:
        marks = [mark.name for mark in annotation.__metadata__ if isinstance(mark, Inside)]
        if marks:
            yield from marks
            return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)
