"""How deeply plain data is nested. Owns: finding the depth without recursion, because the data comes from strangers."""

from __future__ import annotations


def deeper_than(value: object, most: int) -> bool:
    """Are lists and objects nested more than `most` deep?"""
    level = [value]
    for _ in range(most):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)
