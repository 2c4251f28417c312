"""The blocks that layers of Zamba 2 share. Owns: their matrices, and one layer's way through a block.

Must not know: which layers share a block, what else is in a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.layers.attention import Heads, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, FusedColumnLinear, RowLinear, Rows
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import read_act
from tokenmill.models.config import ModelConfig
from tokenmill.models.positions import whole_rope


class Narrow:
    """up(down(x)) in parts: what a layer adds to a product that it shares."""

    def __init__(self, b: Build, inputs: int, rank: int, ups: dict[str, Rows]) -> None:
        self.downs = [b.settled(b.weight(f"{name}.0", (rank, inputs))) for name in ups]
        self.ups = [ColumnLinear(b, rank, {f"{name}.1": rows}) for name, rows in ups.items()]

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, inputs] -> [T, all parts]."""
        pairs = zip(self.downs, self.ups, strict=True)
        return torch.cat([up.weight.matmul(down.matmul(x, ctx), ctx) for down, up in pairs], dim=1)


class Shared:
    """The matrices of one block: attention over (stream | embeddings), and a feed-forward layer."""

    def __init__(self, c: ModelConfig, b: Build, hidden: int, heads: Heads) -> None:
        inside, feed = b.at("self_attn"), b.at("feed_forward")
        inner, bias = c.get("intermediate_size", int, 4 * hidden), c.get("add_bias_linear", bool, False)
        self.part = Rows(inner, inner)
        self.qkv = separate_qkv(inside, 2 * hidden, heads)
        self.o_proj = RowLinear(inside, heads.width, hidden, "o_proj")
        self.up = FusedColumnLinear(feed, hidden, "gate_up_proj", (self.part, self.part), bias=bias)
        self.down = RowLinear(feed, inner, hidden, "down_proj", bias=bias)
        self.act = read_act(c, gated=True, default="gelu")
        eps = c.get("rms_norm_eps", float, 1e-5, low=0.0)
        self.norms = b.norm("input_layernorm", 2 * hidden, eps), b.norm("pre_ff_layernorm", hidden, eps)


class Visit:
    """One layer's way through a shared block."""

    def __init__(self, c: ModelConfig, b: Build, shared: Shared, at: tuple[Build, int, int], heads: Heads) -> None:
        """at: where the shared block lies, which visit of all layers this is, and the hidden size."""
        place, number, hidden = at
        self.shared = shared
        rope = make_rope(b, whole_rope(c, heads.dim)) if c.get("use_mem_rope", bool, False) else None
        self.spec = attention_spec(b, heads, scale=(heads.dim / 2) ** -0.5, rope=rope)
        rank, inside = c.get("adapter_rank", int, 128), place.at("self_attn")
        self.own: Narrow | None = None
        if c.get("use_shared_attention_adapter", bool, False):
            names = (f"linear_{letter}_adapter_list.{number}" for letter in "qkv")
            self.own = Narrow(inside, 2 * hidden, rank, dict(zip(names, heads.parts, strict=True)))
        feed = place.at(f"feed_forward.gate_up_proj_adapter_list.{number}")
        self.lower = feed.settled(feed.weight("0", (rank, hidden)))
        self.upper = FusedColumnLinear(feed, rank, "1", (shared.part, shared.part))

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, stream | embeddings] -> [T, hidden]."""
        shared, kernels = self.shared, ctx.kernels
        h = kernels.norm(x, shared.norms[0])
        qkv = shared.qkv.weight.matmul(h, ctx)
        if self.own is not None:
            qkv = kernels.add(qkv, self.own(h, ctx))
        y = kernels.norm(shared.o_proj(kernels.attend(qkv, self.spec, ctx), ctx), shared.norms[1])
        up = self.upper.weight.matmul(self.lower.matmul(y, ctx), ctx, residual=shared.up.weight.matmul(y, ctx))
        return shared.down(kernels.activate(up, shared.act), ctx)
