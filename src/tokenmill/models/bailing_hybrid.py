"""Ling 3: a delta rule with a decay for each line of its matrices in most layers, in the others latent attention whose
heads are gated; shared and routed experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.delta_rule import DeltaHeads, DeltaNames, KeyedDelta
from tokenmill.layers.mlp import gated_mlp
from tokenmill.models.common import PreNorm, read_act, read_sizes, rms
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.family_row import Drafts, Feed
from tokenmill.models.latent_attention import Latent, LatentAttention
from tokenmill.models.mixers import read_kinds
from tokenmill.models.parts import make_mixture, not_computed
from tokenmill.models.rules import listed_or_first
from tokenmill.models.table_mixtures import DEEPSEEK_MIX, DEEPSEEK_ROUTE

_ALSO: dict[str, tuple[str, int | bool]] = {
    "num_experts": ("num_local_experts", 512),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "max_position_embeddings": ("model_max_length", 262144),
}
"""Names of which a file has one, and what it means if both are absent."""
_LINEAR = {"linear_head_dim": ("head_dim", 128), "linear_num_heads": ("num_attention_heads", 32),
           "linear_conv_kernel_dim": ("short_conv_kernel_size", 4)}  # fmt: skip
"""Sizes of the delta rule that Transformers writes -> the keys from which it takes them."""
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_MIX = replace(DEEPSEEK_MIX, count=("num_experts",), dense=listed_or_first)


def build(c: ModelConfig, b: Build) -> Decoder:
    """Ling 3 from its config."""
    c = _settled(c)
    sizes, kinds, heads = read_sizes(c), _kinds(c), _heads(c)
    embed = _first((b.at("model"), b), ("word_embeddings", "embed_tokens"))

    def layer(body: Build, index: int) -> PreNorm:
        at = body.at(f"layers.{index}")
        first, second = (rms(c, f"{name}_layernorm")(at) for name in ("input", "post_attention"))
        inside = at.at(_first((at,), ("attention.g_proj", "self_attn.g_proj")).removesuffix(".g_proj"))
        output = _first((inside,), ("dense", "o_proj"))
        mixer: Block
        if kinds[index] == "linear_attention":
            eps = c.get("rms_norm_eps", float, 1e-6, low=0.0)
            mixer = KeyedDelta(inside, sizes.hidden, heads, eps, _names(inside, output))
        else:
            mixer = LatentAttention(c, inside, sizes.hidden, Latent(gate="g_proj", output=output))
        return PreNorm(mixer, _feed(c, b, at, index), (first, second))

    drafts = Drafts(r"^model\.mtp\.", "num_nextn_predict_layers")
    b.book.used.update(not_computed(c, b, drafts, sizes.layers))
    return Decoder(b, b.under("model", f"{embed}.weight"), sizes, Ends(norm=rms(c, "norm"), embed=embed), layer)


def _first(places: Iterable[Build], names: tuple[str, str]) -> str:
    """The first of these names that is there, or the last one. Published files and Transformers differ in them."""
    return next((name for name in names if any(b.has(f"{name}.weight") for b in places)), names[-1])


def _feed(c: ModelConfig, b: Build, at: Build, index: int) -> Block:
    if listed_or_first(c, index):
        act = read_act(c, gated=True, default="silu")
        return gated_mlp(at.at("mlp"), c.need("hidden_size", int), c.need("intermediate_size", int), act)
    bias = "gate.expert_bias" if at.has("mlp.gate.expert_bias") else "gate.e_score_correction_bias"
    return make_mixture(c, b, at, replace(_MIX, route=replace(DEEPSEEK_ROUTE, bias=bias)), Feed(), index)


def _names(inside: Build, output: str) -> DeltaNames:
    gate = "forget_gate." if inside.has("forget_gate.A_log") else ""
    return DeltaNames(
        qkv=("q_proj", "k_proj", "v_proj"),
        gates=("g_proj", "b_proj", f"{gate}f_proj"),
        norm="o_norm",
        output=output,
        rate=f"{gate}A_log",
        shift=f"{gate}dt_bias",
    )


def _settled(c: ModelConfig) -> ModelConfig:
    """The config under one name for each thing. The rotated part of a head turns as a whole, whatever the share is."""
    data = {**c.data, "partial_rotary_factor": None, "rope_interleave": True}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(data.get(name), dict):
            data[name] = {key: value for key, value in data[name].items() if key != "partial_rotary_factor"}
    for own, (other, absent) in _ALSO.items():
        data[own] = c.first((own, other), type(absent), absent)
    later = "num_nextn_predict_layers"
    data[later] = c.get(later, int, c.get("num_mtp_layers", int, 0, low=0), low=0)
    for name in _LIMITS:
        if any(c.get(name, list, [])):
            raise c.refuse(name, "is not supported (only zeros).")
    inner, shared = "moe_intermediate_size", "moe_shared_expert_intermediate_size"
    if c.has(shared) and c.data[shared] != c.data.get(inner):
        raise c.refuse(shared, f"is not supported (only '{inner}' = {c.data.get(inner)}).")
    return ModelConfig(data, architecture=c.architecture)


def _heads(c: ModelConfig) -> DeltaHeads:
    """The heads of the delta rule."""
    dim, heads, taps = (c.get(own, int, c.get(other, int, absent)) for own, (other, absent) in _LINEAR.items())
    if not 2 <= taps <= 64:
        raise ModelError(f"config.json: 'short_conv_kernel_size' = {taps} is out of bounds (2 to 64).")
    floor = 0.0
    if c.get("kda_safe_gate", bool, True):
        floor = c.get("kda_lower_bound", float, -5.0)
        if not -80.0 <= floor < 0.0:
            raise c.refuse("kda_lower_bound", "is out of bounds (-80 to below 0).")
    return DeltaHeads(heads, heads, dim, dim, taps, floor=floor)


def _kinds(c: ModelConfig) -> list[str]:
    """ "linear_attention" or "full_attention" of each layer: as `layer_types` says, or latent attention at the end of
    each group of `layer_group_size`."""
    if c.has("layer_types"):
        return read_kinds(c, ("linear_attention", "full_attention"), "")
    size = c.get("layer_group_size", int, 6)
    return ["linear_attention" if (i + 1) % size else "full_attention" for i in range(c.need("num_hidden_layers", int))]
