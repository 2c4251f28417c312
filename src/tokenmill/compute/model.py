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
    """The part of a vocabulary whose logits one of several ranks computes: `count` ids from `first` on."""

    group: Group
    first: int
    count: int


class CausalLM(Protocol):
    """A built model: tokens in, hidden states out, logits on demand (in bounded slices)."""

    spec: ModelSpec

    @property
    def words(self) -> Words | None:
        """The words whose logits `own_logits` gives; None: all words, on every rank."""
        ...

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> final-norm hidden states [T, hidden]."""
        ...

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab] in float32, soft-cap and logit scale applied."""
        ...

    def own_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """The logits of this rank's words alone [n, words.count], without communication with other ranks."""
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


@dataclass(frozen=True, slots=True)
class Addition:
    """What becomes of a sum over ranks: residual + scale * within(sum), and its norm."""

    norm: NormSpec | None = None
    scale: float = 1.0
    within: NormSpec | None = None


class Exchange(Protocol):
    """A sum over ranks under way."""

    def end(self, residual: Tensor, addition: Addition, out: Tensor, normed: Tensor | None) -> None:
        """out = residual + scale * within(the sum), with the same bytes on each rank, and normed its norm, if there is
        one."""
        ...


class Group(Protocol):
    """A set of ranks that compute one thing together. SoloGroup returns x unchanged.

    exact: layers exchange inputs instead of sums, so that one rank adds up each number, in the order of a single-rank
    model."""

    rank: int
    size: int
    exact: bool
    calls: int
    """How often this rank has met the others; ranks that failed at the same place have met equally often."""
    adds_parts: bool
    """Does `all_reduce_norm` add up what `Kernels.open_product` has left in parts?"""

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks (+ residual), with the same bytes on each rank. x may be overwritten."""
        ...

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, norm: NormSpec, scale: float = 1.0, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """residual + scale * within(the sum over ranks), and its norm; None: it cannot do all at once, and x is
        unchanged. x may be what `open_product` made, if the group `adds_parts`."""
        ...

    def pieces(self, x: Tensor) -> int:
        """In how many pieces of rows a sum like this goes best, each while others are computed; 1: at once."""
        ...

    def exchange(self, part: Tensor) -> Exchange:
        """Begin the sum over ranks of a piece. Only where there are several."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x side by side, in rank order."""
        ...

    def agree(self, values: list[int]) -> list[int]:
        """For each number, the least value that any rank gives."""
        ...

    def begin(self, epoch: int) -> None:
        """A step of this epoch follows."""
        ...

    def fail(self) -> None:
        """This rank cannot continue in this epoch: ranks that wait for it fail, too."""
        ...
