"""What the tests of the training's requests share."""

from __future__ import annotations


def leaves(value: object) -> list[object]:
    """All keys and values of a JSON value, at any depth."""
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in (k, *leaves(v))]
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]
