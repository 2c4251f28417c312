"""Lists and objects within each other are counted without recursion."""

from __future__ import annotations

from typing import Any

from tokenmill.core.nesting import deeper_than


def test_containers_count_and_what_they_hold_does_not() -> None:
    value: Any = [1, {"a": 2}]
    assert not deeper_than(1, 0) and deeper_than([], 0) and not deeper_than([1], 1)
    assert deeper_than(value, 1) and not deeper_than(value, 2)
    for _ in range(100_000):
        value = {"in": [value]}
    assert deeper_than(value, 64)
