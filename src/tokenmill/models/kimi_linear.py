"""Kimi Linear: a delta rule with a decay for each line of its matrices in most layers, in the others latent attention
in which nothing rotates; shared and routed experts."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.delta_rule import DeltaHeads, DeltaNames, KeyedDelta
from tokenmill.layers.mlp import gated_mlp
from tokenmill.models.common import PreNorm, read_act, read_sizes, rms
from tokenmill.models.common_keys import ROPE
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Feed
from tokenmill.models.latent_attention import Latent, LatentAttention
from tokenmill.models.mixers import read_kinds
from tokenmill.models.parts import make_mixture
from tokenmill.models.rules import listed_or_first
from tokenmill.models.table_mixtures import DEEPSEEK_MIX, DEEPSEEK_ROUTE

_PLACES = ("block_sparse_moe", "mlp")
"""Where feed-forward layers lie: Transformers saves dense ones under the name of mixtures, too."""
_MIX = replace(
    DEEPSEEK_MIX,
    at=_PLACES,
    names=("w1", "w3", "w2"),
    count=("num_experts",),
    top_k=("num_experts_per_token",),
    dense=listed_or_first,
    route=replace(DEEPSEEK_ROUTE, normalise="moe_renormalize"),
)
_ALSO: dict[str, tuple[str, int | bool]] = {
    "num_experts": ("num_local_experts", 256),
    "num_experts_per_token": ("num_experts_per_tok", 8),
    "moe_renormalize": ("norm_topk_prob", True),
    "num_expert_group": ("n_group", 1),
    "num_shared_experts": ("n_shared_experts", 1),
}
"""The names of published files -> those of Transformers' class, and what absent keys mean."""
_LINEAR = {"head_dim": ("linear_head_dim", 128), "num_heads": ("linear_num_heads", 32),
           "short_conv_kernel_size": ("linear_conv_kernel_dim", 4)}  # fmt: skip
"""The same within `linear_attn_config`."""
_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
"""Its lists of layers, which count from one -> what Transformers calls these layers."""


def build(c: ModelConfig, b: Build) -> Decoder:
    """Kimi Linear from its config."""
    c = _settled(c)
    sizes, kinds, heads = read_sizes(c), _kinds(c), _heads(c)

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        first, second = (rms(c, f"{name}_layernorm")(at) for name in ("input", "post_attention"))
        inside, eps = at.at("self_attn"), c.get("rms_norm_eps", float, 1e-5, low=0.0)
        mixer: Block
        if kinds[index] == "linear_attention":
            mixer = KeyedDelta(inside, sizes.hidden, heads, eps, _names(inside))
        else:
            mixer = LatentAttention(c, inside, sizes.hidden, Latent(rotates=False))
        return PreNorm(mixer, _feed(c, b, at, index), (first, second))

    return Decoder(b, b.under("model", "embed_tokens.weight"), sizes, Ends(norm=rms(c, "norm")), layer)


def _feed(c: ModelConfig, b: Build, at: Build, index: int) -> Block:
    if not listed_or_first(c, index):
        return make_mixture(c, b, at, _MIX, Feed(), index)
    place = next((name for name in _PLACES if at.has(f"{name}.gate_proj.weight")), _PLACES[-1])
    act = read_act(c, gated=True, default="silu")
    return gated_mlp(at.at(place), c.need("hidden_size", int), c.need("intermediate_size", int), act)


def _names(inside: Build) -> DeltaNames:
    """The tensors as published files name them, or Transformers' modules."""
    gate = "forget_gate." if inside.has("forget_gate.A_log") else ""
    return DeltaNames(
        qkv=("q_proj", "k_proj", "v_proj"),
        gates=("g_b_proj", "b_proj", f"{gate}f_b_proj"),
        norm="o_norm",
        output="o_proj",
        rate=f"{gate}A_log",
        shift=f"{gate}dt_bias",
        narrow=("g_a_proj", f"{gate}f_a_proj"),
    )


def _settled(c: ModelConfig) -> ModelConfig:
    """The config under the names of published files, without what it says about rotation."""
    data = {**c.data, **dict.fromkeys(ROPE)}
    for own, (other, absent) in _ALSO.items():
        data[own] = data[other] = c.first((own, other), type(absent), absent)
    if strange := sorted(c.sub("linear_attn_config").data.keys() - _LINEAR.keys() - _LISTS.keys()):
        raise ModelError(f"config.json: 'linear_attn_config.{strange[0]}' is not supported.")
    return ModelConfig(data, architecture=c.architecture)


def _heads(c: ModelConfig) -> DeltaHeads:
    """The heads of the delta rule."""
    inner, found = c.sub("linear_attn_config"), {}
    for own, (other, absent) in _LINEAR.items():
        found[own] = inner.get(own, int, c.get(other, int, absent))
        if c.has(other) and c.need(other, int) != found[own]:
            raise c.refuse(other, f"contradicts 'linear_attn_config.{own}' = {found[own]}.")
    heads, dim, taps = found["num_heads"], found["head_dim"], found["short_conv_kernel_size"]
    if not 2 <= taps <= 64:
        raise ModelError(f"config.json: 'short_conv_kernel_size' = {taps} is out of bounds (2 to 64).")
    return DeltaHeads(heads, heads, dim, dim, taps)


def _kinds(c: ModelConfig) -> list[str]:
    """ "linear_attention" or "full_attention" of each layer: as `layer_types` or `linear_attn_config` says, or full
    attention in the fifth layer and every fourth one after it."""
    layers, inner = c.need("num_hidden_layers", int), c.sub("linear_attn_config")
    said: list[str] | None = None
    if any(inner.has(name) for name in _LISTS):
        placed = {n: kind for name, kind in _LISTS.items() for n in inner.need(name, list) if isinstance(n, int)}
        if sorted(placed) != list(range(1, layers + 1)) or sum(len(inner.need(n, list)) for n in _LISTS) != layers:
            names = " and ".join(f"'linear_attn_config.{name}'" for name in _LISTS)
            raise ModelError(f"config.json: {names} must name each layer from 1 to {layers} once.")
        said = [placed[n] for n in range(1, layers + 1)]
    if c.has("layer_types"):
        kinds = read_kinds(c, tuple(_LISTS.values()), "")
        if said not in (None, kinds):
            raise c.refuse("layer_types", "contradicts 'linear_attn_config'.")
        return kinds
    return said or ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(layers)]
