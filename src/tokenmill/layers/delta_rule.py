"""Layers with a gated delta rule in place of attention. Owns: the way from hidden states over a row's state back.

Knows nothing of families: they say how heads are shaped and how the product's rows are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ConvSpec, DeltaSpec, ForwardContext, NormSpec, StateSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import (
    ColumnLinear,
    FusedColumnLinear,
    ReorderedColumnLinear,
    RowLinear,
    Rows,
    local_rows,
    share_out,
)

_WHAT = "layers with a delta rule"


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The shape of the heads: every key head serves value_heads / key_heads value heads. `taps`: of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False
    """Value heads that share a key head are not neighbours, but lie key_heads apart."""
    most_beta: float = 1.0
    floor: float = 0.0
    """See DeltaSpec."""

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of all keys and of all values."""
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """How many channels the convolution has: queries, keys and values."""
        keys, values = self.widths
        return 2 * keys + values

    @property
    def mixed(self) -> list[Rows]:
        """The same channels, as parts that are split with the heads."""
        keys = Rows(self.widths[0], self.key_heads, bare=True, repeats=True)
        return [keys, keys, self.values(self.value_dim)]

    def values(self, numbers: int) -> Rows:
        """A part with so many numbers for every value head."""
        return Rows(self.value_heads * numbers, self.value_heads, bare=True)

    def of(self, ranks: int) -> DeltaHeads:
        """The heads of each of so many ranks. If key heads are fewer than ranks, they are repeated."""
        return replace(self, key_heads=max(1, self.key_heads // ranks), value_heads=self.value_heads // ranks)

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a row's matrices."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """What a family calls the tensors: products of queries, keys and values (one, or one each), products of z, beta and
    rates, the norm and the last product."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    gates: tuple[str, str, str] = ("in_proj_z", "in_proj_b", "in_proj_a")
    norm: str = "norm"
    output: str = "out_proj"
    rate: str = "A_log"
    shift: str = "dt_bias"
    narrow: tuple[str, str] | None = None
    """The products of z and rates have two steps: these first ones, to the width of one head, and those of `gates`."""


class GatedDelta(Projected):
    """Product -> short convolution -> delta rule -> gated norm -> output projection (+ residual)."""

    def __init__(self, b: Build, hidden: int, heads: DeltaHeads, eps: float, names: DeltaNames | None = None) -> None:
        """b: where the layer's tensors lie; products stored apart, as `names` says, or head by head (in_proj_qkvz)."""
        names = names or DeltaNames()
        b = b.alone(_WHAT) if heads.tiled else share_out(b, _WHAT, heads.value_heads, heads.key_heads)
        self.products = self._make(b, hidden, heads, names)
        taps = _taps(b, heads, apart=len(names.qkv) > 1 and b.has("q_conv1d.weight"))
        self.conv = ConvSpec(taps[local_rows(b.group, heads.mixed).to(b.device), 0].t().contiguous())
        own = heads.values(1).index(0, b.group).to(b.device)
        rate = _flat(b, names.rate, heads.value_heads)[own].exp()
        paces = heads.values(self.paces(heads))
        shift = b.tensor(names.shift, (paces.rows,), torch.float32)[paces.index(0, b.group).to(b.device)]
        self.heads = mine = heads.of(b.group.size)
        sizes = mine.key_heads, mine.value_heads, mine.key_dim, mine.value_dim
        self.spec = DeltaSpec(*sizes, rate, shift, heads.tiled, heads.most_beta, heads.floor)
        self.norm: NormSpec = b.norm(names.norm, heads.value_dim, eps)
        self.output = RowLinear(b, heads.widths[1], hidden, names.output)
        kept = str(b.dtype).removeprefix("torch.")
        parts = ((kept, (heads.taps - 1, mine.channels)), (b.kernels.state_dtype, mine.state))
        self.state = b.add_state(StateSpec(parts))

    def _make(self, b: Build, hidden: int, heads: DeltaHeads, names: DeltaNames) -> list[ColumnLinear]:
        return _joined(b, hidden, heads) if b.has("in_proj_qkvz.weight") else _apart(b, hidden, heads, names)

    @staticmethod
    def paces(heads: DeltaHeads) -> int:
        """How many decays a value head has."""
        return 1

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Delta of norm(x), before the output matrix; x [T, hidden]."""
        kernels, heads = ctx.kernels, self.heads
        mixed, z, *gates = self._products(x, ctx, norm)
        assert ctx.rows is not None, "states are found by row"
        inputs, matrices = ctx.rows.states[self.state]
        mixed = kernels.recur_((mixed,), self.conv, inputs, ctx)
        found = kernels.recur_((mixed, *gates), self.spec, matrices, ctx)
        gated = kernels.norm(found.flatten(1), self.norm, z, heads.value_dim)
        return gated

    def _products(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None) -> list[Tensor]:
        """(q | k | v), z and (beta | rate), or beta and rate, of the layer's input."""
        gates = self.heads.value_heads * (1 + self.paces(self.heads))
        sizes = (self.heads.channels, self.heads.widths[1], gates)
        made = [part.weight.matmul(x, ctx, norm=norm) for part in self.products]
        if len(made) == 1:
            return list(made[0].split(sizes, dim=-1))
        return [made[0], *made[1].split(sizes[1:], dim=-1)]


class KeyedDelta(GatedDelta):
    """Kimi's: each line of a head's matrix has a decay of its own, and z passes through a sigmoid. Both are made of the
    input, or (DeltaNames.narrow) in two steps."""

    def __init__(self, b: Build, hidden: int, heads: DeltaHeads, eps: float, names: DeltaNames) -> None:
        super().__init__(b, hidden, heads, eps, names)
        self.norm = replace(self.norm, gate="sigmoid")

    def _make(self, b: Build, hidden: int, heads: DeltaHeads, names: DeltaNames) -> list[ColumnLinear]:
        """Of the input: queries, keys, values, betas and, whole on every rank, what z and paces are made of."""
        z, beta, pace = names.gates
        if names.narrow is None:
            direct = {z: heads.values(heads.value_dim), beta: heads.values(1), pace: heads.values(self.paces(heads))}
            return [ColumnLinear(b, hidden, {**dict(zip(names.qkv, heads.mixed, strict=True)), **direct})]
        low = dict.fromkeys(names.narrow, Rows(heads.value_dim, 1, bare=True, repeats=True))
        first = {**dict(zip(names.qkv, heads.mixed, strict=True)), beta: heads.values(1), **low}
        wide = ((z, heads.values(heads.value_dim)), (pace, heads.values(self.paces(heads))))
        return [ColumnLinear(b, hidden, first), *(ColumnLinear(b, heads.value_dim, {name: r}) for name, r in wide)]

    @staticmethod
    def paces(heads: DeltaHeads) -> int:
        """One for each line."""
        return heads.key_dim

    def _products(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None) -> list[Tensor]:
        heads = self.heads
        if len(self.products) == 1:
            return super()._products(x, ctx, norm)
        first, wide, paces = (part.weight for part in self.products)
        mixed, beta, *low = first.matmul(x, ctx, norm=norm).split(
            (heads.channels, heads.value_heads, heads.value_dim, heads.value_dim), dim=-1
        )
        z, pace = (weight.matmul(one, ctx) for weight, one in zip((wide, paces), low, strict=True))
        return [mixed, z, beta, pace]


def _flat(b: Build, name: str, count: int) -> Tensor:
    """So many numbers, whatever the shape in which they are stored."""
    shape = b.checkpoint.shape(b.path(name)) if b.has(name) else None
    return b.tensor(name, shape if shape and math.prod(shape) == count else (count,), torch.float32).view(-1)


def _taps(b: Build, heads: DeltaHeads, *, apart: bool) -> Tensor:
    """The convolution's numbers [channels, 1, taps]. Where they lie apart they are joined wherever they were cut:
    Transformers writes parts of one size, whatever the widths."""
    if not apart:
        return b.tensor("conv1d.weight", (heads.channels, 1, heads.taps), torch.float32)
    parts = []
    for letter, part in zip("qkv", heads.mixed, strict=True):
        found = b.checkpoint.shape(b.path(f"{letter}_conv1d.weight"))
        rows = found[0] if found else part.rows
        parts.append(b.tensor(f"{letter}_conv1d.weight", (rows, 1, heads.taps), torch.float32))
    taps = torch.cat(parts)
    if len(taps) != heads.channels:
        raise ModelError(f"{b.path('q_conv1d')}: the convolutions have {len(taps)} channels, not {heads.channels}.")
    return taps


def _apart(b: Build, hidden: int, heads: DeltaHeads, names: DeltaNames) -> list[ColumnLinear]:
    gates = heads.values(1)
    z = dict(zip(names.gates, (heads.values(heads.value_dim), gates, gates), strict=True))
    if len(names.qkv) > 1:
        return [ColumnLinear(b, hidden, {**dict(zip(names.qkv, heads.mixed, strict=True)), **z})]
    if b.group.size == 1:
        return [ColumnLinear(b, hidden, {names.qkv[0]: Rows(heads.channels, heads.channels), **z})]
    return [FusedColumnLinear(b, hidden, names.qkv[0], heads.mixed), ColumnLinear(b, hidden, z)]


def _joined(b: Build, hidden: int, heads: DeltaHeads) -> list[ColumnLinear]:
    """The products, stored key head by key head: (q, k, its values, their gates) and (its betas, their rates)."""
    share = heads.value_heads // heads.key_heads
    big = (heads.key_dim, heads.key_dim, share * heads.value_dim, share * heads.value_dim)
    stored = {
        "in_proj_qkvz": ([*heads.mixed, heads.values(heads.value_dim)], _by_part(heads.key_heads, big)),
        "in_proj_ba": ([heads.values(1)] * 2, _by_part(heads.key_heads, (share, share))),
    }
    return [ReorderedColumnLinear(b, hidden, stored)]


def _by_part(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """The row order that turns [heads, (part, part, ...)] into [part of all heads | ...]."""
    rows = torch.arange(heads * sum(sizes)).view(heads, sum(sizes))
    return torch.cat([part.reshape(-1) for part in rows.split(sizes, dim=1)])
