"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a factor on whatever enters or leaves a block.

Factors on what attention reads are factors of its scores and of what it gives; those of the state space stand on the
columns of its first product; that of the feed-forward layer's gate is one of the norm before it, and of what leaves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, NormSpec
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, ByHand, gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.layers.state_space import StateSpace
from tokenmill.models.common import read_act, read_heads, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.mixers import SpaceKeys, make_space, space_heads
from tokenmill.models.positions import whole_rope
from tokenmill.models.rules import LEAST_SCALE

LEAST_GATE = 1e-2
"""The smallest factor of gates that the norm before them takes up."""
KEYS = SpaceKeys(width="mamba_d_ssm", out_bias="projectors_bias")


class SideBySide:
    """x += space(norm(x)) + attention(norm(x)); x += feed(norm(x)); each of the three with a factor."""

    def __init__(
        self,
        space: StateSpace,
        attention: Attention,
        feed: Block,
        norms: tuple[NormSpec, NormSpec],
        factors: tuple[float, float, float],
    ) -> None:
        self.space = space
        self.attention = attention
        self.feed = feed
        self.first, self.second = norms
        self.factors = factors

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        add, (space, attention, feed) = ctx.kernels.add, self.factors
        h = ctx.kernels.norm(x, self.first)
        x = add(x, self.space(h, ctx), space)
        x = add(x, self.attention(h, ctx), attention)
        return add(x, self.feed(x, ctx, norm=self.second), feed)


def build(c: ModelConfig, b: Build) -> Decoder:
    """The model from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = whole_rope(c, heads.dim), c.need("intermediate_size", int)
    first, second = rms(c, "input_layernorm"), rms(c, "pre_ff_layernorm")
    entering = c.get("attention_in_multiplier", float, 1.0, low=LEAST_SCALE)
    scale = heads.dim**-0.5 * c.get("key_multiplier", float, 1.0, low=LEAST_SCALE) * entering**2
    gate, down = _factors(c, "mlp_multipliers", 2)
    leaving = c.get("ssm_out_multiplier", float, 1.0), c.get("attention_out_multiplier", float, 1.0) * entering
    bias = c.get("mlp_bias", bool, False)
    absorbed = gate > LEAST_GATE and not bias
    columns = _columns(c).to(device=b.device, dtype=b.dtype)

    def layer(body: Build, index: int) -> SideBySide:
        at = body.at(f"layers.{index}")
        _tell_divisors(at, entering, c.get("ssm_in_multiplier", float, 1.0, low=LEAST_SCALE))
        space = make_space(c, at.at("mamba"), KEYS, norm=c.get("mamba_rms_norm", bool, False), factors=columns)
        inside = at.at("self_attn")
        spec = attention_spec(b, heads, scale=scale, rope=make_rope(b, rope))
        output = RowLinear(inside, heads.width, sizes.hidden, "o_proj")
        attention = Attention(separate_qkv(inside, sizes.hidden, heads), output, spec)
        feed = gated_mlp(at.at("feed_forward"), sizes.hidden, inner, act, bias=bias)
        before = second(at)
        if absorbed:  # the other half of the product is as much larger, too
            before = replace(before, weight=before.weight * gate)
        elif gate != 1.0:
            feed = MLP(feed.up, feed.output, act, by_hand=_with_factor(gate, act))
        return SideBySide(space, attention, feed, (first(at), before), (*leaving, down / gate if absorbed else down))

    ends = Ends(
        norm=rms(c, "final_layernorm"),
        scale=c.get("embedding_multiplier", float, 1.0),
        logit_scale=c.get("lm_head_multiplier", float, 1.0),
    )
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def _with_factor(factor: float, act: Act) -> ByHand:
    """act(factor * gate) * up."""

    def activated(x: Tensor, ctx: ForwardContext) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ctx.kernels.activate(torch.cat((gate * factor, up), dim=-1), act)

    return activated


def _tell_divisors(at: Build, entering: float, space: float) -> None:
    """Factors of inputs are multiplied behind products here, which have no biases but those of adapters."""
    if at.adapters is not None:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            at.adapters.divides(at.path(f"self_attn.{name}"), entering)
        at.adapters.divides(at.path("mamba.in_proj"), space)


def _factors(c: ModelConfig, name: str, count: int) -> list[float]:
    """A list of this many numbers; ones if it is absent."""
    multipliers = c.get(name, list, [1.0] * count)
    if len(multipliers) != count:
        raise c.refuse(name, f"must be {count} numbers.")
    return [ModelConfig({name: one}).need(name, float) for one in multipliers]


def _columns(c: ModelConfig) -> Tensor:
    """The factor of each column of the state space's first product: gates, values, keys, queries, paces."""
    heads = space_heads(c, KEYS)
    sizes = [heads.width, heads.width, *[heads.groups * heads.keys] * 2, heads.heads]
    found = torch.cat([torch.full((n,), one) for n, one in zip(sizes, _factors(c, "ssm_multipliers", 5), strict=True)])
    return found * c.get("ssm_in_multiplier", float, 1.0)
