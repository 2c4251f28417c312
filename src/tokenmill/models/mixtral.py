"""Mixtral: Llama's attention, a mixture of experts in every layer."""

from __future__ import annotations

from tokenmill.core.forward import RouteSpec
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, load_experts
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, read_top_k, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def build(c: ModelConfig, b: Build) -> Decoder:
    """Mixtral from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, inner = read_rope(c, heads.dim), c.need("intermediate_size", int)
    count = c.first(("num_local_experts", "num_experts"), int)
    route = RouteSpec(experts=count, top_k=read_top_k(c, count, 2))
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=read_window(c))
        output = RowLinear(inside, heads.width, sizes.hidden, "o_proj")
        attention = Attention(separate_qkv(inside, sizes.hidden, heads), output, spec)
        moe = at.at("block_sparse_moe" if at.has("block_sparse_moe.gate.weight") else "mlp")
        router = moe.weight("gate", (count, sizes.hidden), exact=True)
        weights = load_experts(moe.at("experts"), route, sizes.hidden, inner, ("w1", "w3", "w2"))
        return PreNorm(attention, Experts(b, router, route, weights, act), (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
