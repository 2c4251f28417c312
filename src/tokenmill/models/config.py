"""Reading a model's config.json. Owns: presence, types and bounds of every value a model needs, told by name.

Unusable values are refused before anything is allocated. Knows nothing of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tokenmill.core.errors import ModelError, shown

T = TypeVar("T", int, float, str, bool, list, dict)

_MAX_INT = 1 << 26
_CEILINGS = (
    (re.compile(r"vocab|position|seq_len|length|window|chunk|floor|original"), _MAX_INT),
    (re.compile(r"dim$|heads?(_|$)|groups?$|experts|rank$|state|layers|top_?k|kernel|conv"), 1 << 16),
)
"""Ceilings of whole numbers, by patterns of their names; the first match counts. They are far above any model's values,
and keep small what is made from a number before any tensor is looked at (orders of rows, tables)."""
_MAX_SIZE = 1 << 20
_HUGE = 1e300
_MOST = 1e18
"""The largest number that is not whole, and below zero the smallest: beyond it float32 soon has none."""
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class ModelConfig:
    """A checked view of one JSON object; `path` is where it sits in the file ("" at the top).

    Absent keys already have the defaults of the family (config_fields.py); the default given to `get` stands for null.
    """

    def __init__(self, data: Mapping[str, Any], path: str = "", architecture: str = "") -> None:
        if not isinstance(data, Mapping):
            raise ModelError(f"config.json: {path or 'the file'} must hold an object, not {type(data).__name__}.")
        self.data = data
        self.path = path
        self.architecture = architecture

    def has(self, name: str) -> bool:
        """Does the key exist with a value other than null?"""
        return self.data.get(name) is not None

    def need(self, name: str, kind: type[T], *, low: float | None = None, high: float | None = None) -> T:
        """The value of a key that must exist."""
        if not self.has(name):
            raise ModelError(f"config.json: '{self._full(name)}' is missing; it must be {_WORDS[kind]}.")
        return self._check(name, self.data[name], kind, low, high)

    def get(self, name: str, kind: type[T], default: T, *, low: float | None = None, high: float | None = None) -> T:
        """The value of a key, or `default` if it is absent or null."""
        return self._check(name, self.data[name], kind, low, high) if self.has(name) else default

    def first(self, names: Iterable[str], kind: type[T], default: T | None = None) -> T:
        """The value of the one of these keys that exists. They are names of the same thing, so if there are several,
        they must agree."""
        names = list(names)
        found = [name for name in names if self.has(name)]
        if not found:
            return self.need(names[0], kind) if default is None else default
        for other in found[1:]:
            if self.data[other] != self.data[found[0]]:
                raise self.refuse(other, f"contradicts '{found[0]}' = {shown(self.data[found[0]])}.")
        return self.need(found[0], kind)

    def choice(self, name: str, options: Mapping[str, T], default: str | None = None) -> T:
        """options[value]; a value that is not an option is refused by name."""
        value = self.need(name, str) if default is None else self.get(name, str, default)
        if value not in options:
            raise ModelError(
                f"config.json: {self._full(name)} {shown(value)} is not supported. Known: {_list(options)}."
            )
        return options[value]

    def sub(self, name: str) -> ModelConfig:
        """A nested object (empty if it is absent)."""
        return ModelConfig(self.data.get(name) or {}, self._full(name))

    def refuse(self, name: str, why: str) -> ModelError:
        """The error for a value that is well-formed but not supported."""
        return ModelError(f"config.json: '{self._full(name)}' = {shown(self.data.get(name))} {why}")

    def _full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _check(self, name: str, value: Any, kind: type[T], low: float | None, high: float | None) -> T:
        number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        number = number and not isinstance(value, bool)
        if kind is int and number and value == int(value):
            value = int(value)
        elif kind is float and number:
            value = float(max(min(value, _HUGE), -_HUGE))
        elif kind in (int, float) or not isinstance(value, kind):
            raise ModelError(f"config.json: '{self._full(name)}' must be {_WORDS[kind]}, not {shown(value)}.")
        if kind in (int, float):
            low = (1 if kind is int else -_MOST) if low is None else low
            high = (_ceiling(name) if kind is int else _MOST) if high is None else high
            if not low <= value <= high:
                shown_value = value if abs(value) < 1e18 else f"{float(max(min(value, _HUGE), -_HUGE)):g}"
                raise ModelError(
                    f"config.json: '{self._full(name)}' = {shown_value} is out of bounds ({low:g} to {high:g})."
                )
        return value


def _ceiling(name: str) -> int:
    return next((most for pattern, most in _CEILINGS if pattern.search(name)), _MAX_SIZE)


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Activation names of config files -> ours."""


def activation(config: ModelConfig, name: str, default: str) -> str:
    """The activation under this key."""
    return config.choice(name, ACTIVATIONS, default)


def _list(options: Iterable[str]) -> str:
    return ", ".join(sorted(options))
