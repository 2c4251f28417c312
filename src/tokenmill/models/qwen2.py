"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally a window on the upper layers."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, layer_type, read_act, read_heads, read_rope, read_sizes, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def qwen_window(c: ModelConfig, index: int) -> int:
    """The window of one layer: only with `use_sliding_window`, and from `max_window_layers` on."""
    window = read_window(c) if c.get("use_sliding_window", bool, False) else 0
    upper = bool(window) and index >= c.get("max_window_layers", int, 28, low=0)
    kind = layer_type(c, index, "sliding_attention" if upper else "full_attention")
    if kind == "sliding_attention" and not window:
        raise c.refuse("layer_types", f"gives layer {index} a window, but use_sliding_window or sliding_window is off.")
    return window if kind == "sliding_attention" else 0


def build(c: ModelConfig, b: Build) -> Decoder:
    """Qwen2 from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = read_rope(c, heads.dim), c.need("intermediate_size", int)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=qwen_window(c, index))
        output = RowLinear(inside, heads.width, sizes.hidden, "o_proj")
        attention = Attention(separate_qkv(inside, sizes.hidden, heads, bias=True), output, spec)
        return PreNorm(attention, gated_mlp(at.at("mlp"), sizes.hidden, inner, act), (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
