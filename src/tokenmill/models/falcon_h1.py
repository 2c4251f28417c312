"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a factor on whatever enters or leaves a block.

None of them takes an operation of its own. That of the state space's gate is one of the norm before it, which
attention reads, too: factors on what attention reads are factors of its scores and of what it gives. Those of the other
inputs of the state space stand in its convolution and its paces. That of the feed-forward layer's gate is one of the
norm before it, and of what leaves. The factor of what leaves the state space is one of its result, and the stream is
divided by that of attention; or the stream is divided by the first, if the result is normed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, NormSpec
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.block import Block, Stream, added, read, through, whole
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, ByHand, gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.layers.state_space import StateSpace
from tokenmill.models.common import as_unit, read_act, read_heads, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.falcon_h1_factors import LEAST_GATE, read_entering, read_factors, tell_divisors, times
from tokenmill.models.mixers import SpaceKeys, make_space
from tokenmill.models.positions import whole_rope
from tokenmill.models.rules import LEAST_SCALE

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

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        space, attention, feed = self.factors
        x, h, left = read(x, self.first, ctx)
        x = whole(added(x, self.space, h, ctx, left, scale=space), ctx)
        x = added(x, self.attention, h, ctx, left, scale=attention)
        return through(x, self.feed, ctx, self.second, scale=feed)


def build(c: ModelConfig, b: Build) -> Decoder:
    """The model from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = whole_rope(c, heads.dim), c.need("intermediate_size", int)
    entering = read_entering(c)
    scale = heads.dim**-0.5 * c.get("key_multiplier", float, 1.0, low=LEAST_SCALE) * entering.left**2
    gate, down = read_factors(c, "mlp_multipliers", 2)
    bias = c.get("mlp_bias", bool, False)
    absorbed = gate > LEAST_GATE and not bias
    leaving = (
        c.get("ssm_out_multiplier", float, 1.0),
        c.get("attention_out_multiplier", float, 1.0) * entering.left,
        down / gate if absorbed else down,
    )
    normed = c.get("mamba_rms_norm", bool, False)
    gains = not normed and leaving[0] != 0.0 and not c.get(KEYS.out_bias, bool, False) and b.adapters is None
    unit = as_unit(b, leaving[1] if gains else leaving[0])
    gain = leaving[0] / unit if gains else 1.0
    factors = leaving[0] / unit / gain, leaving[1] / unit, leaving[2] / unit
    first, second = rms(c, "input_layernorm", unit=unit), rms(c, "pre_ff_layernorm", unit=unit)

    def layer(body: Build, index: int) -> SideBySide:
        at = body.at(f"layers.{index}")
        tell_divisors(at, entering)
        block = make_space(c, at.at("mamba"), KEYS, norm=normed, factors=entering.parts, gain=gain)
        inside = at.at("self_attn")
        spec = attention_spec(b, heads, scale=scale, rope=make_rope(b, rope))
        output = RowLinear(inside, heads.width, sizes.hidden, "o_proj")
        attention = Attention(separate_qkv(inside, sizes.hidden, heads), output, spec)
        feed = gated_mlp(at.at("feed_forward"), sizes.hidden, inner, act, bias=bias)
        if gate != 1.0 and not absorbed:
            feed = MLP(feed.up, feed.output, act, by_hand=_with_factor(gate, act))
        # With the gate's factor the other half of the product is as much larger, too.
        norms = times(first(at), entering.norm), times(second(at), gate if absorbed else 1.0)
        return SideBySide(block, attention, feed, norms, factors)

    ends = Ends(
        norm=rms(c, "final_layernorm", unit=unit),
        unit=unit,
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
