"""One setting that stands twice, by two names. Owns: giving every option its own name, and refusing two values of one.

Must not know: where the settings come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options
from tokenmill.core.errors import ParameterError, shown


def one_spelling(given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The same settings by the options' own names. Dashes and underscores mean the same in a file. where: what the
    error names first."""
    items = {name: item for each in (GROUPS, SERVER_GROUPS) for name, (_, item, _) in all_options(each).items()}
    own = {alias: name for name, item in items.items() for alias in item.metadata["aliases"]}
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for typed, value in given.items():
        plain = typed.replace("-", "_")
        name = own.get(plain, plain)
        if name in found and found[name] != value:
            two = [f" = {shown(each)}" if name in items and items[name].repr else "" for each in (found[name], value)]
            raise ParameterError(
                f"{where}{said[name]}{two[0]} and {typed}{two[1]} are two values of one setting: give one.", param=name
            )
        found[name], said[name] = value, typed
    return found
