"""Llama 1 to 3.3 and its likes: Mistral (sliding window), Yi, and whatever else says LlamaForCausalLM."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def build(c: ModelConfig, b: Build) -> Decoder:
    """Llama or Mistral from its config."""
    window = read_window(c) if c.architecture == "MistralForCausalLM" else 0
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = read_rope(c, heads.dim), c.need("intermediate_size", int)
    attention_bias, mlp_bias = c.get("attention_bias", bool, False), c.get("mlp_bias", bool, False)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=window)
        attention = Attention(
            separate_qkv(inside, sizes.hidden, heads, bias=attention_bias),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj", bias=attention_bias),
            spec,
        )
        mlp = gated_mlp(at.at("mlp"), sizes.hidden, inner, act, bias=mlp_bias)
        return PreNorm(attention, mlp, (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
