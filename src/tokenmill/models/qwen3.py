"""Qwen3: Llama with a norm on every query and key head."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.qwen2 import qwen_window


def build(c: ModelConfig, b: Build) -> Decoder:
    """Qwen3 from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = read_rope(c, heads.dim), c.need("intermediate_size", int)
    bias, eps = c.get("attention_bias", bool, False), c.get("rms_norm_eps", float, 1e-6, low=0.0)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        norms = (inside.norm("q_norm", heads.dim, eps), inside.norm("k_norm", heads.dim, eps))
        window = qwen_window(c, index)
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=window, norms=norms)
        attention = Attention(
            separate_qkv(inside, sizes.hidden, heads, bias=bias),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj", bias=bias),
            spec,
        )
        return PreNorm(attention, gated_mlp(at.at("mlp"), sizes.hidden, inner, act), (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
