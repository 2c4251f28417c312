"""Lines that are rounded or pruned one after the other, as GPTQ and SparseGPT do: each passes its error on to those
behind it. Owns: the grid on which codes lie, and the operations of `Kernels` on lines.

A line is a column of a weight, [out]. Needs no torch. Must not know: how scales are found, who implements it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LineGrid:
    """What the codes of n lines stand for: (code - zeros[g]) * steps[g] in line i, where g = group[i], for codes from 0
    to `most`. steps and zeros [groups, out] float32, zeros whole; group [n] int64."""

    steps: Tensor
    zeros: Tensor
    group: Tensor
    most: int

    def of(self, some: slice) -> LineGrid:
        """The grid of these lines alone."""
        return replace(self, group=self.group[some])


class RoundsLines(Protocol):
    """Kernels, as far as they round and prune lines."""

    def round_lines(self, lines: Tensor, grid: LineGrid, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 and errors float32, both [n, out], of lines [n, out]. For each line i in order, with g =
        grid.group[i]:

            code = lines[i] / steps[g] + zeros[g], rounded to a whole number (ties to even) from 0 to grid.most
            error = (lines[i] - (code - zeros[g]) * steps[g]) / upper[i, i]
            lines[j] -= upper[i, j] * error, for every later line j

        upper [n, n]: only the upper triangle is read. `lines` itself stays as it is."""
        ...

    def prune_lines(
        self, lines: Tensor, upper: Tensor, gone: Tensor | None, zeros: int = 0, of: int = 0
    ) -> tuple[Tensor, Tensor]:
        """What is left of lines [n, out], and errors, both float32 [n, out]. For each line i in order:

            error = lines[i] / upper[i, i] where it is pruned, else 0
            lines[j] -= upper[i, j] * error, for every later line j

        gone [n, out] bool: what is pruned. None: of every `of` lines those `zeros` with the least lines[i]^2 / upper[i,
        i]^2 when the first of them is reached; of equals the first."""
        ...
