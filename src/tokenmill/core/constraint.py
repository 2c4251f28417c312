"""What a sequence may say next. Owns: the protocols of constraints and of their compilers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tokenmill.core.request import ReasoningSpan


class Constraint(Protocol):
    """What a sequence may say next. Masks are packed little-endian bits, 1 = allowed, one bit per token id."""

    def mask(self) -> bytes | None:
        """Allowed next tokens; None: all."""
        ...

    def accept(self, tokens: list[int]) -> None: ...
    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says (may be empty)."""
        ...

    def validate(self, tokens: list[int]) -> int:
        """How many of these (draft) tokens are allowed in a row from here."""
        ...

    def finished(self) -> bool: ...
    def failure(self) -> str | None:
        """What went wrong inside if `mask` allows nothing any more; None: nothing did."""
        ...

    def fork(self) -> Constraint: ...


class ConstraintCompiler(Protocol):
    """Makes constraints from `structured_outputs`; what it cannot enforce is a UserError. `bytes`: what it keeps."""

    bytes: int

    def prepare(self, spec: Any, reasoning: ReasoningSpan | None = None) -> Future[None]:
        """Compile in the background, so that `constraint` will be quick; the future raises what is wrong."""
        ...

    def constraint(self, spec: Any, reasoning: ReasoningSpan | None = None, budget: int | None = None) -> Constraint:
        """The constraint at its start. With `reasoning` it begins after that, which `budget` tokens may take."""
        ...

    def close(self) -> None:
        """Compile no more."""
        ...
