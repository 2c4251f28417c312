"""What test_ranks.py and other tests share."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from tokenmill.kernels.reference import ReferenceKernels


class Shared:
    """What the ranks of one group exchange through."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.slots: list[Tensor] = [torch.empty(0)] * size


class ThreadExchange:
    """A sum that was made at once."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def end(self, residual, addition, out, normed):
        kernels = ReferenceKernels()
        out.copy_(kernels.add(residual, self.total, addition.scale, within=addition.within))
        if normed is not None:
            normed.copy_(kernels.norm(out, addition.norm))


class ThreadGroup:
    """Adds up as a GPU's ranks do."""

    exact = False
    calls = 0

    def __init__(
        self, shared: Shared, rank: int, joins: bool = False, most_pieces: int = 1, adds_parts: bool = False
    ) -> None:
        """joins: sums come with their norms, as from GPUs that add up themselves; `joined` counts them. most_pieces:
        of rows, in which sums are exchanged; `sent` counts them."""
        self.shared, self.rank, self.size = shared, rank, shared.size
        self.joins, self.joined, self.sums = joins, 0, 0
        self.most_pieces, self.sent = most_pieces, 0
        self.adds_parts = adds_parts

    def pieces(self, part: Tensor) -> int:
        return min(self.most_pieces, max(1, len(part) // 2))

    def exchange(self, part: Tensor) -> ThreadExchange:
        assert part.ndim == 2, "copy engines add nothing up"
        self.sent += 1
        return ThreadExchange(sum(self._exchange(part)))

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.shared.slots[self.rank] = x
        self.shared.barrier.wait()
        every = list(self.shared.slots)
        self.shared.barrier.wait()
        return every

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        self.sums += 1
        total = sum(self._exchange(x))
        return total if residual is None else residual + total

    def all_reduce_norm(self, x, residual, norm, scale=1.0, within=None):
        if not self.joins:
            return None
        self.joined += 1
        x = x if x.ndim == 2 else x.sum(0).to(residual.dtype)
        return ReferenceKernels().add_norm(residual, sum(self._exchange(x)), norm, scale, within=within)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange(x), dim=dim)
