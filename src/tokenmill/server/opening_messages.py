"""What every conversation begins with, if --opening sets it. Owns: its form, and putting it before the messages.

Must not know: templates, APIs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.core.errors import ParameterError

NAMES = {"system", "messages"}
ROLES = ("system", "user", "assistant")


def check_opening(opening: Mapping[str, Any] | None) -> None:
    """Refuse an opening with which no conversation can begin."""
    if opening is None:
        return
    messages = opening.get("messages") or []
    right = isinstance(messages, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and m["role"] in ROLES and isinstance(m["content"], str)
        for m in messages
    )
    if not opening.keys() <= NAMES or not isinstance(opening.get("system", ""), str) or not right:
        raise ParameterError(
            '--opening is {"system": TEXT, "messages": [{"role": "user", "content": TEXT}, ...]}, either of them or '
            "both.",
            param="opening",
        )


def with_opening(opening: Mapping[str, Any] | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that the model gets, with the opening first. A system message of the request replaces the
    opening's."""
    found = list(messages)
    if not opening or not found:
        return found
    own = found[0].get("role") in ("system", "developer")
    system = opening.get("system")
    head = [] if own or not system else [{"role": "system", "content": system}]
    before = [dict(message) for message in opening.get("messages") or ()]
    return [*found[:1], *before, *found[1:]] if own else [*head, *before, *found]
