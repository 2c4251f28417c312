"""Hyper-connections: a token's hidden state is several streams, which a block reads as one mixture and is added to with
a factor for each. Owns: the factors, which the streams themselves decide, and mixing, adding and joining.

A step carries x [T, streams * hidden]. Backends add streams up one after the other, so that a row's bytes do not depend
on its company; sums and factors are float32 whatever the compute dtype. Knows nothing of families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.layers.build import Build

NAMES = ("fn", "base", "scale")
"""The matrix of the factors, what is added to its product, and a number for each group of factors."""


@dataclass(frozen=True, slots=True)
class HyperShape:
    """What all connections of a model have in common. least is added to each factor; most: the greatest factor of what
    a block adds. norm: over all streams, without weights of its own."""

    count: int
    hidden: int
    norm: NormSpec
    least: float
    most: float = 1.0


def hyper_shape(b: Build, count: int, hidden: int, eps: float, least: float, most: float) -> HyperShape:
    """The shape of a model's connections; eps: of the norm."""
    ones = torch.ones(count * hidden, dtype=torch.float32, device=b.device)
    return HyperShape(count, hidden, NormSpec(ones, eps), least, most)


class Factors:
    """most * sigmoid(scale * (matrix @ norm(x)) + base) + least, for groups of factors with a `most` each."""

    def __init__(self, b: Build, shape: HyperShape, names: tuple[str, str, str], most: tuple[float, ...]) -> None:
        rows, width = shape.count * len(most), shape.count * shape.hidden
        matrix, base, scale = (
            b.tensor(name, size, torch.float32)
            for name, size in zip(names, ((rows, width), (rows,), (len(most),)), strict=True)
        )
        exact = replace(b, quantization=None)  # rounding would change what every block reads
        scaled = matrix * scale.repeat_interleave(shape.count)[:, None]
        self.weight = exact.settled(exact.wrap(scaled, base))
        self.most = torch.tensor([one for one in most for _ in range(shape.count)], device=b.device)
        self.shape = shape

    def of(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams * hidden] -> [T, all factors]."""
        made = self.weight.matmul(x.float(), ctx, norm=self.shape.norm)
        return ctx.kernels.activate(self.most.expand(len(x), -1), "sigmoid", made).add_(self.shape.least)


class HyperConnection:
    """What stands around one block."""

    def __init__(self, b: Build, shape: HyperShape, names: tuple[str, str, str] = NAMES) -> None:
        self.shape = shape
        self.factors = Factors(b, shape, names, (1.0, shape.most))

    def mix(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x [T, streams * hidden] -> the block's input [T, hidden], and the factors of its result [T, streams]."""
        inner, outer = self.factors.of(x, ctx).chunk(2, dim=1)
        return _mixed(x, inner, ctx), outer

    def add(self, x: Tensor, y: Tensor, outer: Tensor, ctx: ForwardContext) -> Tensor:
        """Each stream of x with y [T, hidden] times its factor."""
        return ctx.kernels.add(x, y, outer)


class HyperHead:
    """Joins the streams behind the last layer."""

    def __init__(self, b: Build, shape: HyperShape, names: tuple[str, str, str]) -> None:
        self.factors = Factors(b, shape, names, (1.0,))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams * hidden] -> [T, hidden]."""
        return _mixed(x, self.factors.of(x, ctx), ctx)


def _mixed(x: Tensor, factors: Tensor, ctx: ForwardContext) -> Tensor:
    """The streams' sum, each times its factor."""
    return ctx.kernels.add_experts(x.view(factors.numel(), -1), factors, x.dtype)
