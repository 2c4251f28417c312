"""GPT-NeoX and Pythia: parallel blocks, rotation of a part of each head, q/k/v fused head by head."""

from __future__ import annotations

from tokenmill.layers.attention import Attention, Heads, attention_spec, per_head_order
from tokenmill.layers.build import Build
from tokenmill.layers.linear import FusedColumnLinear, RowLinear
from tokenmill.layers.mlp import plain_mlp
from tokenmill.layers.rope import make_rope, rope_settings
from tokenmill.models.common import Parallel, PreNorm, head_size, layer_norm, read_act, read_sizes
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends


def build(c: ModelConfig, b: Build) -> Decoder:
    """GPT-NeoX from its config."""
    sizes = read_sizes(c)
    hidden, count = sizes.hidden, c.need("num_attention_heads", int)
    heads = Heads(count, count, head_size(c, hidden, count))
    inner, act = c.need("intermediate_size", int), read_act(c, gated=False, default="gelu")
    bias, parallel = c.get("attention_bias", bool, True), c.get("use_parallel_residual", bool, True)
    norm = layer_norm(hidden, c.get("layer_norm_eps", float, 1e-5, low=0.0))
    # This family has its own names for two of the rotary values.
    names = {"partial_rotary_factor": c.get("rotary_pct", float, 0.25, low=0.0, high=1.0),
             "rope_theta": c.get("rotary_emb_base", float, 10000.0, low=1.0)}  # fmt: skip
    rope = rope_settings({**c.data, **names}, heads.dim)

    def layer(body: Build, index: int) -> Parallel | PreNorm:
        at = body.at(f"layers.{index}")
        inside = at.at("attention")
        order = per_head_order(heads)
        attention = Attention(
            FusedColumnLinear(inside, hidden, "query_key_value", heads.parts, order=order, bias=bias),
            RowLinear(inside, hidden, hidden, "dense", bias=bias),
            attention_spec(b, heads, rope=make_rope(b, rope)),
        )
        mlp = plain_mlp(at.at("mlp"), hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"))
        norms = (norm(at, "input_layernorm"), norm(at, "post_attention_layernorm"))
        return (Parallel if parallel else PreNorm)(attention, mlp, norms)

    ends = Ends(norm=lambda body: norm(body, "final_layer_norm"), embed="embed_in", head="embed_out")
    return Decoder(b, b.under("gpt_neox", "embed_in.weight"), sizes, ends, layer)
