"""What is wrong with a body, in one sentence. Owns: which of pydantic's errors is shown, and in which API's names.

Must not know: HTTP, any one API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from pydantic import BaseModel, ValidationError

MAX_PARAM = 200
Names = Mapping[str, str]
"""A field of OpenAI's request -> the name by which the client's API calls it. `*` stands for a place in a list. The
longest match wins."""

_BRANCHES = frozenset({"str", "list", "dict", "constrained-str", "int", "float", "bool"})
_OUGHT = "Input should be "
_KINDS = frozenset(("literal_error", "model_type", "enum"))


def first_finding(error: ValidationError) -> tuple[str, str]:
    """The field (empty: the body) and what is wrong with it, without the value.

    Every branch of a union reports findings of its own. The branch that came furthest is the one that was meant: a
    finding inside a list counts more than "a list is not a text", and a list that is too long counts more than
    either."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    paths = [_path(each["loc"]) for each in found]
    start = paths[0]
    same = [n for n, path in enumerate(paths) if path[: len(start)] == start]

    def rank(n: int) -> tuple[bool, int, list[int], bool, int]:
        kind = found[n]["type"]
        return kind == "too_long", len(paths[n]), _places(paths[n]), not _of_kind(kind), -n

    best = max(same, key=rank)
    rest = len({path[: len(start)] for path in paths}) - 1
    more = f" (and {rest} more)" if rest > 0 else ""
    message = found[best]["msg"]
    if _of_kind(found[best]["type"]):
        message = _either([found[n]["msg"] for n in same if paths[n] == paths[best]])
    where = ".".join(part[:MAX_PARAM] for part in paths[best])[:MAX_PARAM]
    return where, f"{message}{more}."


def renamed(field: str, names: Names) -> str:
    """A field's name in the other API."""
    parts = field.split(".")
    for count in range(len(parts), 0, -1):
        head = ["*" if part.isdigit() else part for part in parts[:count]]
        if (name := names.get(".".join(head))) is not None:
            places = iter([part for part in parts[:count] if part.isdigit()])
            new_name = ".".join(next(places, "*") if part == "*" else part for part in name.split("."))
            return ".".join([new_name, *parts[count:]])
    return field


def reworded(message: str, field: str, name: str) -> str:
    """A sentence about a field, with the field's other name."""
    return re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w]|\.\w)", lambda _: name, message, count=1)


def _places(path: tuple[str, ...]) -> list[int]:
    """How deep a location lies in lists."""
    return [int(part) for part in path if part.isascii() and part.isdigit()]


def _path(places: Sequence[int | str]) -> tuple[str, ...]:
    return tuple(str(part) for part in places if not _is_branch(part))


def _is_branch(part: int | str) -> bool:
    """Does this part of a location name a branch of a union, not a field?"""
    return isinstance(part, str) and ("[" in part or part in _BRANCHES or part in _models())


@cache
def _models() -> frozenset[str]:
    """The names of models: a union's branch that is a model has its name."""
    names, left = set(), [BaseModel]
    while left:
        for kind in left.pop().__subclasses__():
            names.add(kind.__name__)
            left.append(kind)
    return frozenset(names)


def _of_kind(kind: str) -> bool:
    """Does a finding say that the value is of another kind altogether?"""
    return kind.endswith("_type") or kind in _KINDS


def _either(messages: list[str]) -> str:
    """One sentence that names all kinds that would be right."""
    kinds = dict.fromkeys(messages)
    if len(kinds) > 1 and all(each.startswith(_OUGHT) for each in kinds):
        return _OUGHT + ", or ".join(each.removeprefix(_OUGHT) for each in kinds)
    return messages[0]
