"""State spaces (Mamba-1, Mamba-2, and MiniMax's with fixed decays) and gated short convolutions (LFM2) as layers. Owns:
the way from hidden states over a row's state back.

Knows nothing of families: they say sizes, and which norms and factors there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ConvSpec, ForwardContext, NormSpec, ScanSpec, SpaceSpec, StateSpec
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import (
    ColumnLinear,
    FusedColumnLinear,
    RowLinear,
    Rows,
    local_columns,
    local_rows,
    share_out,
)


@dataclass(frozen=True, slots=True)
class SpaceHeads:
    """The shape of Mamba-2's heads, the `taps` of the convolution, and the bounds of a token's pace."""

    heads: int
    dim: int
    groups: int
    keys: int
    taps: int
    low: float = 0.0
    high: float = math.inf

    @property
    def width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """How many channels the convolution has: values, and the vectors that write and read them."""
        return self.width + 2 * self.groups * self.keys

    @property
    def mixed(self) -> list[Rows]:
        """The same channels, as parts that are split with the heads."""
        group = Rows(self.groups * self.keys, self.groups, bare=True, repeats=True)
        return [self.each(self.dim), group, group]

    def each(self, numbers: int) -> Rows:
        """A part with so many numbers for every head."""
        return Rows(self.heads * numbers, self.heads, bare=True)

    def of(self, ranks: int) -> SpaceHeads:
        """The heads of each of so many ranks. If groups are fewer than ranks, they are repeated."""
        return replace(self, heads=self.heads // ranks, groups=max(1, self.groups // ranks))


@dataclass(frozen=True, slots=True)
class SpaceStyle:
    """How families differ around a state: biases of the products and of the convolution, the size of a norm's pieces
    (0: no norm), whether the gate comes before the norm, and factors of the parts of the first product: gates, values,
    keys, queries, paces."""

    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: int = 0
    gate_first: bool = True
    eps: float = 1e-5
    factors: tuple[float, float, float, float, float] = (1.0,) * 5
    gain: float = 1.0
    """Of what the state space gives; not with a norm, which would not see it."""


class Convolution:
    """A short convolution of each channel, whose last inputs are a part of the row's state."""

    def __init__(
        self,
        b: Build,
        parts: Sequence[Rows],
        taps: int,
        *,
        bias: bool,
        name: str = "conv1d",
        silu: bool = True,
        factors: Sequence[float] = (),
    ) -> None:
        """parts: the parts of the channels, by which they are split over ranks. factors: of the inputs of each part."""
        channels, own = sum(part.rows for part in parts), local_rows(b.group, parts).to(b.device)
        weight = b.tensor(f"{name}.weight", (channels, 1, taps), torch.float32)
        if factors:
            each = torch.cat([torch.full((part.rows,), f) for part, f in zip(parts, factors, strict=True)])
            weight = weight * each.to(weight.device)[:, None, None]
        weight = weight[own][:, 0].t().contiguous()
        shift = b.tensor(f"{name}.bias", (channels,), torch.float32)[own] if bias else None
        self.spec = ConvSpec(weight, shift, silu)
        self.part = str(b.dtype).removeprefix("torch."), (taps - 1, len(own))

    def __call__(self, x: Tensor, state: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, C] -> [T, C]."""
        return ctx.kernels.recur_((x,), self.spec, state, ctx)


def _parts(ctx: ForwardContext, state: int) -> tuple[Tensor, ...]:
    assert ctx.rows is not None, "states are found by row"
    return ctx.rows.states[state]


class StateSpace(Projected):
    """Mamba-2: product -> short convolution -> state space -> gate and norm -> output projection (+ residual)."""

    def __init__(self, b: Build, hidden: int, heads: SpaceHeads, style: SpaceStyle) -> None:
        b = share_out(b, "layers with a state space", heads.heads, heads.groups)
        parts = [heads.each(heads.dim), *heads.mixed, heads.each(1)]
        self.product = FusedColumnLinear(b, hidden, "in_proj", parts, bias=style.bias)
        self.gate, *channels, pace = style.factors
        self.conv = Convolution(b, heads.mixed, heads.taps, bias=style.conv_bias, factors=channels)
        own = heads.each(1).index(0, b.group).to(b.device)
        rate, shift, skip = (b.tensor(name, (heads.heads,), torch.float32)[own] for name in ("A_log", "dt_bias", "D"))
        self.style = style
        self.heads = mine = heads.of(b.group.size)
        self.spec = SpaceSpec(
            mine.heads,
            mine.dim,
            mine.groups,
            mine.keys,
            rate.exp(),
            shift,
            skip,
            mine.low,
            mine.high,
            pace,
            style.gain,
        )
        self.spans = style.norm > mine.width
        """A norm sees heads of several ranks together."""
        self.norm: NormSpec | None = b.norm("norm", heads.width, style.eps) if style.norm else None
        if self.norm is not None and not self.spans:
            at = heads.each(heads.dim).index(0, b.group).to(b.device)
            self.norm = replace(self.norm, weight=self.norm.weight[at])
        self.output = RowLinear(b, heads.width, hidden, "out_proj", bias=style.out_bias)
        matrices = b.kernels.state_dtype, (mine.heads, mine.keys, mine.dim)
        self.state = b.add_state(StateSpec((self.conv.part, matrices)))

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Space of norm(x), before the output matrix; x [T, hidden]."""
        heads, style = self.heads, self.style
        made = self.product.weight.matmul(x, ctx, norm=norm)
        z, mixed, rates = made.split((heads.width, heads.channels, heads.heads), dim=-1)
        z = z if self.gate == 1.0 else z * self.gate
        inputs, matrices = _parts(ctx, self.state)
        mixed = self.conv(mixed, inputs, ctx)
        found = ctx.kernels.recur_((mixed, rates), self.spec, matrices, ctx)
        if self.norm is None:
            gated = ctx.kernels.activate(found, "silu", z)
        elif self.spans:
            found, z = self.group.all_gather(found), self.group.all_gather(z)
            gated = ctx.kernels.norm(found, self.norm, z, style.norm, first=style.gate_first)
            gated = gated if self.group.exact else local_columns(gated, self.group).contiguous()
        else:
            gated = ctx.kernels.norm(found, self.norm, z, style.norm, first=style.gate_first)
        return gated


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """Channels, numbers kept for each channel, taps of the convolution, and the width that a token's pace is made
    from."""

    channels: int
    keys: int
    taps: int
    rank: int


class SelectiveScan(Projected):
    """Mamba-1: product -> short convolution -> (pace, b, c) -> scan -> gate -> output projection (+ residual)."""

    def __init__(
        self, b: Build, hidden: int, sizes: ScanSizes, style: SpaceStyle, norms: tuple[NormSpec, ...] = ()
    ) -> None:
        """norms: of pace, b and c, if a family has them."""
        b = share_out(b, "layers with a state space", sizes.channels)
        part = Rows(sizes.channels, sizes.channels, bare=True)
        self.product = FusedColumnLinear(b, hidden, "in_proj", (part, part), bias=style.bias)
        self.conv = Convolution(b, [part], sizes.taps, bias=style.conv_bias)
        own = part.index(0, b.group).to(b.device)
        every = b.whole()  # a small product of all channels, which every rank needs
        inner = [Rows(rows, rows) for rows in (sizes.rank, 2 * sizes.keys)]
        self.inner = FusedColumnLinear(every, sizes.channels, "x_proj", inner)
        self.pace = FusedColumnLinear(b, sizes.rank, "dt_proj", [part], bias=True)
        rate = b.tensor("A_log", (sizes.channels, sizes.keys), torch.float32)[own].exp().t().contiguous()
        self.norm: NormSpec | None = norms[0] if norms else None
        skip = b.tensor("D", (sizes.channels,), torch.float32)[own]
        self.spec = ScanSpec(rate, skip, (norms[1], norms[2]) if norms else None)
        self.output = RowLinear(b, sizes.channels, hidden, "out_proj", bias=style.out_bias)
        self.sizes = replace(sizes, channels=len(own))
        self.state = b.add_state(StateSpec((self.conv.part, (b.kernels.state_dtype, (sizes.keys, len(own))))))

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Scan of norm(x), before the output matrix; x [T, hidden]."""
        kernels, sizes = ctx.kernels, self.sizes
        values, z = self.product.weight.matmul(x, ctx, norm=norm).split(sizes.channels, dim=-1)
        inputs, numbers = _parts(ctx, self.state)
        values = self.conv(values, inputs, ctx)
        rank, mixed = self.inner.weight.matmul(self.group.all_gather(values), ctx).split(
            (sizes.rank, 2 * sizes.keys), dim=-1
        )
        rates = self.pace.weight.matmul(rank, ctx, norm=self.norm)
        found = kernels.recur_((values, rates, mixed), self.spec, numbers, ctx)
        return kernels.activate(found, "silu", z)


class GatedConvolution(Projected):
    """LFM2: (b | c | x) of the input -> c conv(b x) -> output projection (+ residual)."""

    def __init__(self, b: Build, hidden: int, taps: int, *, bias: bool) -> None:
        b = share_out(b, "layers with a short convolution", hidden)
        part = Rows(hidden, hidden, bare=True)
        self.product = FusedColumnLinear(b, hidden, "in_proj", (part, part, part), bias=bias)
        self.conv = Convolution(b, [part], taps, bias=bias, name="conv", silu=False)
        self.output = RowLinear(b, hidden, hidden, "out_proj", bias=bias)
        self.state = b.add_state(StateSpec((self.conv.part,)))

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Convolution of norm(x), before the output matrix; x [T, hidden]."""
        entering, through, values = self.product.weight.matmul(x, ctx, norm=norm).chunk(3, dim=-1)
        (inputs,) = _parts(ctx, self.state)
        return ctx.kernels.recur_((values, entering, through), self.conv.spec, inputs, ctx)


class FixedDecays(Projected):
    """MiniMax's lightning attention: silu of each head's (q | k | v) -> what keys have written, heads forget at rates
    of their own -> norm and gate -> output projection (+ residual). A state space whose paces are all 1."""

    def __init__(self, b: Build, hidden: int, heads: tuple[int, int], rates: Tensor, eps: float = 1e-6) -> None:
        """heads: how many, and the numbers of each."""
        count, dim = heads
        b = share_out(b, "lightning attention", count)
        part = Rows(count * dim, count, bare=True)
        order = torch.arange(3 * count * dim).view(count, 3, dim).transpose(0, 1).flip(0).reshape(-1)
        self.product = FusedColumnLinear(b, hidden, "qkv_proj", (part, part, part), order=order)
        self.gate = ColumnLinear(b, hidden, {"output_gate": part})
        own = Rows(count, count, bare=True).index(0, b.group)
        self.width, rates = len(own) * dim, rates[own].to(b.device)
        zeros = torch.zeros_like(rates)
        self.spec = SpaceSpec(len(own), dim, len(own), dim, rates, zeros, zeros, low=1.0, high=1.0)
        self.norm = replace(b.norm("norm", count * dim, eps), gate="sigmoid")
        self.output = RowLinear(b, count * dim, hidden, "out_proj")
        self.state = b.add_state(StateSpec(((b.kernels.state_dtype, (len(own), dim, dim)),)))

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Attention of norm(x), before the output matrix; x [T, hidden]."""
        mixed = self.product.weight.matmul(x, ctx, norm=norm, act="silu")
        z = self.gate.weight.matmul(x, ctx, norm=norm)
        (matrices,) = _parts(ctx, self.state)
        # Paces are held at 1, whatever they are made of.
        found = ctx.kernels.recur_((mixed, mixed[:, : self.spec.heads]), self.spec, matrices, ctx)
        if self.group.size == 1:
            return ctx.kernels.norm(found, self.norm, z, found.shape[1])
        found, z = self.group.all_gather(found), self.group.all_gather(z)
        y = ctx.kernels.norm(found, self.norm, z, found.shape[1])
        return y if self.group.exact else local_columns(y, self.group).contiguous()
