"""How one JSON object's names are judged. Owns: Refusal, ObjectRules, and the names that a pydantic schema takes.

A name is in the schema or on the list of harmless ones, is refused by name, or is unknown. Must not know: any one API.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from tokenmill.server.fields import Inside

_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a name is refused, and the neutral values that ask for nothing and are accepted. `loud`: besides those, only
    null is accepted."""

    why: str
    neutral: tuple[Any, ...] = ()
    loud: bool = False

    def asks(self, value: Any) -> bool:
        """Would this value have an effect?"""
        silent = (None,) if self.loud else _NOTHING
        return not any(_same(value, each) for each in (*silent, *self.neutral))


def _same(value: Any, other: Any) -> bool:
    """Are both equal and of one kind? 0 equals 0.0, but neither equals false."""
    numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
    if numbers and isinstance(value, bool) == isinstance(other, bool):
        return value == other
    return type(value) is type(other) and bool(value == other)


@dataclass(frozen=True, slots=True)
class Companion:
    """What a field needs beside it: it has no effect while `other` is absent or holds one of `void`. `neutral`: values
    that ask for nothing, besides those that never do. harmless: it says how something is done, not that it is: clients
    send it whether or not they ask for that."""

    other: str
    void: tuple[Any, ...] = (None, False)
    neutral: tuple[Any, ...] = ()
    harmless: bool = False

    def lacking(self, value: Any, around: Mapping[str, Any]) -> str | None:
        """Why this value has no effect among these fields, in words. None: it has one, or asks for nothing."""
        given = around.get(self.other)
        if (
            self.harmless
            or not Refusal("", self.neutral).asks(value)
            or not any(_same(given, each) for each in self.void)
        ):
            return None
        return f"without {self.other}" if given in (None, False) else f"with {self.other} {given!r}"


@dataclass(frozen=True, slots=True)
class ObjectRules:
    """How the names of one object are judged.

    fields: read here; aliases: other spellings of them; inside: rules of the objects (or lists of objects) under a
    name; validated: a schema reads the object, not a handler by hand; companions: fields that need another one."""

    name: str
    fields: frozenset[str]
    harmless: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, ObjectRules] = field(default_factory=dict)
    validated: bool = True
    companions: Mapping[str, Companion] = field(default_factory=dict)

    @property
    def done(self) -> frozenset[str]:
        """The fields that have an effect."""
        return self.fields - self.harmless.keys()


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
