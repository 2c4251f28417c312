"""What the engine asks of a model's parts. Owns: the protocols of models, checkpoints and groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tokenmill.compute.forward import ForwardContext, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True)
class Words:
    """The part of a vocabulary whose logits one rank of several makes: `count` ids from `first` on."""

    group: Group
    first: int
    count: int


class CausalLM(Protocol):
    """A built model: tokens in, hidden states out, logits on demand (in bounded slices)."""

    spec: ModelSpec

    @property
    def words(self) -> Words | None:
        """Whose logits `own_logits` gives; None: of all words, on every rank."""
        ...

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> final-norm hidden states [T, hidden]."""
        ...

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab] in float32, soft-cap and logit scale applied."""
        ...

    def own_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """The same of this rank's words alone [n, words.count], without a word to the others."""
        ...


class Checkpoint(Protocol):
    """name -> tensor, nothing else.

    One whose tensors are quantised in blocks also has `blocks(name, shape)`: the blocks of a matrix, or None."""

    def names(self) -> Iterable[str]: ...
    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...
    def close(self) -> None: ...


class Group(Protocol):
    """A set of ranks that compute one thing together. SoloGroup returns x unchanged.

    exact: layers exchange what they multiply, not sums, so that every number is added up by one rank, in the order in
    which one rank alone would do it."""

    rank: int
    size: int
    exact: bool
    calls: int
    """How often this rank has met the others; ranks that failed alike have met equally often."""

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks (+ residual); the same bytes on each. x may be overwritten."""
        ...

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: NormSpec, scale: float = 1.0, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """residual + scale * within(the sum over ranks), and its norm; None: not at once, and x is as it was."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x side by side, in rank order."""
        ...

    def agree(self, values: list[int]) -> list[int]:
        """The least that any rank says, number by number."""
        ...

    def begin(self, epoch: int) -> None:
        """A step of this epoch follows."""
        ...

    def fail(self) -> None:
        """This rank cannot go on in this epoch: whoever waits for it fails, too."""
        ...

    def close(self) -> None: ...
