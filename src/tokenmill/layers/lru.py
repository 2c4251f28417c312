"""A gated linear recurrence of each channel (RG-LRU). Owns: the way from hidden states over a row's state back.

h = a h + sqrt(1 - a^2) (i x), where a = exp(-8 softplus(param) r), and i and r are sigmoids of products of each head's
channels. That is a selective scan of one number a channel whose pace is r: nothing else is needed of backends.

Knows nothing of families.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, NormSpec, ScanSpec, StateSpec, Weight
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, RowLinear, Rows, share_out
from tokenmill.layers.state_space import Convolution

_STEEP = 8.0
_SHUT = -80.0
"""A gate this far below zero lets nothing through. Below it, float32 cannot hold a value over its pace."""


class GatedRecurrence(Projected):
    """Two products -> short convolution -> recurrence, times what the activation lets through -> output."""

    def __init__(self, b: Build, sizes: tuple[int, int, int], taps: int, act: Act) -> None:
        """sizes: hidden, channels, heads; act: a gated one."""
        hidden, channels, heads = sizes
        b = share_out(b, "layers with a gated recurrence", heads)
        part = Rows(channels, heads, bare=True)
        own = part.index(0, b.group).to(b.device)
        self.act: Act = act
        self.width = channels // heads
        self.product = ColumnLinear(b, hidden, {"linear_y": part, "linear_x": part}, bias=True)
        self.conv = Convolution(b, [part], taps, bias=True, name="conv_1d", silu=False)
        inside = b.at("rg_lru")
        share = heads // b.group.size
        self.gates = self._gates(inside, heads, range(b.group.rank * share, (b.group.rank + 1) * share))
        self.rate = _STEEP * F.softplus(inside.tensor("recurrent_param", (channels,), torch.float64)[own])
        self.spec = ScanSpec(self.rate.float()[None].contiguous(), torch.zeros(len(own), device=b.device))
        self.output = RowLinear(b, channels, hidden, "linear_out", bias=True)
        self.state = b.add_state(StateSpec((self.conv.part, ("float32", (1, len(own))))))

    def _gates(self, b: Build, heads: int, own: range) -> list[Weight]:
        """For each head of this rank, both gates as one matrix."""
        width = self.width
        made: list[Weight] = []
        names = ("input_gate", "recurrent_gate")
        matrices = [b.tensor(f"{name}_weight", (heads, width, width)) for name in names]
        biases = [b.tensor(f"{name}_bias", (heads, width)) for name in names]
        for head in own:
            matrix = torch.cat([one[head].t() for one in matrices]).contiguous()
            made.append(b.settled(b.wrap(matrix, torch.cat([one[head] for one in biases]))))
        return made

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Recurrence of norm(x), before the output matrix; x [T, hidden]."""
        assert ctx.rows is not None, "states are found by row"
        inputs, numbers = ctx.rows.states[self.state]
        y, values = self.product.weight.matmul(x, ctx, norm=norm).chunk(2, dim=-1)
        values = self.conv(values, inputs, ctx)
        heads = values.split(self.width, dim=-1)
        gates = [gate.matmul(one.contiguous(), ctx) for gate, one in zip(self.gates, heads, strict=True)]
        opened, pace = torch.stack(gates, dim=1).chunk(2, dim=-1)
        found = ctx.kernels.recur_(self._scanned(values, opened, pace, ctx), self.spec, numbers, ctx)
        gated = ctx.kernels.activate(torch.cat((y, found.to(y.dtype)), dim=-1), self.act)
        return gated

    def _scanned(self, values: Tensor, opened: Tensor, pace: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """The inputs of the scan in float32. They are computed in double and rounded once, so that a row's bytes do not
        depend on how torch cuts the tensor."""
        opened, pace = (torch.sigmoid(one.double().flatten(1).clamp(min=_SHUT)) for one in (opened, pace))
        share = torch.sqrt(-torch.expm1(-2.0 * self.rate * pace))
        share = torch.where(ctx.positions[:, None] == 0, 1.0, share)  # the first token has nothing before it
        rates = torch.log(torch.expm1(pace))  # whose softplus is the pace
        value = values.double() * opened * share / pace
        ones = torch.ones(len(values), 2, device=values.device)
        return value.float(), rates.float(), ones
