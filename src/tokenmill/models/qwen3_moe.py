"""Qwen3-MoE: Qwen3's attention; a mixture of experts in most layers."""

from __future__ import annotations

from tokenmill.core.forward import RouteSpec
from tokenmill.layers.attention import Attention, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, load_experts
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_act, read_heads, read_rope, read_sizes, read_top_k, read_window, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def build(c: ModelConfig, b: Build) -> Decoder:
    """Qwen3-MoE from its config."""
    sizes, heads, act = read_sizes(c), read_heads(c), read_act(c, gated=True, default="silu")
    rope, eps = read_rope(c, heads.dim), c.get("rms_norm_eps", float, 1e-6, low=0.0)
    bias = c.get("attention_bias", bool, False)
    window = read_window(c) if c.get("use_sliding_window", bool, False) else 0
    count = c.first(("num_experts", "num_local_experts"), int)
    normalise = c.get("norm_topk_prob", bool, False)
    route = RouteSpec(experts=count, top_k=read_top_k(c, count, 8), normalise=normalise)
    step, plain = c.get("decoder_sparse_step", int, 1), c.get("mlp_only_layers", list, [])
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def feed_forward(mlp: Build, index: int) -> Experts | MLP:
        if index in plain or (index + 1) % step:
            return gated_mlp(mlp, sizes.hidden, c.need("intermediate_size", int), act)
        router = mlp.weight("gate", (count, sizes.hidden), exact=True)
        weights = load_experts(mlp.at("experts"), route, sizes.hidden, c.need("moe_intermediate_size", int))
        return Experts(b, router, route, weights, act)

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        norms = (inside.norm("q_norm", heads.dim, eps), inside.norm("k_norm", heads.dim, eps))
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=window, norms=norms)
        attention = Attention(
            separate_qkv(inside, sizes.hidden, heads, bias=bias),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj", bias=bias),
            spec,
        )
        return PreNorm(attention, feed_forward(at.at("mlp"), index), (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)
