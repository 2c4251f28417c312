"""What a request costs, if prices are set. Owns: reading them, and the sum. Must not know: requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenmill.core.errors import ParameterError

MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens: of prompts, of prompt tokens found in the cache, and of answers."""

    prompt: float = 0.0
    output: float = 0.0
    cached: float = 0.0

    def cost(self, prompt: int, cached: int, output: int) -> float:
        """Dollars for these tokens. `cached` of the prompt's tokens have their own price."""
        found = (prompt - cached) * self.prompt + cached * self.cached + output * self.output
        return round(found / MILLION, 12)


@cache
def read_prices(text: str | None) -> Prices | None:
    """Read `prompt=0.10,output=0.40,cached=0.02`. Without a price of their own, cached tokens cost as much as
    others."""
    if text is None:
        return None
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if name not in ("prompt", "output", "cached") or name in found or not equals:
            raise _wrong(text)
        try:
            found[name] = float(number)
        except ValueError:
            raise _wrong(text) from None
        if not math.isfinite(found[name]) or found[name] < 0:
            raise _wrong(text)
    return Prices(**{"cached": found.get("prompt", 0.0), **found})


def _wrong(text: str) -> ParameterError:
    wanted = "dollars per million tokens, such as prompt=0.10,output=0.40,cached=0.02 (each at most once, from 0 on)"
    return ParameterError(f"--prices must be {wanted}, got {text[:100]!r}.", param="prices")


def cost_field(usage: dict[str, Any]) -> dict[str, float]:
    """The cost as a part of another API's usage object. Empty without prices."""
    return {"cost": usage["cost"]} if "cost" in usage else {}
