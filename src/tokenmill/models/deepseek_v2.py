"""DeepSeek V2, V3 and V3.2, Kimi K2, GLM-5, Sarvam 105B, GLM-4.7-Flash, Mistral Small 4, A.X K1 and K2: latent
attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.gated_norm import GatedNorm, GatedPreNorm, gated_norm
from tokenmill.layers.mlp import gated_mlp
from tokenmill.models.common import PreNorm, Sandwich, read_act, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends, Layer
from tokenmill.models.family_row import Drafts, Feed, Mix, Route
from tokenmill.models.key_index import IndexStyle, Indices, between_some
from tokenmill.models.latent_attention import Latent, LatentAttention
from tokenmill.models.mtp_layers import Later, make_behind
from tokenmill.models.parts import make_mixture, not_computed
from tokenmill.models.rules import glm_dense, listed, listed_or_first, sarvam, value
from tokenmill.models.table_mixtures import DEEPSEEK_MIX

_SOFTMAX = Route(normalise="norm_topk_prob", scale="routed_scaling_factor", grouped=True)
_INDEXED = replace(DEEPSEEK_MIX, dense=listed_or_first)
_LISTED = replace(DEEPSEEK_MIX, dense=listed(value("first_k_dense_replace", 1)))


@dataclass(frozen=True)
class Variant:
    """What sets a family apart from DeepSeek V3. said: keys of its config under the names of the others."""

    mix: Mix = DEEPSEEK_MIX
    latent: Latent = field(default_factory=Latent)
    said: Callable[[ModelConfig], dict[str, Any]] = lambda c: {}
    index: IndexStyle | None = None
    """Each token sees the keys that an index chooses."""
    gated_norms: bool = False
    """Norms have a gate, except before a dense layer's feed-forward block."""
    last_norm: bool = False
    """Mixtures are followed by a norm, which files have in all layers."""
    bias_may_lack: bool = False
    """Files may have no bias by which experts are chosen."""


def _greedy(c: ModelConfig) -> dict[str, Any]:
    grouped = c.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    return {} if grouped else {"n_group": 1, "topk_group": 1}


_VARIANTS = {
    # Its router stays in float32: rounding its logits would change which experts are chosen.
    "DeepseekV2ForCausalLM": Variant(
        replace(DEEPSEEK_MIX, route=replace(_SOFTMAX, normalise=False, wide=True, by_best=True)),
        Latent(pairs=True),
        _greedy,
    ),
    "Glm4MoeLiteForCausalLM": Variant(replace(DEEPSEEK_MIX, dense=glm_dense)),
    "SarvamMLAForCausalLM": Variant(said=sarvam),
    "Mistral4ForCausalLM": Variant(replace(DEEPSEEK_MIX, route=_SOFTMAX), Latent(tempered=True)),
    "AXK1ForCausalLM": Variant(_LISTED, last_norm=True, bias_may_lack=True),
    "AXK2ForCausalLM": Variant(_LISTED, Latent(joined=True), index=IndexStyle(), gated_norms=True),
    "DeepseekV32ForCausalLM": Variant(_INDEXED, index=IndexStyle()),
    "GlmMoeDsaForCausalLM": Variant(_INDEXED, index=IndexStyle(pairs=True, shared=between_some)),
}


def build(c: ModelConfig, b: Build) -> Decoder:
    """Build one of these families from its config."""
    c = ModelConfig({**c.data, **_variant(c).said(c)}, architecture=c.architecture)
    sizes, indices = read_sizes(c), _indices(c)

    def layer(body: Build, index: int) -> Layer:
        return make_layer(c, b, body.at(f"layers.{index}"), index, indices)

    b.book.used.update(not_computed(c, b, Drafts(later="num_nextn_predict_layers"), sizes.layers))
    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def _variant(c: ModelConfig) -> Variant:
    return _VARIANTS.get(c.architecture, Variant())


def _indices(c: ModelConfig) -> Indices:
    return Indices(c, _variant(c).index or IndexStyle())


def make_layer(c: ModelConfig, b: Build, at: Build, index: int, indices: Indices) -> Layer:
    """One layer, whose tensors lie `at` there."""
    variant, hidden = _variant(c), c.need("hidden_size", int)
    mix, dense = variant.mix, variant.mix.dense(c, index)
    first, second = rms(c, "input_layernorm"), rms(c, "post_attention_layernorm")
    mlp: Block
    if dense:
        act, bias = read_act(c, gated=True, default="silu"), c.get("mlp_bias", bool, False)
        mlp = gated_mlp(at.at("mlp"), hidden, c.need("intermediate_size", int), act, bias=bias)
    else:
        if variant.bias_may_lack and not at.has(f"mlp.{mix.route.bias}"):
            mix = replace(mix, route=replace(mix.route, bias=""))
        mlp = make_mixture(c, b, at, mix, Feed(bias="mlp_bias"), index)
    inside = at.at("self_attn")
    choice = indices.of(inside, index) if variant.index else None
    attention = LatentAttention(c, inside, hidden, variant.latent, choice)
    if variant.gated_norms:
        rank, eps = c.need("gated_norm_rank", int), c.get("rms_norm_eps", float, 1e-6, low=0.0)
        before = [gated_norm(at.at(f"{name}_layernorm"), hidden, rank, eps) if name == "input" or not dense
                  else GatedNorm(second(at)) for name in ("input", "post_attention")]  # fmt: skip
        return GatedPreNorm(attention, mlp, (before[0], before[1]))
    if variant.last_norm and not dense:
        return Sandwich((attention, mlp), (first(at), second(at)), (None, rms(c, "post_mlp_layernorm")(at)))
    if variant.last_norm:
        b.book.used.add(at.path("post_mlp_layernorm.weight"))
    return PreNorm(attention, mlp, (first(at), second(at)))


def build_later(c: ModelConfig, b: Build) -> list[Later]:
    """The checkpoint's layers that draft later tokens."""
    sizes, body = read_sizes(c), b.under("model", "embed_tokens.weight")
    norm, indices = lambda inside, name: rms(c, name)(inside), _indices(c)

    def layer(at: Build, index: int) -> Layer:
        return make_layer(c, b, at, index, indices)

    return make_behind(c, body.at("layers"), (sizes.layers, sizes.hidden), norm, layer)
