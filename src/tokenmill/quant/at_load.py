"""Matrices that are rounded when they settle, joined and split before that. Owns: rounding neighbours together.

Must not know: formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from tokenmill.compute.forward import Kernels, Weight
from tokenmill.quant.dense import DenseWeight


class RoundedAtLoad(DenseWeight):
    """A dense matrix until it settles. A format implements `rounded`."""

    def rounded(self, kernels: Kernels, parts: int) -> Any:
        """This matrix in the format, not settled yet; None: one of so many equal parts of its rows must stay as it
        is."""
        raise NotImplementedError

    def settle(self, kernels: Kernels) -> Weight:
        """The rounded weight, in the backend's form; or as it is."""
        made = self.rounded(kernels, 1)
        if made is None:
            return super().settle(kernels)
        self.table = None
        settled: Weight = made.settle(kernels)
        return settled

    def rounded_with(self, others: list[Self], kernels: Kernels) -> list[Weight] | None:
        """These matrices of one shape, rounded at once, not settled yet; None: they are better settled one by one."""
        every = [self, *others]
        joined = self.join(others) if len({(o.shape, o.bias is None) for o in every}) == 1 else None
        made = None if joined is None else joined.rounded(kernels, len(every))
        if made is None:
            return None
        for one in every:
            one.table = None
        return [made.split(0, i, len(every)) for i in range(len(every))]


def settle_all(weights: Sequence[Weight], kernels: Kernels) -> list[Weight]:
    """These weights in their final form. Where each operation is a launch (`Kernels.rounds_at_once`), neighbours are
    rounded together: a mixture has thousands of small matrices, and rounding one is twenty operations and a wait."""
    made: list[Weight] = []
    at = 0
    while at < len(weights):
        first = weights[at]
        some = weights[at : at + max(1, kernels.rounds_at_once // max(1, first.shape[0] * first.shape[1]))]
        found = None
        if isinstance(first, RoundedAtLoad) and len(some) > 1:
            alike = [w for w in some[1:] if type(w) is type(first)]
            found = first.rounded_with(alike, kernels) if len(alike) == len(some) - 1 else None
        made += [one.settle(kernels) for one in found or some]
        at += len(some)
    return made
