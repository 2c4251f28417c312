"""What a value of an option may be. Owns: its type, choices and bounds, and how a wrong one is told.

Files of models and keywords bring values of every type; the option's annotation says which one is meant. Must not know:
what options do, where values come from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import Field
from typing import Any, get_origin

from tokenmill.core.bounds import ALL, MOST, POSITIVE
from tokenmill.core.errors import ParameterError, shown


def but_got(value: object, item: Field) -> str:
    """The end of a sentence about a wrong value. A secret is not shown."""
    return f", got {shown(value)}" if item.repr else ""


def check_option(name: str, value: Any, item: Field, kind: Any) -> None:
    """Refuse a value that this option cannot have, whatever the model."""
    choices = item.metadata["choices"]
    if choices and value is not None and value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(choices)}{but_got(value, item)}.", param=name)
    allowed = getattr(kind, "__args__", (kind,))
    numeric = [k for k in allowed if k in (int, float)]
    if value is None and name.endswith("_parallel_size"):
        raise ParameterError(f"{name} must be a number{but_got(value, item)}.", param=name)
    if numeric and bool not in allowed and value is not None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ParameterError(f"{name} must be a number{but_got(value, item)}.", param=name)
        if int in numeric and float not in numeric and not isinstance(value, int):
            raise ParameterError(f"{name} must be an integer{but_got(value, item)}.", param=name)
        positive, most = name in POSITIVE, MOST.get(name)
        if not (value > 0 if positive else value >= 0) and value != ALL.get(name):
            wanted = "be positive" if positive else "not be negative"
            raise ParameterError(f"{name} must {wanted}{but_got(value, item)}.", param=name)
        if value == math.inf or (most is not None and value > most):
            wanted = "finite" if most is None else f"at most {most}"
            raise ParameterError(f"{name} must be {wanted}{but_got(value, item)}.", param=name)
    if allowed == (bool,) and not isinstance(value, bool):
        raise ParameterError(f"{name} must be true or false{but_got(value, item)}.", param=name)
    if str in allowed and not isinstance(value, (str, os.PathLike)) and (value is not None or len(allowed) == 1):
        raise ParameterError(f"{name} must be text{but_got(value, item)}.", param=name)
    if list[str] in allowed and value is not None:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ParameterError(f"{name} must be text or a list of texts{but_got(value, item)}.", param=name)
    if any(get_origin(each) is dict for each in allowed) and value is not None:
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise ParameterError(f"{name} must be an object with names{but_got(value, item)}.", param=name)
