"""MiniMax Text 01 and M1: lightning attention in most layers, attention in the others, experts; blocks add to normed
streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.layers.block import Block, Stream, added, normed
from tokenmill.layers.build import Build
from tokenmill.layers.state_space import FixedDecays
from tokenmill.models.common import as_unit, read_heads, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Attend, Drafts, Feed, Mix, Norms
from tokenmill.models.mixers import read_kinds
from tokenmill.models.parts import make_attention, make_mixture, not_computed
from tokenmill.models.positions import minimax_rope
from tokenmill.models.rules import windowed

KINDS = ("linear_attention", "full_attention")
"""Which layer is of which kind: `attn_type_list` of published files has their numbers here."""
_ATTEND = Attend(rope=minimax_rope, layer=windowed)
_MIX = Mix(at=("block_sparse_moe", "mlp"), names=("w1", "w3", "w2"), count=("num_local_experts", "num_experts"),
           inner="intermediate_size")  # fmt: skip
_BUFFERS = r"\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$"
"""What Transformers stores and the number of a layer says."""


class NormedStream:
    """x = stream * norm(x) + own * block(norm(x)), for attention, then for the experts. As norms alone read x, it stays
    divided by the stream's factor."""

    def __init__(self, blocks: tuple[Block, Block], norms: tuple[NormSpec, NormSpec], factors: list[Any]) -> None:
        """factors: (of the stream, of the block's result) for both blocks, divided by what x is divided by."""
        self.steps = tuple(zip(blocks, norms, factors, strict=True))

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        for block, norm, (stream, own) in self.steps:
            h = normed(x, norm, ctx)[1]
            x = added(h if stream == 1.0 else h * stream, block, h, ctx, None, scale=own)
        return x


def build(c: ModelConfig, b: Build) -> Decoder:
    """MiniMax from its config."""
    sizes, heads, kinds = read_sizes(c), read_heads(c), _kinds(c)
    factors = {name: _factors(c, name) for name in ("linear", "full", "mlp")}
    units = {name: as_unit(b, stream) for name, (stream, _) in factors.items()}
    factors = {name: (stream / units[name], own / units[name]) for name, (stream, own) in factors.items()}
    b.book.used.update(not_computed(c, b, Drafts(_BUFFERS), sizes.layers))

    def layer(body: Build, index: int) -> NormedStream:
        at = body.at(f"layers.{index}")
        kind = "linear" if kinds[index] == "linear_attention" else "full"
        first = rms(c, "input_layernorm", unit=units["mlp"])(at)
        second = rms(c, "post_attention_layernorm", unit=units[kind])(at)
        mixer: Block
        if kind == "linear":
            rates = _rates(heads.heads, index, sizes.layers)
            mixer = FixedDecays(at.at("self_attn"), sizes.hidden, (heads.heads, heads.dim), rates)
        else:
            mixer = make_attention(c, b, at, _ATTEND, Norms(), heads, index)
        return NormedStream((mixer, make_mixture(c, b, at, _MIX, Feed(), index)), (first, second),
                            [factors[kind], factors["mlp"]])  # fmt: skip

    ends = Ends(norm=rms(c, "norm", unit=units["mlp"]), unit=units["mlp"])
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def _factors(c: ModelConfig, part: str) -> tuple[float, float]:
    """Of the stream and of a block's result, under the names of Transformers or of published files."""
    own, other = (part, part) if part == "mlp" else (f"{part}_attn", f"{part}_attention")
    stream, result = (
        c.first((f"{own}_{name}_factor", f"layernorm_{other}_{name}"), float, 1.0) for name in ("alpha", "beta")
    )
    return stream, result


def _rates(heads: int, index: int, layers: int) -> Tensor:
    """How fast each head of a layer forgets."""
    slopes = (1 / 2 ** (8 / heads)) ** (torch.arange(heads, dtype=torch.float32) + 1)
    return slopes * (1 - index / (layers - 1 + 1e-5) + 1e-5)


def _kinds(c: ModelConfig) -> list[str]:
    layers, numbered = c.need("num_hidden_layers", int), c.get("attn_type_list", list, [])
    if not numbered:
        return read_kinds(c, KINDS, "") if c.has("layer_types") else [KINDS[1 - i % 2] for i in range(layers)]
    if len(numbered) != layers or any(number not in (0, 1) for number in numbered):
        raise c.refuse("attn_type_list", f"must hold a 0 or 1 for each of {layers} layers.")
    kinds = [KINDS[number] for number in numbered]
    if c.has("layer_types") and read_kinds(c, KINDS, "") != kinds:
        raise c.refuse("layer_types", "contradicts 'attn_type_list'.")
    return kinds
