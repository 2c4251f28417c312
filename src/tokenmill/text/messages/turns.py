"""Which messages can be turns of a chat. Owns: their roles, and that each of them says something.

Must not know: templates' language, what a content's parts are, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.core.errors import ParameterError

ROLES = ("assistant", "developer", "function", "system", "tool", "user")
"""Roles that every template may be given: it refuses those that it has no place for."""
_IN_PLACE_OF_CONTENT = ("tool_calls", "reasoning", "reasoning_content", "thinking")


def check_turns(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Refuse a message with a role that is none, or without content. Templates leave such messages out in silence, or
    write what no model has learned."""
    for number, message in enumerate(messages):
        where, role = f"messages.{number}", message.get("role")
        if not isinstance(role, str) or not (role in ROLES or _named(role, template)):
            known = f"{', '.join(ROLES)}, or a role that the chat template names"
            found = "; it is missing" if role is None else ""  # a wrong one is not repeated: it may hold anything
            raise ParameterError(f"{where}.role must be one of {known}{found}.", param=f"{where}.role")
        if message.get("content") is None and not (role == "assistant" and _says_otherwise(message)):
            raise ParameterError(
                f"{where}.content is missing: only a message of the assistant with tool_calls or reasoning may lack "
                "it.",
                param=f"{where}.content",
            )


def _named(role: str, template: str) -> bool:
    word = role.split(maxsplit=1)[0] if role.strip() else role  # "document 3": some templates look at the beginning
    return bool(word) and (f"'{word}'" in template or f'"{word}"' in template)


def _says_otherwise(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in _IN_PLACE_OF_CONTENT)
