"""Building blocks of schemas. Owns: ceilings of lists and names for every API. A list stops at its first error.

Otherwise pydantic would build an error for each bad item and each branch of a union, a thousand times the size of the
item; `few` stops at the first. Must not know: any one API.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import GroupedMetadata, MaxLen, MinLen
from pydantic import FailFast, Field
from pydantic_core import PydanticCustomError

from tokenmill.server.errors import quoted
from tokenmill.text.template_worker import TEXT_PARTS

MOST_MESSAGES = 8192
MOST_PARTS = 8192
"""Most parts of one message's content, and most calls in it."""
MOST_TOOLS = 1024
MOST_IDS = 1 << 19
MOST_TEXTS = 2048
MOST_METADATA = 16
"""OpenAI's ceiling."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MOST_METADATA)
]
MOST_LABEL = 4096
Label = Annotated[str, Field(max_length=MOST_LABEL)]
"""Ids and names, which a request keeps as long as it lives."""


class few(GroupedMetadata):
    """`Annotated[list[Item], few(10)]`: a list of at most 10 items. It stops at the first bad one."""

    def __init__(self, most: int, least: int = 0) -> None:
        self.most, self.least = most, least

    def __iter__(self) -> Iterator[object]:
        yield FailFast()
        if self.least:
            yield MinLen(self.least)
        yield MaxLen(self.most)


def check_text(kind: str, part: object) -> None:
    """For a schema: refuse a part of this type that lacks its text, because it would be read as nothing."""
    name = TEXT_PARTS.get(kind)
    if name is not None and getattr(part, name) is None:
        raise PydanticCustomError("missing", "A part of type {kind} needs {name}", {"kind": kind, "name": name})


def check_tool(tool: object, *kinds: str | None) -> object:
    """For a schema: refuse a tool of another type first, whatever its fields are. Without a type it is of the first."""
    if isinstance(tool, dict) and (given := tool.get("type", kinds[0])) not in kinds:
        text = "Tools of type {given} are not supported in this version: only those of type {kind} are"
        raise PydanticCustomError("tool", text, {"given": quoted(given), "kind": kinds[0]})
    return tool


@dataclass(frozen=True, slots=True)
class Inside:
    """`Annotated[dict[str, Any], Inside("responses.Item")]`: an object whose names `inputs/` lists under this name."""

    name: str
