"""What can be done with another program's flag. Owns: the record of it, and short ways to write lists of them.

Must not know: programs, verbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Foreign:
    """What to do with another program's flag. into: our flag, with its value after it; values: our words for each
    value; why: the reason for a refusal; note: a message if the flag is left out. takes: how many values follow it (-1:
    one or none). counts: a value that `values` lacks must be a whole number."""

    into: str | None = None
    why: str = ""
    takes: int = 1
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    counts: bool = False


def same(flag: str, names: str, *nothing: str, takes: int = 1) -> dict[str, Foreign]:
    """Another spelling of our flag. nothing: values that ask for nothing."""
    return {name: Foreign(into=flag, takes=takes, values=dict.fromkeys(nothing, "")) for name in names.split()}


def ignored(why: str, names: str, takes: int = 1) -> dict[str, Foreign]:
    """The flag asks for something that is not done here and changes no answer. It is left out, with a message."""
    return {name: Foreign(into="", takes=takes, note=why) for name in names.split()}


def refused(why: str, names: str, *nothing: str, takes: int = 1) -> dict[str, Foreign]:
    """The flag cannot be used, unless its value asks for nothing."""
    return {name: Foreign(why=why, takes=takes, values=dict.fromkeys(nothing, "")) for name in names.split()}
