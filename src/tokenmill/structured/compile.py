"""From a request's `structured_outputs` to a Constraint. What is not enforced is refused, never ignored."""

from __future__ import annotations

from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.protocols import Constraint
from tokenmill.structured.choice import ChoiceConstraint, Vocabulary


def compile_constraint(spec: dict[str, Any], vocabulary: Vocabulary) -> Constraint:
    """The constraint that `spec` asks for: {"choice": [...]}."""
    given = {k: v for k, v in spec.items() if v is not None}
    if set(given) == {"choice"}:
        return ChoiceConstraint(given["choice"], vocabulary)
    other = sorted(set(given) - {"choice"})
    raise ParameterError(
        f"structured_outputs: {', '.join(other) or 'nothing given'} cannot be enforced in this version; "
        "use {'choice': [...]}.",
        param="structured_outputs",
    )
