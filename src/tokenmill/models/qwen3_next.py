"""Qwen3-Next and Qwen3.5: layers with a gated delta rule, every fourth one with gated attention; experts or not."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.compute.forward import Touches
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import GatedAttention, attention_spec
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.delta_rule import DeltaHeads, GatedDelta
from tokenmill.layers.rope import make_rope
from tokenmill.models import rules
from tokenmill.models.common import PreNorm, read_heads, read_sizes
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Feed, Mix, Norms, Route, Shared
from tokenmill.models.mtp_layers import QWEN, Later, count_later, make_later
from tokenmill.models.parts import make_feed, make_mixture, norm
from tokenmill.models.positions import partial_rope

NORMS = Norms(offset=1.0)
MIX = Mix(
    route=Route(normalise="norm_topk_prob"),
    shared=Shared("shared_expert", rules.value("shared_expert_intermediate_size"), gate="shared_expert_gate"),
)


def build(c: ModelConfig, b: Build) -> Decoder:
    """A hybrid from its config."""
    sizes = read_sizes(c)
    kinds = layer_kinds(c, sizes.layers)

    def layer(body: Build, index: int) -> PreNorm:
        return make_layer(c, b, body.at(f"layers.{index}"), index, recurrent=kinds[index] == "linear_attention")

    ends = Ends(norm=lambda body: norm(c, body, NORMS, NORMS.last, sizes.hidden))
    # only for layers that draft later tokens
    b.book.used.update(name for name in b.checkpoint.names() if name.startswith("mtp."))
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, ends, layer)


def make_layer(c: ModelConfig, b: Build, at: Build, index: int, *, recurrent: bool) -> PreNorm:
    """One layer, whose tensors lie `at` there."""
    hidden, eps = c.need("hidden_size", int), c.get("rms_norm_eps", float, 1e-6, low=0.0)
    mixer: Block
    if recurrent:
        mixer = GatedDelta(at.at("linear_attn"), hidden, read_delta(c), eps)
    else:
        heads, inside = read_heads(c), at.at("self_attn")
        rope, bias = partial_rope(c, heads.dim), c.get("attention_bias", bool, False)
        norms = tuple(inside.norm(name, heads.dim, eps, offset=1.0) for name in ("q_norm", "k_norm"))
        spec = attention_spec(b, heads, rope=make_rope(b, rope), touches=Touches(norms[0], norms[1]))
        mixer = GatedAttention(inside, hidden, heads, spec, bias=bias)
    dense = not c.get("num_experts", int, 0, low=0) or rules.sparse_step(c, index)
    mlp: Block = make_feed(c, at, Feed(), NORMS) if dense else make_mixture(c, b, at, MIX, Feed(), index)
    first, second = (norm(c, at, NORMS, name, hidden) for name in NORMS.before)
    return PreNorm(mixer, mlp, (first, second))


def build_later(c: ModelConfig, b: Build) -> list[Later]:
    """The checkpoint's layers that draft later tokens. All of them share the tensors around the first."""
    hidden, at = c.need("hidden_size", int), b.at("mtp")
    if c.get("mtp_use_dedicated_embeddings", bool, False):
        raise c.refuse("mtp_use_dedicated_embeddings", "must be false: layers for drafts read the model's embeddings.")

    def layer(index: int) -> PreNorm:
        return make_layer(c, b, at.at(f"layers.{index}"), 0, recurrent=False)

    first = make_later(QWEN, at, hidden, lambda inside, name: norm(c, inside, NORMS, name, hidden), lambda: layer(0))
    more = range(1, count_later(c, "mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return [first, *(replace(first, layer=layer(index)) for index in more)]


def read_delta(c: ModelConfig) -> DeltaHeads:
    """The heads of recurrent layers."""
    keys = c.get("linear_num_key_heads", int, 16)
    values = c.get("linear_num_value_heads", int, 32)
    if values % keys:
        raise ModelError(f"config.json: {values} value heads cannot be shared by {keys} key heads.")
    return DeltaHeads(
        keys,
        values,
        c.get("linear_key_head_dim", int, 128),
        c.get("linear_value_head_dim", int, 128),
        c.get("linear_conv_kernel_dim", int, 4, low=2, high=64),
        c.get("_tiled_value_heads", bool, False),
    )


def layer_kinds(c: ModelConfig, layers: int) -> list[str]:
    """ "linear_attention" or "full_attention" of each layer."""
    if not c.has("layer_types"):
        every = c.get("full_attention_interval", int, 4)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    else:
        kinds = [str(kind) for kind in c.need("layer_types", list)]
        if len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
            raise c.refuse("layer_types", f"must name linear_attention or full_attention for each of {layers} layers.")
    if "full_attention" not in kinds:
        raise ModelError("config.json: at least one layer must have full attention ('layer_types').")
    return kinds
