"""Attention layers. Owns: the way from hidden states over paged K/V back to hidden states, and its descriptor.

Knows nothing of families: they say how heads are shaped, scaled, rotated and named.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GateAct, KVSpec, NormSpec, RopeSpec, Touches
from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, GatedColumnLinear, RowLinear, Rows


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one layer's heads, before they are split over ranks."""

    heads: int
    kv_heads: int
    dim: int
    values: int = 0
    """The size of a head's values; 0: that of its keys."""

    @property
    def value_dim(self) -> int:
        """The size of a head's values."""
        return self.values or self.dim

    @property
    def parts(self) -> tuple[Rows, Rows, Rows]:
        """The rows of q, k and v in the matrix."""
        keys, values = (Rows(self.kv_heads * dim, self.kv_heads, repeats=True) for dim in (self.dim, self.value_dim))
        return Rows(self.heads * self.dim, self.heads), keys, values

    @property
    def width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.dim

    @property
    def out(self) -> Rows:
        """The columns of attention's result."""
        return Rows(self.heads * self.value_dim, self.heads)


def attention_spec(
    b: Build,
    heads: Heads,
    *,
    scale: float | None = None,
    rope: RopeSpec | None = None,
    window: int = 0,
    softcap: float = 0.0,
    touches: Touches | None = None,
    alibi: Tensor | None = None,
) -> AttentionSpec:
    """Register one layer's K/V and describe its attention (this rank's heads). window: see AttentionSpec."""
    parts = heads.parts
    local = [heads.heads // parts[0].share(b.group)[1], heads.kv_heads // parts[1].share(b.group)[1]]
    kv = KVSpec("window" if window else "full", local[1], heads.dim, heads.value_dim, abs(window))
    layer, group = b.add_kv(kv)
    return AttentionSpec(
        layer=layer,
        group=group,
        heads=local[0],
        kv=kv,
        scale=heads.dim**-0.5 if scale is None else scale,
        rope=rope,
        touches=touches or Touches(),
        softcap=softcap,
        window=window,
        alibi=alibi,
    )


def local_heads(b: Build, values: Tensor) -> Tensor:
    """This rank's part of a per-head tensor [H] (sinks, slopes)."""
    return values.chunk(b.group.size)[b.group.rank].contiguous()


def temperatures(count: int, beta: float, span: float, offset: float) -> Tensor:
    """1 + beta * log(1 + floor((position + offset) / span)) [count] in float32."""
    positions = torch.arange(count, dtype=torch.float64)
    return (1.0 + beta * torch.log1p(torch.floor((positions + offset) / span))).float()


def alibi_slopes(heads: int) -> Tensor:
    """One slope for each head [H]: a geometric series if H is a power of two, otherwise interleaved with the next
    series."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def per_head_order(heads: Heads) -> Tensor:
    """The row order that turns a matrix fused head by head, [H, (q, k, v), D], into [q | k | v]."""
    return torch.arange(3 * heads.width).view(heads.heads, 3, heads.dim).transpose(0, 1).reshape(-1)


def per_head_order_if_many(heads: Heads) -> Tensor | None:
    """The same, if keys have as many heads as queries; otherwise None: the matrix is [q | k | v] already."""
    return None if heads.kv_heads == 1 else per_head_order(heads)


def codegen_order(heads: Heads) -> Tensor:
    """The row order that turns a matrix fused in four parts, [4, (q, v, k), H / 4, D], into [q | k | v]."""
    if heads.heads % 4:
        raise ModelError(
            f"config.json: {heads.heads} attention heads ('num_attention_heads' or 'n_head') cannot be shared out to "
            "the four parts of qkv."
        )
    parts = torch.arange(3 * heads.width).view(4, 3, -1).transpose(0, 1)
    return torch.cat([parts[0].reshape(-1), parts[2].reshape(-1), parts[1].reshape(-1)])


class GatedAttention(Projected):
    """Attention whose output is multiplied by the sigmoid of a gate; q_proj holds (query, gate) of each head."""

    def __init__(self, b: Build, hidden: int, heads: Heads, spec: AttentionSpec, *, bias: bool = False) -> None:
        rows = torch.arange(2 * heads.width).view(heads.heads, 2, heads.dim).transpose(0, 1).reshape(-1)
        self.product = GatedColumnLinear(b, hidden, ("q_proj", "k_proj", "v_proj"), heads.parts, order=rows, bias=bias)
        self.output = RowLinear(b, heads.width, hidden, "o_proj", bias=bias)
        self.spec = spec
        self.width = spec.heads * heads.dim

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Gate * attention of norm(x), before the output matrix; x [T, hidden]."""
        made = self.product.weight.matmul(x, ctx, norm=norm)
        mixed = ctx.kernels.attend(made[:, : -self.width], self.spec, ctx)
        gated = ctx.kernels.activate(mixed, "sigmoid", made[:, -self.width :])
        return gated


class Attention(Projected):
    """qkv -> prepare -> attend -> output projection (+ residual)."""

    def __init__(
        self,
        qkv: ColumnLinear,
        output: RowLinear,
        spec: AttentionSpec,
        *,
        within: NormSpec | None = None,
        gate: ColumnLinear | None = None,
        gate_act: GateAct = "sigmoid",
    ) -> None:
        """within: a norm before the output projection. gate: its
        sigmoid (or softplus) multiplies the output of attention, by column or by head."""
        self.qkv = qkv
        self.output = output
        self.spec = spec
        self.within = within
        self.gate = gate
        self.gate_act = gate_act

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Attention of norm(x), before the output matrix; x [T, hidden]."""
        qkv = self.qkv.weight.matmul(x, ctx, norm=norm)
        gate = None if self.gate is None else self.gate.weight.matmul(x, ctx, norm=norm)
        mixed = ctx.kernels.attend(qkv, self.spec, ctx)
        if gate is not None:
            mixed = ctx.kernels.activate(mixed, self.gate_act, gate)
        if self.within is not None:
            mixed = ctx.kernels.norm(mixed, self.within)
        return mixed


def separate_qkv(b: Build, hidden: int, heads: Heads, *, bias: bool = False) -> ColumnLinear:
    """q_proj, k_proj and v_proj as one weight."""
    return ColumnLinear(b, hidden, dict(zip(("q_proj", "k_proj", "v_proj"), heads.parts, strict=True)), bias=bias)
