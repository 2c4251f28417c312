"""LongCat Flash: layers of two latent attentions and two feed-forward networks, past which a mixture of experts leads;
some of its experts do nothing but hand on what they are given."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.layers.block import Stream, read, through
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Chosen, load_experts
from tokenmill.layers.mlp import MLP, gated_mlp
from tokenmill.layers.streams import mean_last
from tokenmill.models.common import read_act, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Drafts
from tokenmill.models.latent_attention import Latent, LatentAttention
from tokenmill.models.parts import not_computed

_NAMES = {"ffn_hidden_size": "intermediate_size", "expert_ffn_hidden_size": "moe_intermediate_size",
          "moe_topk": "num_experts_per_tok", "n_routed_experts": "num_local_experts"}  # fmt: skip
"""Its own names of sizes -> the usual ones."""


def build(c: ModelConfig, b: Build) -> Decoder:
    """LongCat Flash from its config."""
    c = _settled(c)
    sizes = read_sizes(c)
    b.book.used.update(not_computed(c, b, Drafts(r"^model\.mtp\."), sizes.layers))

    def layer(body: Build, index: int) -> Shortcut:
        at, act = body.at(f"layers.{index}"), read_act(c, gated=True, default="silu")
        places = (at.at(f"self_attn.{i}") for i in range(2))
        attends = [LatentAttention(c, place, sizes.hidden, Latent(scaled=True)) for place in places]
        inner = c.need("intermediate_size", int)
        feeds = [gated_mlp(at.at(f"mlps.{i}"), sizes.hidden, inner, act) for i in range(2)]
        norms = [rms(c, f"{name}_layernorm.{i}")(at) for i in range(2) for name in ("input", "post_attention")]
        return Shortcut(attends, feeds, norms, PartlyIdle(c, at.at("mlp"), sizes.hidden))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def _settled(c: ModelConfig) -> ModelConfig:
    """The config under the usual names."""
    layers = c.need("num_layers", int, high=5_000)
    if c.get("num_hidden_layers", int, 2 * layers) != 2 * layers:
        raise c.refuse("num_hidden_layers", f"is not supported (only twice 'num_layers' = {layers}).")
    data = {**c.data, "num_hidden_layers": layers, "rope_interleave": True}
    for own, usual in _NAMES.items():
        data[usual] = c.first((own, usual), int)
    return ModelConfig(data, architecture=c.architecture)


class Shortcut:
    """x += attention; x += feed-forward; x += attention; x += feed-forward. The mixture reads what the first
    feed-forward network reads, and is added behind the second."""

    def __init__(
        self, attends: list[LatentAttention], feeds: list[MLP], norms: list[NormSpec], mixture: PartlyIdle
    ) -> None:
        self.attends, self.feeds, self.norms, self.mixture = attends, feeds, norms, mixture

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        (one, two), (first, second), norms = self.attends, self.feeds, self.norms
        x, h, left = read(through(x, one, ctx, norms[0]), norms[1], ctx)
        h = h if left is None else ctx.kernels.norm(h, left)
        beside = self.mixture(h, ctx)
        x, h, left = read(through(first(h, ctx, residual=x), two, ctx, norms[2]), norms[3], ctx)
        return second(h, ctx, norm=left, residual=ctx.kernels.add(x, beside))


class PartlyIdle:
    """A mixture of experts. Those beyond `count` hand on what they are given, times their gates."""

    def __init__(self, c: ModelConfig, b: Build, hidden: int) -> None:
        self.count, idle = c.need("n_routed_experts", int), c.get("zero_expert_num", int, 0, low=0)
        top_k = c.need("num_experts_per_tok", int)
        if top_k > self.count + idle:
            raise c.refuse("moe_topk", f"is more than the {self.count + idle} experts.")
        places, total = b.at("experts"), self.count + idle
        # Some files have an unused first matrix for each of those, too.
        b.book.used.update(places.path(f"{i}.{name}.weight") for i in range(self.count, total)
                           for name in ("gate_proj", "up_proj"))  # fmt: skip
        at = b.at("router")
        self.route = RouteSpec(
            experts=total,
            top_k=top_k,
            normalise=False,
            scale=c.get("routed_scaling_factor", float, 1.0),
            bias=at.tensor("e_score_correction_bias", (total,), torch.float32),
        )
        self.router = b.settled(at.exactly(torch.float32).weight("classifier", (total, hidden), exact=True))
        act, own = read_act(c, gated=True, default="silu"), replace(self.route, experts=self.count, bias=None)
        weights = load_experts(places, own, hidden, c.need("moe_intermediate_size", int))
        self.chosen = Chosen(b, weights, self.count, act)
        self.chosen.pack(b, Mixture(self.router, own, *weights, act, fixed=False, wide=True, first=self.chosen.first))

    def __call__(self, h: Tensor, ctx: ForwardContext) -> Tensor:
        """h [T, hidden] -> [T, hidden]."""
        ids, gates = ctx.kernels.route(self.router.matmul(h.float(), ctx), self.route)
        idle = torch.where(ids >= self.count, gates, 0.0)
        if self.chosen.placed is not None:  # every choice has a slot there
            ids, gates = ids.clamp(max=self.count - 1), gates - idle
        y = self.chosen.whole(h, ids, gates, ctx)
        share = mean_last(idle) * idle.shape[1]
        return ctx.kernels.add(y, (h.float() * share).to(h.dtype))
