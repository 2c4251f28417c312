"""gpt-oss: attention sinks, alternating windows, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.compute.forward import RouteSpec
from tokenmill.layers.attention import Attention, attention_spec, local_heads, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, ExpertWeights, count_visited, load_experts, split_experts
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import PreNorm, read_heads, read_sizes, read_top_k, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.positions import default_rope
from tokenmill.models.rules import layer_kind

_ROPE = default_rope({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096})  # fmt: skip


def build(c: ModelConfig, b: Build) -> Decoder:
    """gpt-oss from its config."""
    sizes, heads, inner = read_sizes(c), read_heads(c), c.need("intermediate_size", int)
    rope, bias = _ROPE(c, heads.dim, "full_attention"), c.get("attention_bias", bool, True)
    count = c.first(("num_local_experts", "num_experts"), int)
    route = RouteSpec(experts=count, top_k=read_top_k(c, count, 4, "experts_per_token"), order="topk_softmax")
    sliding = c.need("sliding_window", int)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        inside, mlp = at.at("self_attn"), at.at("mlp")
        kind = layer_kind(c, index, "full_attention" if index % 2 else "sliding_attention")
        window = sliding if kind == "sliding_attention" else 0
        spec = attention_spec(b, heads, rope=make_rope(b, rope), window=window)
        spec = replace(spec, sinks=local_heads(b, inside.tensor("sinks", (heads.heads,))))
        attention = Attention(
            separate_qkv(inside, sizes.hidden, heads, bias=bias),
            RowLinear(inside, heads.width, sizes.hidden, "o_proj", bias=bias),
            spec,
        )
        router = mlp.weight("router", (count, sizes.hidden), bias=True, exact=True)
        weights = _experts(mlp.at("experts"), route, sizes.hidden, inner)
        return PreNorm(attention, Experts(b, router, route, weights, "oai_swiglu"), (first(at), second(at)))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def _experts(b: Build, route: RouteSpec, hidden: int, inner: int) -> ExpertWeights:
    """The experts: stored as [E, in, out] with gate and up interleaved, as 4 bit floats [E, out, in], or (by
    converters) one by one."""
    whole = b.has("gate_up_proj")  # invented weights have every tensor, so the config decides
    if b.has("gate_up_proj_blocks") and (not whole or b.how.get("quant_method") == "mxfp4"):
        return _narrow_experts(b, route, hidden, inner)
    if not whole:
        return load_experts(b, route, hidden, inner, bias=True)
    count, before = route.experts, b.book.flops
    gate_up = b.numbers("gate_up_proj", (count, hidden, 2 * inner))
    gate_up_bias = b.tensor("gate_up_proj_bias", (count, 2 * inner))
    down, down_bias = b.numbers("down_proj", (count, inner, hidden)), b.tensor("down_proj_bias", (count, hidden))
    order = torch.arange(2 * inner).view(inner, 2).t().reshape(-1)
    there = b.order(order)
    ups = [
        b.wrap(w.t()[there], bias[there], name=f"{i}.gate_up_proj", rows=order)
        for i, (w, bias) in enumerate(zip(gate_up, gate_up_bias, strict=True))
    ]
    downs = [
        b.wrap(w.t().contiguous(), bias, name=f"{i}.down_proj")
        for i, (w, bias) in enumerate(zip(down, down_bias, strict=True))
    ]
    count_visited(b, before, route)
    return split_experts(b, ups, downs)


def _narrow_experts(b: Build, route: RouteSpec, hidden: int, inner: int) -> ExpertWeights:
    count, before = route.experts, b.book.flops
    order = torch.arange(2 * inner).view(inner, 2).t().reshape(-1)
    ups = b.stacked("gate_up_proj", (count, 2 * inner, hidden), b.tensor("gate_up_proj_bias", (count, 2 * inner)))
    ups = [b.adapted(up.take(b.order(order)), f"{i}.gate_up_proj", order) for i, up in enumerate(ups)]
    downs = b.stacked("down_proj", (count, hidden, inner), b.tensor("down_proj_bias", (count, hidden)))
    downs = [b.adapted(down, f"{i}.down_proj") for i, down in enumerate(downs)]
    count_visited(b, before, route)
    return split_experts(b, ups, downs)
