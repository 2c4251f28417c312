"""Gemma 4's feed-forward layers, and the mixtures beside them. Must not know: attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Chosen, load_experts
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.models.common import read_act
from tokenmill.models.config import ModelConfig
from tokenmill.models.gemma4_parts import Plan

Beside = Callable[[Tensor, ForwardContext, Tensor], Tensor]
"""(x, context, the feed-forward layer's result) -> that result plus the mixture's result for x, each normed."""


def make_feed(c: ModelConfig, at: Build, plan: Plan, index: int) -> MLP:
    """One layer's feed-forward part. Layers with borrowed keys may have one that is twice as wide."""
    act = read_act(c, gated=True, default="gelu_pytorch_tanh", key="hidden_activation")
    wide = 2 if c.get("use_double_wide_mlp", bool, False) and index >= plan.shared else 1
    return gated_mlp(at.at("mlp"), c.need("hidden_size", int), wide * c.need("intermediate_size", int), act)


def make_beside(c: ModelConfig, at: Build, plan: Plan, hidden: int) -> Beside | None:
    """The mixture beside the feed-forward layer, if there is one."""
    if not c.get("enable_moe_block", bool, False):
        return None
    count, inner = c.need("num_experts", int), c.need("moe_intermediate_size", int)
    plain_route = RouteSpec(experts=count, top_k=c.need("top_k_experts", int, high=count))
    act = read_act(c, gated=True, default="gelu_pytorch_tanh", key="hidden_activation")
    names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    plain, before, after = (at.norm(name, hidden, plan.eps) for name in names)
    router = at.settled(at.weight("router.proj", (count, hidden), exact=True))
    scaled = NormSpec(at.tensor("router.scale", (hidden,)).float() * hidden**-0.5, plan.eps)
    route = replace(plain_route, scale=at.tensor("router.per_expert_scale", (count,), torch.float32))
    weights = load_experts(at.at("experts"), route, hidden, inner)
    chosen = Chosen(at, weights, count, act)
    chosen.pack(at, Mixture(router, plain_route, *weights, act, first=chosen.first))  # it does not choose

    def beside(x: Tensor, ctx: ForwardContext, y: Tensor) -> Tensor:
        kernels = ctx.kernels
        ids, gates = kernels.route(router.matmul(x, ctx, norm=scaled), route)
        found = chosen.whole(kernels.norm(x, before), ids, gates, ctx)
        return kernels.add(kernels.norm(y, plain), found, within=after)

    return beside
