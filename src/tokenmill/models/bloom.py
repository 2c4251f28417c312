"""BLOOM: linear biases by distance instead of positions, a norm on the embeddings, q/k/v fused head by head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenmill.core.forward import ForwardContext
from tokenmill.layers.attention import Attention, Heads, alibi_slopes, attention_spec, local_heads, per_head_order
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear
from tokenmill.layers.mlp import plain_mlp
from tokenmill.models.common import PreNorm, head_size, layer_norm
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, Sizes


def build(c: ModelConfig, b: Build) -> Decoder:
    """BLOOM from its config."""
    hidden = c.first(("hidden_size", "n_embed"), int)
    depth, tied = c.first(("n_layer", "num_hidden_layers"), int), c.get("tie_word_embeddings", bool, True)
    sizes = Sizes(vocab=c.need("vocab_size", int), hidden=hidden, layers=depth, tied=tied)
    count = c.first(("n_head", "num_attention_heads"), int)
    heads = Heads(count, count, head_size(c, hidden, count))
    norm = layer_norm(hidden, c.get("layer_norm_epsilon", float, 1e-5, low=0.0))
    slopes = local_heads(b, alibi_slopes(count)).to(b.device)

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"h.{index}")
        inside = at.at("self_attention")
        order = per_head_order(heads)
        attention = Attention(
            FusedColumnLinear(inside, hidden, "query_key_value", heads.parts, order=order, bias=True),
            RowLinear(inside, hidden, hidden, "dense", bias=True),
            attention_spec(b, heads, alibi=slopes),
        )
        mlp = plain_mlp(at.at("mlp"), hidden, 4 * hidden, "gelu_tanh", ("dense_h_to_4h", "dense_4h_to_h"))
        return PreNorm(attention, mlp, (norm(at, "input_layernorm"), norm(at, "post_attention_layernorm")))

    def before(body: Build) -> Callable[[Tensor, ForwardContext], Tensor]:
        spec = norm(body, "word_embeddings_layernorm")
        return lambda x, ctx: ctx.kernels.norm(x, spec)

    ends = Ends(norm=lambda body: norm(body, "ln_f"), embed="word_embeddings", before=before)
    return Decoder(b, b.under("transformer", "word_embeddings.weight"), sizes, ends, layer)
