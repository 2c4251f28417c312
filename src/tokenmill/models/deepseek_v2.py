"""DeepSeek V2 and V3, Kimi K2, Sarvam 105B, GLM-4.7-Flash: latent attention (one small vector per token is cached),
shared and routed experts.
The up-projections of keys and values are absorbed: queries are carried into the latent space, and attention's result
is carried out of it, so that the cache is read as stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, KVSpec, NormSpec, RouteSpec
from tokenmill.layers.block import Block, Projected
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, Routing, Shared, load_experts
from tokenmill.layers.linear import ColumnLinear, RowLinear, Rows
from tokenmill.layers.mlp import gated_mlp
from tokenmill.layers.rope import attention_gain, make_rope
from tokenmill.models.common import PreNorm, read_act, read_rope, read_sizes, read_top_k, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Drafts, Feed
from tokenmill.models.mtp_layers import Later, make_behind
from tokenmill.models.parts import make_mixture, not_computed
from tokenmill.models.rules import check_latent_sizes, first_dense, glm_dense, sarvam
from tokenmill.models.table_mixtures import DEEPSEEK_MIX

_EPS = 1e-6
"""The epsilon of the norms inside attention, whatever the config's rms_norm_eps is."""


class LatentAttention(Projected):
    """Multi-head latent attention with absorbed up-projections."""

    def __init__(self, c: ModelConfig, b: Build, hidden: int) -> None:
        heads, bias = c.need("num_attention_heads", int), c.get("attention_bias", bool, False)
        self.nope, self.rotated = c.need("qk_nope_head_dim", int), c.need("qk_rope_head_dim", int)
        self.latent, value = c.need("kv_lora_rank", int), c.need("v_head_dim", int)
        check_latent_sizes(c, self.nope, self.rotated)
        q_rank, q_rows = c.get("q_lora_rank", int, 0), Rows(heads * (self.nope + self.rotated), heads)
        self.q_a = b.settled(b.weight("q_a_proj", (q_rank, hidden), bias=bias)) if q_rank else None
        self.q_norm = b.norm("q_a_layernorm", q_rank, _EPS) if q_rank else None
        self.q_b = ColumnLinear(b, q_rank or hidden, {"q_b_proj" if q_rank else "q_proj": q_rows}).weight
        self.kv_a = b.settled(b.weight("kv_a_proj_with_mqa", (self.latent + self.rotated, hidden), bias=bias))
        self.kv_norm = b.norm("kv_a_layernorm", self.latent, _EPS)
        rows = Rows(heads * (self.nope + value), heads)
        if c.get("num_key_value_heads", int, heads) != heads:
            raise c.refuse("num_key_value_heads", f"is not supported (only num_attention_heads = {heads}).")
        up = ColumnLinear(b, self.latent, {"kv_b_proj": rows}).weight.dense()
        up = up.view(-1, self.nope + value, self.latent)
        self.into = up[:, : self.nope].transpose(1, 2).contiguous()
        self.out_of = up[:, self.nope :].contiguous()
        self.output = RowLinear(b, heads * value, hidden, "o_proj", bias=bias)
        settings = read_rope(c, self.rotated)
        kv = KVSpec("latent", 1, self.latent + self.rotated, self.latent)
        layer, group = b.add_kv(kv)
        self.spec = AttentionSpec(
            layer=layer,
            group=group,
            heads=up.shape[0],
            kv=kv,
            scale=(self.nope + self.rotated) ** -0.5 * attention_gain(settings),
            rope=make_rope(b, settings, interleaved=_interleaved(c), start=self.latent),
        )

    def inside(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Attention of norm(x), before the output matrix; x [T, hidden]."""
        kernels, tokens, heads = ctx.kernels, x.shape[0], self.spec.heads
        h = x if norm is None else kernels.norm(x, norm)
        low = h if self.q_a is None else self.q_a.matmul(h, ctx)
        q = self.q_b.matmul(low, ctx, norm=self.q_norm).view(tokens, heads, -1)
        absorbed = kernels.product(q[..., : self.nope], self.into)
        kv = self.kv_a.matmul(h, ctx)
        latent = kernels.norm(kv[:, : self.latent], self.kv_norm)
        queries = torch.cat((absorbed, q[..., self.nope :]), dim=-1).view(tokens, -1)
        qkv = torch.cat((queries, latent, kv[:, self.latent :]), dim=-1)
        mixed = kernels.attend(qkv, self.spec, ctx)
        values = kernels.product(mixed.view(tokens, heads, self.latent), self.out_of)
        return values.view(tokens, -1)


def _interleaved(c: ModelConfig) -> bool:
    """Do neighbours rotate together? They do unless a config of the third version says otherwise (null does)."""
    return c.architecture == "DeepseekV2ForCausalLM" or c.get("rope_interleave", bool, False)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Build one of these families from its config."""
    if c.architecture == "SarvamMLAForCausalLM":
        c = ModelConfig({**c.data, **sarvam(c)}, architecture=c.architecture)
    sizes = read_sizes(c)

    def layer(body: Build, index: int) -> PreNorm:
        return make_layer(c, b, body.at(f"layers.{index}"), index)

    b.book.used.update(not_computed(c, b, Drafts(later="num_nextn_predict_layers"), sizes.layers))
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def make_layer(c: ModelConfig, b: Build, at: Build, index: int) -> PreNorm:
    """One layer, whose tensors lie `at` there."""
    hidden, act = c.need("hidden_size", int), read_act(c, gated=True, default="silu")
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")
    bias, second_version = c.get("mlp_bias", bool, False), c.architecture == "DeepseekV2ForCausalLM"
    dense = glm_dense if c.architecture == "Glm4MoeLiteForCausalLM" else first_dense
    mlp: Block
    if dense(c, index):
        mlp = gated_mlp(at.at("mlp"), hidden, c.need("intermediate_size", int), act, bias=bias)
    elif second_version:
        mlp = _experts(c, at.at("mlp"), hidden)
    else:
        mlp = make_mixture(c, b, at, DEEPSEEK_MIX, Feed(), index)
    return PreNorm(LatentAttention(c, at.at("self_attn"), hidden), mlp, (first(at), second(at)))


def build_later(c: ModelConfig, b: Build) -> list[Later]:
    """The checkpoint's layers that draft later tokens."""
    sizes, body = read_sizes(c), b.under("model", "embed_tokens.weight")
    norm, layer = lambda inside, name: rms(c, name)(inside), lambda at, index: make_layer(c, b, at, index)
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
