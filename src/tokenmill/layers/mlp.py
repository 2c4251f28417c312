"""Feed-forward layers. Owns: up -> activation -> down, gated or plain. Knows nothing of families."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, GateAct, NormSpec, Xielu
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, RowLinear, Rows
from tokenmill.layers.streams import mean_last

ByHand = Callable[[Tensor, ForwardContext], Tensor]
"""An activation that no kernel has: (x [T, D], context) -> [T, D], or [T, D / 2] for a gated one."""


class MLP(Projected):
    """act(norm(x) @ up) @ down (+ residual)."""

    def __init__(
        self,
        up: ColumnLinear,
        down: RowLinear,
        act: Act,
        *,
        by_hand: ByHand | None = None,
        within: NormSpec | None = None,
    ) -> None:
        """by_hand replaces `act`; within: a norm before the last matrix."""
        self.up = up
        self.output = down
        self.act: Act = act
        self.by_hand = by_hand
        self.by_row = by_hand is None
        self.within = within

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """The input of the last matrix [T, inner]."""
        if self.by_hand is None:
            y = self.up.weight.matmul(x, ctx, norm=norm, act=self.act)
        else:
            y = self.by_hand(self.up.weight.matmul(x, ctx, norm=norm), ctx)
        return y if self.within is None else ctx.kernels.norm(y, self.within)


def gated_mlp(b: Build, hidden: int, inner: int, act: Act, *, bias: bool = False) -> MLP:
    """gate_proj and up_proj as one weight, then down_proj."""
    part = Rows(inner, inner)
    up = ColumnLinear(b, hidden, {"gate_proj": part, "up_proj": part}, bias=bias)
    return MLP(up, RowLinear(b, inner, hidden, "down_proj", bias=bias), act)


def plain_mlp(
    b: Build, hidden: int, inner: int, act: Act, names: tuple[str, str], *, bias: bool = True, transposed: bool = False
) -> MLP:
    """Two matrices with these names."""
    up = ColumnLinear(b, hidden, {names[0]: Rows(inner, inner)}, bias=bias, transposed=transposed)
    return MLP(up, RowLinear(b, inner, hidden, names[1], bias=bias, transposed=transposed), act)


def gated_by(act: GateAct) -> ByHand:
    """act(gate) * up for an activation that has no gated kernel."""

    def activated(x: Tensor, ctx: ForwardContext) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ctx.kernels.activate(up, act, gate)

    return activated


def mostly_closed(share: float, act: Act, dtype: torch.dtype) -> ByHand:
    """Close every gate below the point that `share` of a normal distribution lies below; the other gates count from
    there."""
    point = float((torch.erfinv(torch.tensor(2 * share - 1)) * math.sqrt(2)).to(dtype))

    def activated(x: Tensor, ctx: ForwardContext) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        wide = gate.float()
        mean = mean_last(wide)
        away = wide - mean
        cut = mean + torch.sqrt(mean_last(away * away)) * point
        return ctx.kernels.activate(torch.cat((torch.relu(wide - cut).to(x.dtype), up), dim=-1), act)

    return activated


def xielu(b: Build) -> ByHand:
    """The integral of the exponential linear unit. Two learned numbers shape its halves; `beta` and `eps` are
    stored."""
    raised, lowered, beta, eps = (
        b.tensor(f"act_fn.{name}", shape, torch.float32)
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
    )
    parts = F.softplus(raised), beta + F.softplus(lowered), beta, eps
    act = Xielu(torch.cat([part.reshape(1) for part in parts]))
    return lambda x, ctx: ctx.kernels.activate(x, act)
