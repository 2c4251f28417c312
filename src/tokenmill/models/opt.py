"""OPT: learned positions shifted by two, relu, and in its 350M size norms after the blocks and a narrower embedding."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.layers.attention import Attention, Heads, attention_spec, separate_qkv
from tokenmill.layers.build import Build
from tokenmill.layers.embedding import add_positions
from tokenmill.layers.linear import RowLinear
from tokenmill.layers.mlp import plain_mlp
from tokenmill.models.common import PreNorm, head_size, layer_norm, read_act, read_sizes
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.post_norm import PostNorm

_SHIFT = 2
"""The first rows of the position table belong to padding."""


def build(c: ModelConfig, b: Build) -> Decoder:
    """OPT from its config."""
    sizes = read_sizes(c, tied=True)
    hidden, count = sizes.hidden, c.need("num_attention_heads", int)
    heads = Heads(count, count, head_size(c, hidden, count))
    inner, act = c.need("ffn_dim", int), read_act(c, gated=False, default="relu", key="activation_function")
    bias, width = c.get("enable_bias", bool, True), c.get("word_embed_proj_dim", int, hidden)
    first_norm = c.get("do_layer_norm_before", bool, True)
    last_norm = first_norm and not c.get("_remove_final_layer_norm", bool, False)
    positions = c.need("max_position_embeddings", int)
    norm = layer_norm(hidden, 1e-5)
    b = b.limited(positions)

    def layer(body: Build, index: int) -> PreNorm | PostNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("self_attn")
        output = RowLinear(inside, hidden, hidden, "out_proj", bias=bias)
        attention = Attention(separate_qkv(inside, hidden, heads, bias=bias), output, attention_spec(b, heads))
        mlp = plain_mlp(at, hidden, inner, act, ("fc1", "fc2"), bias=bias)
        norms = (norm(at, "self_attn_layer_norm"), norm(at, "final_layer_norm"))
        return PreNorm(attention, mlp, norms) if first_norm else PostNorm(attention, mlp, norms)

    def before(body: Build) -> Callable[[Tensor, ForwardContext], Tensor]:
        table = body.tensor("embed_positions.weight", (positions + _SHIFT, hidden))[_SHIFT:]
        add = add_positions(table)
        if width == hidden:
            return add
        project = body.settled(body.weight("project_in", (hidden, width)))
        return lambda x, ctx: add(project.matmul(x, ctx), ctx)

    ends = Ends(
        norm=(lambda body: norm(body, "final_layer_norm")) if last_norm else None,
        before=before,
        after=(lambda body: body.settled(body.weight("project_out", (width, hidden)))) if width != hidden else None,
        width=width,
    )
    root = b.at("model.decoder")
    body = root if root.has("embed_tokens.weight") else b.at("decoder")
    return Decoder(b, body, sizes, ends, layer)
