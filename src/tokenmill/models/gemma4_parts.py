"""Attention of Gemma 3n and 4, and the plan of their layers. Owns: which share keys and values, how heads are shaped.

Must not know: what lies around the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, NormSpec, Touches
from tokenmill.layers.attention import Attention, Heads, attention_spec
from tokenmill.layers.block import Block, Projected
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, RowLinear
from tokenmill.layers.rope import RopeSettings, make_rope
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import check_heads
from tokenmill.models.positions import rope_of_kind
from tokenmill.models.rules import layer_kind

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""The norms around both blocks of a layer."""
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@dataclass(slots=True)
class Plan:
    """The config's settings for all layers. `made` holds each layer's attention so far."""

    layers: int
    kinds: list[str]
    shared: int
    """The first layer that reads the keys and values of a lower one."""
    eps: float
    layer_width: int
    heads: Callable[[ModelConfig, Plan, int], Heads]
    """How the heads of a layer are shaped."""
    rope: Callable[[ModelConfig, int, str], RopeSettings]
    """How a kind of layer rotates heads of some size."""
    made: dict[int, AttentionSpec] = field(default_factory=dict)

    def lends(self, index: int) -> int | None:
        """The layer whose keys and values this one reads. None: its own."""
        if index < self.shared:
            return None
        return max(i for i in range(self.shared) if self.kinds[i] == self.kinds[index])


def read_plan(c: ModelConfig) -> Plan:
    """Read the plan from a config. The last layer always has full attention."""
    layers = c.need("num_hidden_layers", int)
    kinds = [layer_kind(c, i, "sliding_attention" if (i + 1) % 6 else "full_attention") for i in range(layers)]
    kinds[-1] = "full_attention"
    shared = first_shared(c, kinds)
    eps = c.get("rms_norm_eps", float, 1e-6, low=0.0)
    return Plan(layers, kinds, shared, eps, c.get("hidden_size_per_layer_input", int, 256, low=0), _heads, _rope)


def first_shared(c: ModelConfig, kinds: list[str]) -> int:
    """The first layer that has no keys and values of its own."""
    shared = len(kinds) - c.get("num_kv_shared_layers", int, 0, low=0, high=len(kinds) - 1)
    if set(kinds[:shared]) != set(kinds):
        raise c.refuse("num_kv_shared_layers", "leaves no keys and values for some kind of layer.")
    return shared


def _heads(c: ModelConfig, plan: Plan, index: int) -> Heads:
    """The heads of this layer. Layers with full attention may have other sizes and counts."""
    own: dict[str, int] = {}
    if c.has("per_layer_config"):
        every = ModelConfig(c.need("per_layer_config", dict), "per_layer_config")
        own = every.get(str(index), dict, {})
        if set(own) - {"head_dim", "num_key_value_heads"}:
            raise every.refuse(str(index), "is not supported (only head_dim and num_key_value_heads).")
    elif plan.kinds[index] == "full_attention":
        own = {"head_dim": c.get("global_head_dim", int, 512)}
        if c.get("attention_k_eq_v", bool, False) and c.has("num_global_key_value_heads"):
            own["num_key_value_heads"] = c.need("num_global_key_value_heads", int)
    layer_config = ModelConfig({**c.data, **own})
    heads, kv_heads = layer_config.need("num_attention_heads", int), layer_config.get("num_key_value_heads", int, 4)
    check_heads(heads, kv_heads)
    return Heads(heads, kv_heads, layer_config.get("head_dim", int, 256))


def _rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    every = ModelConfig(c.get("rope_parameters", dict, dict(_ROPE)), "rope_parameters")
    return rope_of_kind(c, every.need(kind, dict), dim, kind)


class Borrowing(Projected):
    """Attention over the keys and values of another layer."""

    def __init__(self, query: ColumnLinear, output: RowLinear, spec: AttentionSpec) -> None:
        self.query, self.output, self.spec = query, output, spec

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Attention of norm(x), before the output matrix; x [T, hidden]."""
        return ctx.kernels.attend(self.query.weight.matmul(x, ctx, norm=norm), self.spec, ctx)


def make_attention(c: ModelConfig, b: Build, at: Build, plan: Plan, index: int) -> Block:
    """One layer's attention."""
    inside, hidden, kind = at.at("self_attn"), c.need("hidden_size", int), plan.kinds[index]
    heads, bias = plan.heads(c, plan, index), c.get("attention_bias", bool, False)
    window = c.need("sliding_window", int) if kind == "sliding_attention" else 0
    rope, q_norm = make_rope(b, plan.rope(c, heads.dim, kind)), inside.norm("q_norm", heads.dim, plan.eps)
    same = c.get("attention_k_eq_v", bool, False) and not window
    names = ("q_proj", "k_proj") if same else ("q_proj", "k_proj", "v_proj")
    lender = plan.lends(index)
    output = RowLinear(inside, heads.width, hidden, "o_proj", bias=bias)
    if lender is not None:
        _check_lent(c, plan, index, lender)
        b.book.used.update(inside.path(f"{name}.weight") for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
        query = ColumnLinear(inside, hidden, {"q_proj": heads.parts[0]}, bias=bias)
        borrowed = replace(plan.made[lender], rope=rope, touches=Touches(q_norm, values="stored"))
        return Borrowing(query, output, borrowed)
    ones = NormSpec(torch.ones(heads.dim, dtype=b.dtype, device=b.device), plan.eps)
    k_norm = inside.norm("k_norm", heads.dim, plan.eps)
    touches = Touches(q_norm, k_norm, ones, values="keys" if same else "own")
    spec = plan.made[index] = attention_spec(b, heads, scale=1.0, rope=rope, window=window, touches=touches)
    qkv = ColumnLinear(inside, hidden, dict(zip(names, heads.parts, strict=False)), bias=bias)
    return Attention(qkv, output, spec)


def _check_lent(c: ModelConfig, plan: Plan, index: int, lender: int) -> None:
    """Refuse heads that do not fit the keys and values which they borrow."""
    if plan.heads(c, plan, index) != plan.heads(c, plan, lender):
        name = "per_layer_config" if c.has("per_layer_config") else "layer_types"
        raise c.refuse(name, f"gives layer {index} other heads than layer {lender}, whose keys and values it reads.")
