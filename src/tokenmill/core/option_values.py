"""What a value of an option may be. Owns: its type, choices and bounds, and how a wrong one is told.

Files of models and keywords bring values of every type; the option's annotation says which one is meant. Must not know:
what options do, where values come from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any, get_origin

from tokenmill.core.bounds import ALL, MOST, POSITIVE
from tokenmill.core.errors import ParameterError, shown


def but_got(value: object, item: Field) -> str:
    """The end of a sentence about a wrong value. A secret is not shown."""
    return f", got {shown(value)}" if item.repr else ""


def check_option(name: str, value: Any, item: Field, kind: Any, *, said: str | None = None) -> None:
    """Refuse a value that this option cannot have, whatever the model. said: what the person calls the option."""
    wanted = _wanted(name, value, item.metadata["choices"], getattr(kind, "__args__", (kind,)))
    if wanted:
        raise ParameterError(f"{said or name} must {wanted}{but_got(value, item)}.", param=name)


def _wanted(name: str, value: Any, choices: Sequence[Any] | None, allowed: tuple[Any, ...]) -> str:
    """What a value must be or not be; "": it may be this one. allowed: the types of the option's values."""
    if value is None:
        if name.endswith("_parallel_size"):
            return "be a number"
        return "be true or false" if allowed == (bool,) else "be text" if allowed == (str,) else ""
    if choices and value not in choices:
        return f"be one of {', '.join(choices)}"
    if {int, float}.intersection(allowed) and bool not in allowed:
        return _wanted_number(name, value, whole=float not in allowed)
    if allowed == (bool,) and not isinstance(value, bool):
        return "be true or false"
    if str in allowed and not isinstance(value, (str, os.PathLike)):
        return "be text"
    if list[str] in allowed:
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            return "be text or a list of texts"
    if any(get_origin(each) is dict for each in allowed):
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            return "be an object with names"
    return ""


def _wanted_number(name: str, value: Any, *, whole: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "be a number"
    if whole and not isinstance(value, int):
        return "be an integer"
    positive, most = name in POSITIVE, MOST.get(name)
    if not (value > 0 if positive else value >= 0) and value != ALL.get(name):
        return "be positive" if positive else "not be negative"
    if value == math.inf or (most is not None and value > most):
        return "be finite" if most is None else f"be at most {most}"
    return ""
