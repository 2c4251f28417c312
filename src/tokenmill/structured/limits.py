"""Ceilings of structured output. Owns: the numbers, and counting against them. Must not know: schemas."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NoReturn

from tokenmill.core.errors import ParameterError

PARAM = "structured_outputs"
MAX_SPEC_BYTES = 256 << 10
"""Text of one schema, grammar, regex or list of choices."""
MAX_DEPTH = 64
MAX_ENUM = 10_000
MAX_LITERAL = 4096
"""Most characters of a literal string: every mask inside it walks the rest of it."""
MAX_COUNT = 100_000
"""Largest minItems, minLength, minProperties: what no context could hold is refused."""
MAX_PROPERTIES = 1000
MAX_REPEAT = 10_000
"""Largest count in a regex's braces."""
MAX_WORK = 40_000
"""Elementary operations of one schema's lowering: about a third of a second."""
MAX_ALTERNATIVES = 2000
SLICE = 32
"""Steps after which the compiling thread lets others run, so that the engine's thread does not wait for the lock."""


def refuse(message: str) -> NoReturn:
    """Raise the error of a structure that cannot be used."""
    raise ParameterError(f"structured_outputs: {message}", param=PARAM)


@dataclass(slots=True)
class WorkBudget:
    """The work that may still be done."""

    left: int = MAX_WORK
    polite: int = 0

    def spend(self, amount: int = 1) -> None:
        """Count operations; refuse beyond the limit."""
        self.left -= amount
        self.polite -= 1
        if self.polite < 0:
            self.polite = SLICE
            time.sleep(0)
        if self.left < 0:
            refuse("the schema is too complex: its combined keywords multiply beyond the limit. Simplify it.")
