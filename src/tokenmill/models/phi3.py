"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices, longrope and optionally a window."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, attention_spec
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear, Rows
from tokenmill.layers.mlp import MLP
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def build(c: ModelConfig, b: Build) -> Decoder:
    """Phi-3 from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = read_rope(c, heads.dim), c.need("intermediate_size", int)
    part = Rows(inner, inner)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside, mlp = at.at("self_attn"), at.at("mlp")
        window = read_window(c, index, "sliding_attention")
        attention = Attention(
            FusedColumnLinear(inside, sizes.hidden, "qkv_proj", heads.parts),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj"),
            attention_spec(b, heads, rope=make_rope(b, rope), window=window),
        )
        up = FusedColumnLinear(mlp, sizes.hidden, "gate_up_proj", (part, part))
        feed_forward = MLP(up, RowLinear(mlp, inner, sizes.hidden, "down_proj"), act)
        return PreNorm(attention, feed_forward, (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
