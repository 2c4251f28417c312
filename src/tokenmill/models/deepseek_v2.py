"""DeepSeek V2, V3 and V3.2, Kimi K2, GLM-5, Sarvam 105B, GLM-4.7-Flash, Mistral Small 4, A.X K1 and K2: latent
attention, shared and routed experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.compute.forward import RouteSpec
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, Routing, Shared, load_experts
from tokenmill.layers.gated_norm import GatedNorm, GatedPreNorm, gated_norm
from tokenmill.layers.mlp import gated_mlp
from tokenmill.models.common import PreNorm, Sandwich, read_act, read_sizes, read_top_k, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, Layer
from tokenmill.models.family_row import Drafts, Feed, Route
from tokenmill.models.key_index import Indices
from tokenmill.models.latent_attention import LatentAttention
from tokenmill.models.mtp_layers import Later, make_behind
from tokenmill.models.parts import make_mixture, not_computed
from tokenmill.models.rules import first_dense, glm_dense, listed, listed_or_first, sarvam, value
from tokenmill.models.table_mixtures import DEEPSEEK_MIX

INDEXED = ("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Those in which each token sees the keys that an index chooses."""
_DENSE = {
    "Glm4MoeLiteForCausalLM": glm_dense,
    "AXK1ForCausalLM": listed(value("first_k_dense_replace", 1)),
    **dict.fromkeys(INDEXED, listed_or_first),
    "AXK2ForCausalLM": listed(value("first_k_dense_replace", 1)),
}
_MISTRAL4_MIX = replace(
    DEEPSEEK_MIX, route=Route(normalise="norm_topk_prob", scale="routed_scaling_factor", grouped=True)
)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Build one of these families from its config."""
    if c.architecture == "SarvamMLAForCausalLM":
        c = ModelConfig({**c.data, **sarvam(c)}, architecture=c.architecture)
    sizes, indices = read_sizes(c), Indices(c)

    def layer(body: Build, index: int) -> Layer:
        return make_layer(c, b, body.at(f"layers.{index}"), index, indices)

    b.book.used.update(not_computed(c, b, Drafts(later="num_nextn_predict_layers"), sizes.layers))
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def make_layer(c: ModelConfig, b: Build, at: Build, index: int, indices: Indices) -> Layer:
    """One layer, whose tensors lie `at` there."""
    hidden, act = c.need("hidden_size", int), read_act(c, gated=True, default="silu")
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")
    bias, second_version = c.get("mlp_bias", bool, False), c.architecture == "DeepseekV2ForCausalLM"
    dense = _DENSE.get(c.architecture, first_dense)
    mlp: Block
    if dense(c, index):
        mlp = gated_mlp(at.at("mlp"), hidden, c.need("intermediate_size", int), act, bias=bias)
    elif second_version:
        mlp = _experts(c, at.at("mlp"), hidden)
    else:
        mix = _MISTRAL4_MIX if c.architecture == "Mistral4ForCausalLM" else DEEPSEEK_MIX
        if c.architecture == "AXK1ForCausalLM" and not at.has(f"mlp.{mix.route.bias}"):
            mix = replace(mix, route=replace(mix.route, bias=""))
        mlp = make_mixture(c, b, at, mix, Feed(), index)
    inside = at.at("self_attn")
    choice = indices.of(inside, index) if c.architecture in INDEXED else None
    attention = LatentAttention(c, inside, hidden, choice)
    if c.architecture == "AXK2ForCausalLM":
        rank, eps = c.need("gated_norm_rank", int), c.get("rms_norm_eps", float, 1e-6, low=0.0)
        before = [gated_norm(at.at(f"{name}_layernorm"), hidden, rank, eps) if name == "input" or not dense(c, index)
                  else GatedNorm(second(at)) for name in ("input", "post_attention")]  # fmt: skip
        return GatedPreNorm(attention, mlp, (before[0], before[1]))
    if c.architecture == "AXK1ForCausalLM" and not dense(c, index):
        after = rms(c, "post_mlp_layernorm")(at)
        return Sandwich((attention, mlp), (first(at), second(at)), (None, after))
    if c.architecture == "AXK1ForCausalLM":  # its files have that norm in all layers
        b.book.used.add(at.path("post_mlp_layernorm.weight"))
    return PreNorm(attention, mlp, (first(at), second(at)))


def build_later(c: ModelConfig, b: Build) -> list[Later]:
    """The checkpoint's layers that draft later tokens."""
    sizes, body = read_sizes(c), b.under("model", "embed_tokens.weight")
    norm, indices = lambda inside, name: rms(c, name)(inside), Indices(c)

    def layer(at: Build, index: int) -> Layer:
        return make_layer(c, b, at, index, indices)

    return make_behind(c, body.at("layers"), (sizes.layers, sizes.hidden), norm, layer)


def _experts(c: ModelConfig, b: Build, hidden: int) -> Experts:
    """Routed experts (chosen within the best groups), and shared experts, which act as one wider expert."""
    count, inner = c.need("n_routed_experts", int), c.need("moe_intermediate_size", int)
    act, route = read_act(c, gated=True, default="silu"), _route(c, count)
    # The router stays in float32: rounding its logits would change which experts are chosen.
    router = b.exactly(torch.float32).weight("gate", (count, hidden), exact=True)
    weights = load_experts(b.at("experts"), route, hidden, inner)
    shared_count = c.get("n_shared_experts", int, 0, low=0)
    shared, bias = None, c.get("mlp_bias", bool, False)
    if shared_count:
        shared = Shared(gated_mlp(b.at("shared_experts"), hidden, inner * shared_count, act, bias=bias))
    return Experts(b, router, route, weights, act, shared=shared, routing=Routing(wide=True))


def _route(c: ModelConfig, count: int) -> RouteSpec:
    grouped = c.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups = c.get("n_group", int, 1) if grouped else 1
    top_groups, top_k = c.get("topk_group", int, 1, high=groups) if grouped else 1, read_top_k(c, count, count + 1)
    if count % groups or top_k > count // groups * top_groups:
        raise c.refuse("n_group", f"and 'topk_group' cannot share {count} experts, 'num_experts_per_tok' = {top_k}.")
    return RouteSpec(
        experts=count,
        top_k=top_k,
        normalise=False,
        scale=c.get("routed_scaling_factor", float, 1.0),
        groups=groups,
        top_groups=top_groups,
    )
