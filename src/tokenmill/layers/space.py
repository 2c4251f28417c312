"""State spaces (Mamba-1 and Mamba-2) and gated short convolutions (LFM2) as layers. Owns: the way from hidden states
over a row's state back.

Knows nothing of families: they say sizes, and which norms and factors there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.forward import ConvSpec, ForwardContext, NormSpec, ScanSpec, SpaceSpec, StateSpec
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear, Rows


@dataclass(frozen=True, slots=True)
class SpaceHeads:
    """How heads of Mamba-2 are shaped; `taps` of the convolution; bounds of a token's pace."""

    heads: int
    dim: int
    groups: int
    keys: int
    taps: int
    low: float = 0.0
    high: float = math.inf

    @property
    def width(self) -> int:
        """Entries of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """What the convolution sees: values, and what they are written and read with."""
        return self.width + 2 * self.groups * self.keys


@dataclass(frozen=True, slots=True)
class Around:
    """What families differ in around a state: biases of the products and of the convolution, the size of a norm's
    pieces (0: no norm) and whether the gate comes before it, names of products, factors of the first one's columns."""

    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: int = 0
    gate_first: bool = True
    eps: float = 1e-5
    factors: Tensor | None = None


class Convolution:
    """A short convolution of each channel, whose last inputs are a part of the row's state."""

    def __init__(
        self, b: Build, channels: int, taps: int, *, bias: bool, name: str = "conv1d", silu: bool = True
    ) -> None:
        weight = b.tensor(f"{name}.weight", (channels, 1, taps), torch.float32)
        weight = weight[:, 0].t().contiguous()
        self.spec = ConvSpec(weight, b.tensor(f"{name}.bias", (channels,), torch.float32) if bias else None, silu)
        self.part = str(b.dtype).removeprefix("torch."), (taps - 1, channels)

    def __call__(self, x: Tensor, state: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, C] -> [T, C]."""
        return ctx.kernels.recur_((x,), self.spec, state, ctx)


def _alone(b: Build, what: str) -> None:
    if b.group.size > 1:
        raise ModelError(f"Layers with {what} cannot be split over several devices yet.")


def _parts(ctx: ForwardContext, state: int) -> tuple[Tensor, ...]:
    assert ctx.rows is not None, "states are found by row"
    return ctx.rows.states[state]


class StateSpace:
    """Mamba-2: product -> short convolution -> state space -> gate and norm -> output projection (+ residual)."""

    def __init__(self, b: Build, hidden: int, heads: SpaceHeads, around: Around) -> None:
        _alone(b, "a state space")
        self.heads, self.around = heads, around
        sizes = (heads.width, heads.channels, heads.heads)
        self.product = FusedColumnLinear(b, hidden, "in_proj", [Rows(rows, rows) for rows in sizes], bias=around.bias)
        self.conv = Convolution(b, heads.channels, heads.taps, bias=around.conv_bias)
        rate, shift, skip = (b.tensor(name, (heads.heads,), torch.float32) for name in ("A_log", "dt_bias", "D"))
        self.spec = SpaceSpec(
            heads.heads, heads.dim, heads.groups, heads.keys, rate.exp(), shift, skip, heads.low, heads.high
        )
        self.norm: NormSpec | None = b.norm("norm", heads.width, around.eps) if around.norm else None
        self.output = RowLinear(b, heads.width, hidden, "out_proj", bias=around.out_bias)
        self.state = b.add_state(StateSpec((self.conv.part, ("float32", (heads.heads, heads.keys, heads.dim)))))

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + space(norm(x)); x [T, hidden]."""
        heads, around = self.heads, self.around
        made = self.product.weight.matmul(x, ctx, norm=norm)
        if around.factors is not None:
            made = made * around.factors
        z, mixed, rates = made.split((heads.width, heads.channels, heads.heads), dim=-1)
        inputs, matrices = _parts(ctx, self.state)
        mixed = self.conv(mixed, inputs, ctx)
        found = ctx.kernels.recur_((mixed, rates), self.spec, matrices, ctx)
        if self.norm is None:
            gated = ctx.kernels.activate(found, "silu", z)
        else:
            gated = ctx.kernels.norm(found, self.norm, z, around.norm, first=around.gate_first)
        return self.output(gated, ctx, residual=residual)


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """Channels, numbers kept of each, taps of the convolution, and the width that a token's pace is made from."""

    channels: int
    keys: int
    taps: int
    rank: int


class SelectiveScan:
    """Mamba-1: product -> short convolution -> (pace, b, c) -> scan -> gate -> output projection (+ residual)."""

    def __init__(
        self, b: Build, hidden: int, sizes: ScanSizes, around: Around, norms: tuple[NormSpec, ...] = ()
    ) -> None:
        """norms: of pace, b and c, where a family has them."""
        _alone(b, "a state space")
        self.sizes, self.norms = sizes, norms
        part = Rows(sizes.channels, sizes.channels)
        self.product = FusedColumnLinear(b, hidden, "in_proj", (part, part), bias=around.bias)
        self.conv = Convolution(b, sizes.channels, sizes.taps, bias=around.conv_bias)
        inner = [Rows(rows, rows) for rows in (sizes.rank, 2 * sizes.keys)]
        self.inner = FusedColumnLinear(b, sizes.channels, "x_proj", inner)
        self.pace = FusedColumnLinear(b, sizes.rank, "dt_proj", [part], bias=True)
        rate = b.tensor("A_log", (sizes.channels, sizes.keys), torch.float32).exp().t().contiguous()
        self.spec = ScanSpec(rate, b.tensor("D", (sizes.channels,), torch.float32))
        self.output = RowLinear(b, sizes.channels, hidden, "out_proj", bias=around.out_bias)
        self.state = b.add_state(StateSpec((self.conv.part, ("float32", (sizes.keys, sizes.channels)))))

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + scan(norm(x)); x [T, hidden]."""
        kernels, sizes = ctx.kernels, self.sizes
        values, z = self.product.weight.matmul(x, ctx, norm=norm).split(sizes.channels, dim=-1)
        inputs, numbers = _parts(ctx, self.state)
        values = self.conv(values, inputs, ctx)
        rank, mixed = self.inner.weight.matmul(values, ctx).split((sizes.rank, 2 * sizes.keys), dim=-1)
        rank = rank.contiguous()
        if self.norms:
            given = (rank, *(part.contiguous() for part in mixed.split(sizes.keys, dim=-1)))
            rank, b, c = (kernels.norm(one, spec) for one, spec in zip(given, self.norms, strict=True))
            mixed = torch.cat((b, c), dim=-1)
        rates = self.pace.weight.matmul(rank, ctx)
        found = kernels.recur_((values, rates, mixed), self.spec, numbers, ctx)
        return self.output(kernels.activate(found, "silu", z), ctx, residual=residual)


class GatedConvolution:
    """LFM2: (b | c | x) of the input -> c conv(b x) -> output projection (+ residual)."""

    def __init__(self, b: Build, hidden: int, taps: int, *, bias: bool) -> None:
        _alone(b, "a short convolution")
        part = Rows(hidden, hidden)
        self.product = FusedColumnLinear(b, hidden, "in_proj", (part, part, part), bias=bias)
        self.conv = Convolution(b, hidden, taps, bias=bias, name="conv", silu=False)
        self.output = RowLinear(b, hidden, hidden, "out_proj", bias=bias)
        self.state = b.add_state(StateSpec((self.conv.part,)))

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + convolution(norm(x)); x [T, hidden]."""
        b, c, values = self.product.weight.matmul(x, ctx, norm=norm).chunk(3, dim=-1)
        (inputs,) = _parts(ctx, self.state)
        return self.output(c * self.conv(b * values, inputs, ctx), ctx, residual=residual)
