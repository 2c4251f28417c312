"""Hy4, and the text part of the larger one, which also sees: several streams of hidden states (hyper-connections),
latent attention with an index of keys, sinks and gates, and routed experts whose numbers are clipped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.core.errors import UndividedError
from tokenmill.layers.attention import local_heads
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.hyper_connections import NAMES, HyperConnection, HyperHead, HyperShape, hyper_shape
from tokenmill.layers.linear import ColumnLinear, Rows
from tokenmill.models.common import read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Drafts, Feed, Norms, Shared
from tokenmill.models.key_index import IndexStyle, Indices
from tokenmill.models.latent_attention import LatentAttention
from tokenmill.models.parts import make_feed, make_mixture, not_computed
from tokenmill.models.rules import glm_dense, product
from tokenmill.models.table_mixtures import DEEPSEEK_MIX
from tokenmill.models.text_part import TEXT_OF

_SHARED = "shared_experts"
_INDEX = IndexStyle(pairs="rope_interleave", late=True, shared=lambda c, layer: layer > 0 and (layer - 1) % 4 != 0)
"""If the config lists none, the first layer, the second, and every fourth from there have an index."""


class Layer:
    """Attention and a feed-forward part, each between what mixes the streams and what adds to them. out: the last layer
    joins them into one."""

    def __init__(self, around: list[tuple[HyperConnection, NormSpec, Block]], out: HyperHead | None) -> None:
        self.around, self.out = around, out

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams * hidden] -> the same, or [T, hidden] after the last layer."""
        for hyper, norm, block in self.around:
            mixed, outer = hyper.mix(x, ctx)
            x = hyper.add(x, block(mixed, ctx, norm=norm), outer, ctx)
        return x if self.out is None else self.out(x, ctx)


class HyV4(Decoder):
    """A decoder whose embeddings become equal streams."""

    undivided = True

    def _embed(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        return super()._embed(tokens, ctx).repeat(1, self.streams)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Hy4 from its config."""
    if not b.place.is_whole:
        raise UndividedError("Hy4")
    if TEXT_OF in c.data:
        c = ModelConfig({**c.data, "rope_interleave": True}, "", c.architecture)
    sizes, indices, body = read_sizes(c), Indices(c, _INDEX), b.under("model", "embed_tokens.weight")
    count, eps = c.get("hc_mult", int, 4, high=64), c.get("rms_norm_eps", float, 1e-5, low=0.0)
    least, most = c.get("hc_eps", float, 1e-6, low=0.0), c.get("hc_magnitude", float, 2.0)
    shape = hyper_shape(b, count, sizes.hidden, eps, least, most)
    last = sizes.layers - 1

    def layer(body: Build, index: int) -> Layer:
        out = HyperHead(body, shape, _hyper_names(body, "hc_head", "hc_head", "head_")) if index == last else None
        return Layer(_around(c, b, body.at(f"layers.{index}"), index, (shape, indices)), out)

    b.book.used.update(not_computed(c, b, Drafts(r"^model\.mtp_layers\."), sizes.layers))
    model = HyV4(b, body, sizes, Ends(norm=rms(c, "norm")), layer)
    model.streams = count
    return model


def _around(
    c: ModelConfig, b: Build, at: Build, index: int, whole: tuple[HyperShape, Indices]
) -> list[tuple[HyperConnection, NormSpec, Block]]:
    """The two blocks of a layer, whose tensors lie `at` there."""
    (shape, indices), inside = whole, at.at("self_attn")
    attention = _gated(c, inside, LatentAttention(c, inside, shape.hidden, index=indices.of(inside, index)))
    made = []
    for ours, theirs, name, block in (
        ("attn_hc", "hc_attn_layer", "input_layernorm", attention),
        ("ffn_hc", "hc_mlp_layer", "post_attention_layernorm", _feed(c, b, at, index)),
    ):
        made.append((HyperConnection(at, shape, _hyper_names(at, ours, theirs)), rms(c, name)(at), block))
    return made


def _gated(c: ModelConfig, b: Build, made: LatentAttention) -> LatentAttention:
    """The same with a gate for each number of a head's result, and a score for each head that no key belongs to."""
    heads, hidden = c.need("num_attention_heads", int), c.need("hidden_size", int)
    made.gate = ColumnLinear(b, hidden, {_gate(b): Rows(heads * made.value, heads)}).weight
    sinks = local_heads(b, b.tensor(_first(b, "learnable_sink_param", "sinks"), (heads,), torch.float32))
    if TEXT_OF in c.data:  # the larger one has the config's epsilon in these norms, too
        eps = c.get("rms_norm_eps", float, 1e-5, low=0.0)
        made.q_norm, made.kv_norm = made.q_norm and replace(made.q_norm, eps=eps), replace(made.kv_norm, eps=eps)
    touches = replace(made.spec.touches, k_norm=made.kv_norm)
    made.spec = replace(made.spec, sinks=sinks)
    made.fresh = replace(made.spec, touches=touches)
    return made


def _feed(c: ModelConfig, b: Build, at: Build, index: int) -> Block:
    """A layer's feed-forward part."""
    if glm_dense(c, index):
        return make_feed(c, at, Feed(names=(_gate(at.at("mlp")), "up_proj", "down_proj")), Norms())
    names = (_gate(at.at("mlp").at(_SHARED)), "up_proj", "down_proj")
    shared = Shared(_SHARED, product("moe_intermediate_size", "n_shared_experts"), names)
    return make_mixture(c, b, at, replace(DEEPSEEK_MIX, shared=shared, act="clipped_silu_mul"), Feed(), index)


def _gate(b: Build) -> str:
    """Of attention and of feed-forward parts: published files call it otherwise than Transformers."""
    return "linear_gate" if b.has("linear_gate.weight") else "gate_proj"


def _first(b: Build, *names: str) -> str:
    """The first of these tensors that is there, or the last name."""
    return next((name for name in names if b.has(name)), names[-1])


def _hyper_names(b: Build, ours: str, theirs: str, more: str = "") -> tuple[str, str, str]:
    """The names of a connection's tensors: as published, as Transformers saves them, or as it calls them."""
    own = "hc_" if more else ""
    fn, base, scale = (
        _first(b, f"{theirs}.hc_pre.hc_{more}{part}", f"{theirs}.hc_{more}{part}",
               f"hc_pre.{theirs}.hc_{more}{part}", f"{ours}.{own}{part}")
        for part in NAMES
    )  # fmt: skip
    return fn, base, scale
