"""Phi-3, Phi-3.5 and Phi-4: Llama with fused matrices, longrope and optionally a window."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Attention, attention_spec
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear, Rows
from tokenmill.layers.mlp import MLP
from tokenmill.layers.rope import RopeSettings, make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def _rope(c: ModelConfig, dim: int) -> RopeSettings:
    """In this family "yarn" is an older name of longrope, and there is no other scaling."""
    found = read_rope(c, dim, partial=True)
    if found.kind not in ("default", "longrope", "yarn"):
        raise ModelError(f"config.json: rope type '{found.kind}' is not supported in Phi-3 (only longrope).")
    return replace(found, kind="longrope") if found.kind == "yarn" else found


def build(c: ModelConfig, b: Build) -> Decoder:
    """Phi-3 from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = _rope(c, heads.dim), c.need("intermediate_size", int)
    part = Rows(inner, inner)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside, mlp = at.at("self_attn"), at.at("mlp")
        attention = Attention(
            FusedColumnLinear(inside, sizes.hidden, "qkv_proj", heads.parts),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj"),
            attention_spec(b, heads, rope=make_rope(b, rope), window=read_window(c)),
        )
        up = FusedColumnLinear(mlp, sizes.hidden, "gate_up_proj", (part, part))
        feed_forward = MLP(up, RowLinear(mlp, inner, sizes.hidden, "down_proj"), act)
        return PreNorm(attention, feed_forward, (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
