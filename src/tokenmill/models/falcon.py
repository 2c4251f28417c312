"""Falcon: parallel blocks; three layouts of the fused q/k/v (one key head, groups, or head by head); rope or ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import NormSpec
from tokenmill.layers.attention import Attention, Heads, alibi_slopes, attention_spec, local_heads, per_head_order
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear
from tokenmill.layers.mlp import plain_mlp
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import Parallel, PreNorm, head_size, layer_norm, read_act, read_sizes
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, check_heads
from tokenmill.models.positions import whole_rope


def build(c: ModelConfig, b: Build) -> Decoder:
    """Falcon from its config."""
    c.first(("num_hidden_layers", "n_layer"), int)
    sizes = read_sizes(c, tied=True)
    hidden, new = sizes.hidden, c.get("new_decoder_architecture", bool, False)
    heads, order = _heads(c, hidden, new)
    inner, act = c.get("ffn_hidden_size", int, 4 * hidden), read_act(c, gated=False, default="gelu", key="activation")
    bias, parallel = c.get("bias", bool, False), c.get("parallel_attn", bool, False)
    if new and not parallel:
        raise c.refuse("parallel_attn", "is not supported with new_decoder_architecture.")
    two_norms = c.get("num_ln_in_parallel_attn", int, 2 if new else 1, high=2) == 2
    if two_norms and not new:
        raise c.refuse("num_ln_in_parallel_attn", "is not supported without new_decoder_architecture.")
    norm = layer_norm(hidden, c.get("layer_norm_epsilon", float, 1e-5, low=0.0))
    alibi = c.get("alibi", bool, False)
    # Falcon scales the biases together with the scores. Transformers rounds them to bfloat16, which this does not.
    slopes = local_heads(b, alibi_slopes(heads.heads) * heads.dim**-0.5).to(b.device) if alibi else None
    rope = None if alibi else make_rope(b, whole_rope(c, heads.dim))

    def norms(at: Build) -> tuple[NormSpec, NormSpec]:
        if two_norms:
            return norm(at, "ln_attn"), norm(at, "ln_mlp")
        first = norm(at, "input_layernorm")
        return first, first if parallel else norm(at, "post_attention_layernorm")

    def layer(body: Build, index: int) -> Parallel | PreNorm:
        at = body.at(f"h.{index}")
        inside = at.at("self_attention")
        attention = Attention(
            FusedColumnLinear(inside, hidden, "query_key_value", heads.parts, order=order, bias=bias),
            RowLinear(inside, heads.width, hidden, "dense", bias=bias),
            attention_spec(b, heads, rope=rope, alibi=slopes),
        )
        mlp = plain_mlp(at.at("mlp"), hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
        return (Parallel if parallel else PreNorm)(attention, mlp, norms(at))

    ends = Ends(norm=lambda body: norm(body, "ln_f"), embed="word_embeddings")
    return Decoder(b, b.under("transformer", "word_embeddings.weight"), sizes, ends, layer)


def _heads(c: ModelConfig, hidden: int, new: bool) -> tuple[Heads, Tensor | None]:
    """Head counts, and the row order that takes the fused matrix apart."""
    count = c.first(("num_attention_heads", "n_head"), int)
    dim = head_size(c, hidden, count)
    if new:
        kv_heads = c.first(("num_kv_heads", "n_head_kv"), int, count)
        check_heads(count, kv_heads)
        group = count // kv_heads
        rows = torch.arange((count + 2 * kv_heads) * dim).view(kv_heads, group + 2, dim)
        order = torch.cat([rows[:, :group].reshape(-1), rows[:, group].reshape(-1), rows[:, group + 1].reshape(-1)])
        return Heads(count, kv_heads, dim), order
    if c.get("multi_query", bool, False):
        return Heads(count, 1, dim), None
    heads = Heads(count, count, dim)
    return heads, per_head_order(heads)
