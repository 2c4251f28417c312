"""GPT-2, and the first GPT, whose norms stand behind its sums: learned positions, layer norms with biases, matrices
stored transposed."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, Heads, attention_spec
from tokenmill.layers.build import Build
from tokenmill.layers.embedding import add_positions
from tokenmill.layers.linear import FusedColumnLinear, RowLinear
from tokenmill.layers.mlp import plain_mlp
from tokenmill.models.common import PreNorm, head_size, layer_norm, read_act
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, Sizes
from tokenmill.models.post_norm import PostNorm

_FIRST_ACTS = {"gelu": "gelu_new", "silu": "silu", "swish": "silu", "relu": "relu"}
"""What the first GPT calls its activations -> the names that others use."""


def build(c: ModelConfig, b: Build) -> Decoder:
    """One of the two from its config."""
    first = c.architecture == "OpenAIGPTLMHeadModel"
    if first:
        c = ModelConfig({**c.data, "activation_function": c.choice("afn", _FIRST_ACTS, "gelu")}, "", c.architecture)
    hidden = c.first(("n_embd", "hidden_size"), int)
    tied = c.get("tie_word_embeddings", bool, True)
    depth = c.first(("n_layer", "num_hidden_layers"), int)
    sizes = Sizes(vocab=c.need("vocab_size", int), hidden=hidden, layers=depth, tied=tied)
    count = c.first(("n_head", "num_attention_heads"), int)
    heads, inner = Heads(count, count, head_size(c, hidden, count)), c.get("n_inner", int, 4 * hidden)
    act = read_act(c, gated=False, default="gelu_new", key="activation_function")
    positions = c.first(("n_positions", "max_position_embeddings"), int)
    b = b.limited(positions)
    norm = layer_norm(hidden, c.get("layer_norm_epsilon", float, 1e-5, low=0.0))
    scaled, by_depth = c.get("scale_attn_weights", bool, True), c.get("scale_attn_by_inverse_layer_idx", bool, False)

    def layer(body: Build, index: int) -> PreNorm | PostNorm:
        at = body.at(f"h.{index}")
        inside = at.at("attn")
        scale = (heads.dim**-0.5 if scaled else 1.0) / (index + 1 if by_depth else 1)
        attention = Attention(
            FusedColumnLinear(inside, hidden, "c_attn", heads.parts, bias=True, transposed=True),
            RowLinear(inside, hidden, hidden, "c_proj", bias=True, transposed=True),
            attention_spec(b, heads, scale=scale),
        )
        mlp = plain_mlp(at.at("mlp"), hidden, inner, act, ("c_fc", "c_proj"), transposed=True)
        return (PostNorm if first else PreNorm)(attention, mlp, (norm(at, "ln_1"), norm(at, "ln_2")))

    words, places = ("tokens_embed", "positions_embed") if first else ("wte", "wpe")
    ends = Ends(
        norm=None if first else lambda body: norm(body, "ln_f"),
        embed=words,
        before=lambda body: add_positions(body.tensor(f"{places}.weight", (positions, hidden))),
    )
    return Decoder(b, b.under("transformer", f"{words}.weight"), sizes, ends, layer)
