"""How one object's names are judged. Owns: Refusal, Companion and ObjectRules.

A name is read here or on the list of harmless ones, is refused by name, or is unknown. Must not know: any one API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
