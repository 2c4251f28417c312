"""A setting that a command line names twice, by two spellings and with two values. Owns: refusing it.

The same flag twice is usual: scripts append what shall hold, and the last one does. Two names for one setting are not:
whoever typed them rarely knows that they are one. Must not know: verbs, what flags do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tokenmill.cli.foreign import RefusedFlag, TypedFlag
from tokenmill.core.errors import MOST_SHOWN
from tokenmill.core.text_values import read_count

SECRET = ("--hf-token", "--api-key")


def refuse_two_values(said: Iterable[TypedFlag], params: Iterable[Any]) -> None:
    """Raise Refused if two different names of one setting have different values. params: those of the verb."""
    settings = {
        name: param
        for param in params
        if param.param_type_name == "option" and not param.multiple
        for name in (*param.opts, *param.secondary_opts)
    }
    before: dict[str, TypedFlag] = {}
    for each in said:
        param = settings.get(each.ours)
        if param is None:
            continue
        if each.ours in param.secondary_opts or (param.secondary_opts and not each.value):
            each = replace(each, value="no" if each.ours in param.secondary_opts else "yes")
        first = before.setdefault(param.name, each)
        if _name(first.typed) != _name(each.typed) and not _same(first.value, each.value):
            raise RefusedFlag(
                f"{_shown(first)} and {_shown(each)} are two values of one setting ({param.opts[0]}): give one."
            )
        before[param.name] = each


def _name(typed: str) -> str:
    """The same flag, however its words are joined, switched on or off."""
    return typed.replace("_", "-").replace("--no-", "--", 1)


def _same(one: str, other: str) -> bool:
    count = read_count(one)
    return one == other or (count is not None and count == read_count(other))


def _shown(said: TypedFlag) -> str:
    return said.typed if said.ours in SECRET else said.words[:MOST_SHOWN]
