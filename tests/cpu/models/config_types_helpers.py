"""Transformers' classes of configs, of which an older Transformers (on another machine) may lack some.

Cases are made when their module is imported. One whose class is missing is left out and named in LACKING, so that the
others can still be imported.
"""

from __future__ import annotations

from typing import Any

import transformers

LACKING: list[str] = []
"""Classes that were asked for and are not there."""


class Absent:
    """Stands for a config whose class is missing."""

    def __init__(self, **fields: Any) -> None: ...


class Types:
    """`transformers`, but a missing config's class is told instead of raised."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("Config") or hasattr(transformers, name):
            return getattr(transformers, name)
        if name not in LACKING:
            LACKING.append(name)
        return Absent


hf = Types()
