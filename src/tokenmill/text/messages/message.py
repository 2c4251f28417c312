"""What was read from a model's text. Owns: events, and adding them up to a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "arguments"]


class Event(NamedTuple):
    """A piece of a message: text of this kind. `call` begins call `number`: its text is the name, `id` the model's id.
    `arguments` continues that call."""

    kind: Kind
    text: str
    number: int = -1
    id: str | None = None


@dataclass(slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True)
class Message:
    """An assistant's turn."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Add events to the message."""
        for event in events:
            if event.kind == "content":
                self.content += event.text
            elif event.kind == "reasoning":
                self.reasoning += event.text
            elif event.kind == "call":
                self.calls.append(Call(event.text, "", event.id))
            else:
                self.calls[event.number].arguments += event.text
