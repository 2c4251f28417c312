"""What a sequence may say next. Owns: the protocols of constraints and of their compilers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tokenmill.core.request import ReasoningSpan


class Constraint(Protocol):
    """What a sequence may say next. Masks are packed little-endian bits, 1 = allowed, one bit per token id."""

    def mask(self) -> bytes | None:
        """The allowed next tokens; None: all."""
        ...

    def accept(self, tokens: list[int]) -> None: ...
    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says (may be empty)."""
        ...

    def validate(self, tokens: list[int]) -> int:
        """How many of these drafts are allowed one after the other from here."""
        ...

    def finished(self) -> bool: ...
    def failure(self) -> str | None:
        """What went wrong inside if `mask` no longer allows any token; None: nothing did."""
        ...

    def fork(self) -> Constraint: ...


class ConstraintCompiler(Protocol):
    """Makes constraints from `structured_outputs`; raises a UserError for what it cannot enforce. `bytes`: memory it
    keeps."""

    bytes: int

    def prepare(self, spec: Any, reasoning: ReasoningSpan | None = None) -> Future[None]:
        """Compile in the background, so that `constraint` is quick later; the future raises any error."""
        ...

    def constraint(self, spec: Any, reasoning: ReasoningSpan | None = None, budget: int | None = None) -> Constraint:
        """A new constraint. With `reasoning` it begins after the reasoning, which may take `budget` tokens."""
        ...

    def close(self) -> None:
        """Stop compiling."""
        ...
