"""Where a rank stands in a model that is shared out in stages. Owns: which layers a stage holds.

Ranks of one stage share its layers (a Group); a stage gives its hidden states to the next one (link.py). Borders are
chosen so that the heaviest stage is as light as can be, from what the layers' tensors weigh; the output head counts for
the last stage. All ranks find the same borders by themselves. Must not know: families, devices, plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from tokenmill.compute.model import Checkpoint, Group
from tokenmill.core.errors import ModelError
from tokenmill.parallel.group import SoloGroup
from tokenmill.parallel.link import Link, NoLink

if TYPE_CHECKING:
    from torch import Tensor

_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Place:
    """One of several stages. only: it has these layers, [first, last), whatever their weight. whole_experts: its ranks
    split mixtures by expert, instead of each expert by columns. words: the last stage has the embeddings, too.
    redundant: whole experts may move between ranks, and so many slots hold further copies."""

    stage: int = 0
    stages: int = 1
    only: tuple[int, int] | None = None
    whole_experts: bool = False
    words: bool = False
    redundant: int | None = None

    @property
    def is_whole(self) -> bool:
        """Is it the whole model?"""
        return self.stages == 1 and self.only is None

    @property
    def is_first(self) -> bool:
        """Does it begin at token ids?"""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Does it end at logits?"""
        return self.stage == self.stages - 1

    def layers(self, weights: Sequence[float], head: float) -> tuple[int, int]:
        """The range [first, last) of this stage's layers. weights: how heavy each layer of the model is."""
        if len(weights) < self.stages:
            raise ModelError(
                f"--pipeline-parallel-size {self.stages}: this model has {len(weights)} layers, fewer than stages."
            )
        borders = cut(weights, head, self.stages)
        return borders[self.stage], borders[self.stage + 1]


def cut(weights: Sequence[float], head: float, stages: int) -> list[int]:
    """The borders [0, ..., layers] of stages with at least one layer each, so that the heaviest is as light as
    possible."""
    count = len(weights)
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    most: list[float] = [0.0, *(float("inf"),) * count]
    found: list[list[int]] = []
    for stage in range(stages):
        beside = head if stage == stages - 1 else 0.0
        heaviest, starts = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, end):
                here = max(most[start], before[end] - before[start] + beside)
                if here < heaviest[end]:
                    heaviest[end], starts[end] = here, start
        most = heaviest
        found.append(starts)
    borders = [count]
    for starts in reversed(found):
        borders.append(starts[borders[-1]])
    return borders[::-1]


def weigh(checkpoint: Checkpoint, count: int, hidden: int, head: float) -> tuple[list[float], float]:
    """How many numbers each layer and the head have; of the layers their tensors tell, and `head` is the head's count.

    If nothing is known about tensors (dummy weights), layers are equal and have about 12 * hidden^2 numbers, and the
    head counts as two layers at most."""
    sizes = [0.0] * count
    for name in checkpoint.names():
        found, shape = _NUMBER.search(name), checkpoint.shape(name)
        if found is not None and shape is not None and int(found[1]) < count:
            sizes[int(found[1])] += prod(shape)
    if min(sizes, default=0.0) > 0.0:
        return sizes, head
    each = 12.0 * hidden * hidden
    return [each] * count, min(head, 2.0 * each)


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank among all ranks of its engine. group: the ranks that share its stage's layers. share: gives plain data to
    all ranks while they load, and returns each rank's data, in order. link: makes the link to other stages from an
    inbox."""

    group: Group = field(default_factory=SoloGroup)
    place: Place = field(default_factory=Place)
    share: Callable[[Any], list[Any]] = lambda said: [said]
    link: Callable[[Tensor], Link] = lambda inbox: NoLink()

    @property
    def size(self) -> int:
        """How many ranks the engine has."""
        return self.group.size * self.place.stages

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.place.stage * self.group.size + self.group.rank

    def agree(self, values: list[int]) -> list[int]:
        """For each number, the least value that any rank gives."""
        if self.place.stages == 1:
            return self.group.agree(values)
        return [min(each) for each in zip(*self.share(values), strict=True)]

    def by_stage(self, said: Any) -> list[Any]:
        """The data of the first rank of each stage."""
        return self.share(said)[:: self.group.size]
