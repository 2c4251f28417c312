"""Gemma 3n (text): several streams of hidden states, a low-rank path beside attention, embeddings of its own for every
layer, upper layers that read the keys and values of lower ones, and lower ones whose gates are mostly closed.

Its parts are put together here; attention and embeddings are Gemma 4's, streams are in `layers/streams.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.core.errors import UndividedError
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.mlp import MLP, gated_mlp, mostly_closed
from tokenmill.layers.streams import Streams, Ways
from tokenmill.models.common import read_act, read_heads, read_sizes, rounded_root
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.gemma4_inputs import LayerInput, LayerInputs, make_own
from tokenmill.models.gemma4_parts import NORMS, Plan, first_shared, make_attention
from tokenmill.models.positions import gemma3_rope
from tokenmill.models.rules import layer_kind


class Laurel:
    """x + norm(right(left(x))): the path parallel to attention."""

    def __init__(self, b: Build, hidden: int, rank: int, eps: float) -> None:
        self.left: Weight = b.settled(b.weight("linear_left", (rank, hidden)))
        self.right: Weight = b.settled(b.weight("linear_right", (hidden, rank)))
        self.norm = b.norm("post_laurel_norm", hidden, eps)

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return ctx.kernels.add(x, self.right.matmul(self.left.matmul(x, ctx), ctx), within=self.norm)


class Layer:
    """One layer over all streams. `out`: the last layer joins them into one."""

    def __init__(
        self,
        blocks: tuple[Block, MLP],
        norms: list[NormSpec],
        beside: tuple[Streams, Laurel, LayerInput],
        scaled: bool,
        out: Ways | None,
    ) -> None:
        self.attention, self.mlp = blocks
        self.norms, self.scaled, self.out = norms, scaled, out
        self.streams, self.laurel, self.own = beside

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams * hidden] -> the same, or [T, hidden] after the last layer."""
        streams, (before, after, before_mlp, after_mlp) = self.streams, self.norms
        expected = streams.predict(streams.split(x), ctx)
        now = expected[:, streams.active].contiguous()
        normed = ctx.kernels.norm(now, before)
        seen = ctx.kernels.add(now, self.attention(normed, ctx), within=after)
        both = ctx.kernels.add(seen, self.laurel(normed, ctx)) / math.sqrt(2)
        found = ctx.kernels.add(both, self.mlp(both, ctx, norm=before_mlp), within=after_mlp)
        corrected = streams.correct(expected, found, ctx)
        first = corrected[:, streams.active]
        first = first * streams.scale if self.scaled else first.contiguous()
        share = ctx.kernels.norm(self.own.share(first, ctx), self.own.norm)
        made = torch.cat((corrected[:, :1], corrected[:, 1:] + share[:, None]), dim=1)
        return made.flatten(1) if self.out is None else self.out.gather(made, ctx)


class Gemma3n(Decoder):
    """A decoder whose embeddings become several streams."""

    beside, undivided = ("inputs", "ways"), True
    inputs: LayerInputs
    ways: Ways

    def _embed(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        x = super()._embed(tokens, ctx)
        self.inputs.fill(tokens, x, ctx)
        return self.ways.spread(x, ctx)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Gemma 3n from its config."""
    if not b.place.is_whole:
        raise UndividedError("Gemma 3n")
    sizes, plan = read_sizes(c, tied=True), _plan(c)
    hidden, body = sizes.hidden, b.under("model", "embed_tokens.weight")
    count = c.get("altup_num_inputs", int, 4, high=64)
    active = c.get("altup_active_idx", int, 0, low=0, high=count - 1)
    inner, closed = _inner(c, sizes.layers), _closed(c, sizes.layers)
    rank, act = c.get("laurel_rank", int, 64), read_act(c, gated=True, default="gelu_tanh", key="hidden_activation")
    scaled = c.get("altup_correct_scale", bool, True)
    inputs = LayerInputs(c, body, plan, hidden)
    ways = [Ways(body, name, hidden, count) for name in ("altup_projections", "altup_unembed_projections")]

    def layer(body: Build, index: int) -> Layer:
        at = body.at(f"layers.{index}")
        feed = at.at("mlp")
        if closed[index]:
            feed = feed.alone("feed-forward layers whose gates are compared with each other")
        mlp = gated_mlp(feed, hidden, inner[index], act)
        mlp.by_hand = mostly_closed(closed[index], act, b.dtype) if closed[index] else None
        streams = Streams(at.at("altup"), hidden, count, active, plan.eps)
        laurel = Laurel(at.at("laurel"), hidden, rank, plan.eps)
        return Layer(
            (make_attention(c, b, at, plan, index), mlp),
            [at.norm(name, hidden, plan.eps) for name in NORMS],
            (streams, laurel, make_own(at, inputs, plan, hidden, index)),
            scaled,
            ways[1] if index == sizes.layers - 1 else None,
        )

    softcap = c.get("final_logit_softcapping", float, 0.0, low=1e-6)
    ends = Ends(norm=lambda body: body.norm("norm", hidden, plan.eps), scale=rounded_root(hidden, b.dtype),
                softcap=softcap)  # fmt: skip
    model = Gemma3n(b, body, sizes, ends, layer)
    model.inputs, model.ways, model.streams = inputs, ways[0], count
    return model


def _plan(c: ModelConfig) -> Plan:
    layers = c.need("num_hidden_layers", int)
    kinds = [layer_kind(c, i, "sliding_attention" if (i + 1) % 5 else "full_attention") for i in range(layers)]
    eps, width = c.get("rms_norm_eps", float, 1e-6, low=0.0), c.get("hidden_size_per_layer_input", int, 256)
    return Plan(layers, kinds, first_shared(c, kinds), eps, width, lambda c, plan, index: read_heads(c), gemma3_rope)


def _inner(c: ModelConfig, layers: int) -> list[int]:
    """The width of each layer's feed-forward part: one number for all layers, or a list."""
    sizes = c.data.get("intermediate_size")
    if not isinstance(sizes, list):
        return [c.need("intermediate_size", int)] * layers
    if len(sizes) != layers:
        raise c.refuse("intermediate_size", "has not one entry for each of num_hidden_layers.")
    return [ModelConfig({"intermediate_size": one}).need("intermediate_size", int) for one in sizes]


def _closed(c: ModelConfig, layers: int) -> list[float]:
    """The share of closed gates in each layer."""
    pattern = c.get("activation_sparsity_pattern", list, [0.95] * (10 if layers > 10 else 0))
    if c.has("activation_sparsity_pattern") and len(pattern) != layers:
        raise c.refuse("activation_sparsity_pattern", "has not one entry for each of num_hidden_layers.")
    name = "activation_sparsity_pattern"
    found = [ModelConfig({name: one}).need(name, float, low=0.0, high=1.0 - 1e-6) for one in pattern]
    return found + [0.0] * (layers - len(found))
