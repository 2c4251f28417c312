"""Names that an object of a body has twice. Owns: noticing and finding them.

JSON readers keep one of the values without a word, and not all of them the same one: a proxy in front may have judged
the other. So such a body is refused. Must not know: schemas, HTTP.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.server.ceilings import MOST_NAME, Counts

_CONTAINERS = (dict, list)


def refuse_doubled_names(data: bytes | str, value: Any, counts: Counts, field: str | None = None) -> None:
    """Refuse a JSON text in which an object has a name twice. `value`: what a reader made of the text; it has fewer
    members than the text then. `field`: the field of the body that holds the text."""
    if counts.members != _members(value, counts.containers):
        json.loads(data, object_pairs_hook=partial(_check, field))


def _members(value: Any, containers: int) -> int:
    """All members. It stops looking into lists when all `containers` have been seen: most of a body are token ids."""
    members, seen, open_values = 0, 0, [value]
    while open_values:
        each = open_values.pop()
        seen += 1
        if type(each) is dict:
            members += len(each)
            inner = list(each.values())
        else:
            inner = each
        if seen + len(open_values) < containers:
            open_values += [part for part in inner if type(part) in _CONTAINERS]
    return members


def _check(field: str | None, pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            shown = name[:MOST_NAME]
            raise ParameterError(f"{field or 'The body'} has {shown!r} twice in one object.", param=field or shown)
        seen.add(name)
