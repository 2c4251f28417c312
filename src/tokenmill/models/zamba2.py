"""Zamba 2: Mamba-2 in every layer; some layers also pass the stream and the embeddings through one of a few blocks of
attention and feed-forward layers, which they share but for narrow products of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.core.errors import ModelError, UndividedError
from tokenmill.layers.attention import Heads
from tokenmill.layers.build import Build, Carried
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.state_space import StateSpace
from tokenmill.models.common import read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, check_heads
from tokenmill.models.mixers import SpaceKeys, make_space
from tokenmill.models.zamba2_blocks import Shared, Visit

_SPACE = SpaceKeys("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv",
                   "add_bias_linear", "use_conv_bias", "add_bias_linear", eps="", lowest="time_step_min")  # fmt: skip
_KINDS = {"mamba": "linear_attention", "linear_attention": "linear_attention", "hybrid": "hybrid"}
_EVERY = ("linear_attention", *(["linear_attention"] * 5 + ["hybrid"]) * 7, *["linear_attention"] * 4, "hybrid",
          *["linear_attention"] * 3, "hybrid", *["linear_attention"] * 2)  # fmt: skip
"""The layers of a config that lists none."""


class Layer:
    """x += space(norm(x + linear(visit(x | embeddings)))); most layers have no visit."""

    def __init__(self, space: StateSpace, norm: NormSpec, visit: Visit | None, linear: RowLinear | None,
                 embeddings: Carried) -> None:  # fmt: skip
        self.space, self.norm, self.visit, self.linear, self.embeddings = space, norm, visit, linear, embeddings

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.visit is None or self.linear is None:
            return self.space(x, ctx, norm=self.norm, residual=x)
        assert self.embeddings.tensor is not None
        more = self.visit(torch.cat((x, self.embeddings.tensor), dim=1), ctx)
        return self.space(self.linear(more, ctx, residual=x), ctx, norm=self.norm, residual=x)


class Zamba2(Decoder):
    """A decoder whose layers share blocks, and read the embeddings."""

    undivided = True


def build(c: ModelConfig, b: Build) -> Decoder:
    """Zamba 2 from its config."""
    if not b.place.is_whole:
        raise UndividedError("Zamba 2")
    sizes, kinds, heads = read_sizes(c, tied=True), _kinds(c), _heads(c)
    visits = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    blocks: list[tuple[Shared, Build]] = []
    embeddings, hidden, count = Carried(), sizes.hidden, c.get("num_mem_blocks", int, 1)

    def layer(body: Build, index: int) -> Layer:
        at, visit, linear = body.at(f"layers.{index}"), None, None
        if kinds[index] == "hybrid":
            number = visits.index(index)
            if number < count:
                place = replace(at.at("shared_transformer"), adapters=None)  # theirs would be for one visit of many
                blocks.append((Shared(c, place, hidden, heads), place))
            shared, place = blocks[number % count]
            visit = Visit(c, b, shared, (place, number, hidden), heads)
            linear = RowLinear(at.whole(), hidden, hidden, "linear")
            at = at.at("mamba_decoder")
        return Layer(make_space(c, at.at("mamba"), _SPACE), rms(c, "input_layernorm")(at), visit, linear, embeddings)

    def keep(x: Tensor, ctx: ForwardContext) -> Tensor:
        embeddings.tensor = x
        return x

    ends = Ends(norm=rms(c, "final_layernorm"), before=lambda body: keep)
    return Zamba2(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def _heads(c: ModelConfig) -> Heads:
    """Heads over twice the hidden size."""
    hidden, heads = c.need("hidden_size", int), c.need("num_attention_heads", int)
    kv_heads, dim = c.get("num_key_value_heads", int, heads), 2 * hidden // heads
    check_heads(heads, kv_heads)
    for name, size in (("attention_head_dim", dim), ("attention_hidden_size", 2 * hidden)):
        if c.get(name, int, size) != size or heads * dim != 2 * hidden:
            raise c.refuse(name, f"is not supported (only {size}, for {heads} heads over twice {hidden} columns).")
    return Heads(heads, kv_heads, dim)


def _kinds(c: ModelConfig) -> list[str]:
    layers = c.need("num_hidden_layers", int)
    said = c.first(("layers_block_type", "layer_types"), list, list(_EVERY))
    kinds = [_KINDS.get(kind, "") if isinstance(kind, str) else "" for kind in said]
    if len(kinds) != layers or not all(kinds):
        raise ModelError(f"config.json: 'layers_block_type' must name 'mamba' or 'hybrid' for each of {layers} layers.")
    visits = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    if c.get("hybrid_layer_ids", list, visits) != visits:
        raise c.refuse("hybrid_layer_ids", "contradicts 'layers_block_type'.")
    return kinds
