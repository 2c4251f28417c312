"""What stands in attention's place in some layers. Owns: reading sizes of recurrent layers from a config, and which
layers are recurrent.

Every rule is a function (config, where the layer's tensors lie, layer) -> the block, or None where the layer has
attention; rows of the table name them. Must not know: which families there are, what lies around a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.compute.forward import NormSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.delta_rule import DeltaHeads, DeltaNames, GatedDelta
from tokenmill.layers.lru import GatedRecurrence
from tokenmill.layers.state_space import GatedConvolution, ScanSizes, SelectiveScan, SpaceHeads, SpaceStyle, StateSpace
from tokenmill.models.common import read_act
from tokenmill.models.config import ModelConfig

Mixer = Callable[[ModelConfig, Build, int], Block | None]
RECURRENT = ("mamba", "linear_attention")
"""The names of layers with a state in `layer_types`; older files use the first."""


@dataclass(frozen=True)
class SpaceKeys:
    """A family's config keys for the sizes of Mamba-2: heads, head size, groups, state, taps, biases, and the width if
    it has a key of its own."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    keys: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    out_bias: str = "mamba_proj_bias"
    width: str = ""
    expand: str = "mamba_expand"
    eps: str = "rms_norm_eps"
    lowest: str = ""


def space_heads(c: ModelConfig, names: SpaceKeys) -> SpaceHeads:
    """Read the sizes of Mamba-2, and check that they agree with each other."""
    hidden, heads = c.need("hidden_size", int), c.need(names.heads, int)
    width = c.get(names.width, int, 0) if names.width else 0
    if names.expand and not width:
        width = int(c.get(names.expand, float, 2.0, low=1e-3) * hidden)
    head_dim = c.data.get(names.dim)
    dim = width // heads if head_dim in (None, "auto") else c.need(names.dim, int)
    groups = c.get(names.groups, int, 1)
    if (width and dim * heads != width) or heads % groups:
        raise ModelError(
            f"config.json: {heads} heads of {dim} in {groups} groups ('{names.heads}', '{names.dim}', '{names.groups}')"
            f" do not make up the {width or dim * heads} columns of the state space."
        )
    low, high = (c.get(names.lowest, float, 0.0, low=0.0), math.inf) if names.lowest else _limits(c)
    return SpaceHeads(heads, dim, groups, c.need(names.keys, int), c.get(names.taps, int, 4, low=2, high=16), low, high)


def _limits(c: ModelConfig) -> tuple[float, float]:
    limits = c.get("time_step_limit", list, [0.0, math.inf])
    try:
        low, high = (_number(one) for one in limits)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise c.refuse("time_step_limit", "must be two numbers.") from None
    if not 0.0 <= low <= high:
        raise c.refuse("time_step_limit", "must be two numbers, the lower one first.")
    return low, high


def _number(said: Any) -> float:
    """A number. An object stands for infinity, which JSON files cannot hold."""
    return float(said["__float__"] if isinstance(said, dict) else said)


def make_space(
    c: ModelConfig,
    at: Build,
    names: SpaceKeys,
    *,
    norm: bool = True,
    factors: tuple[float, float, float, float, float] = (1.0,) * 5,
    gain: float = 1.0,
) -> StateSpace:
    """Make a Mamba-2 block. norm False: it has only the gate. factors, gain: see SpaceStyle."""
    heads = space_heads(c, names)
    style = SpaceStyle(
        bias=c.get(names.bias, bool, False),
        conv_bias=c.get(names.conv_bias, bool, False),
        out_bias=c.get(names.out_bias, bool, False),
        norm=heads.width // heads.groups if norm else 0,
        gate_first=not c.get("mamba_norm_before_gate", bool, False),
        eps=c.get(names.eps, float, 1e-5, low=0.0),
        factors=factors,
        gain=gain,
    )
    return StateSpace(at, c.need("hidden_size", int), heads, style)


def read_kinds(c: ModelConfig, kinds: tuple[str, ...], default: str) -> list[str]:
    """The kind of each layer, as `layer_types` names them."""
    layers = c.need("num_hidden_layers", int)
    if not c.has("layer_types"):
        return [default] * layers
    found = c.need("layer_types", list)
    if len(found) != layers or any(kind not in kinds for kind in found):
        raise c.refuse("layer_types", f"must name one of {', '.join(kinds)} for each of {layers} layers.")
    return [str(kind) for kind in found]


def typed_space(names: SpaceKeys) -> Mixer:
    """Mamba-2 in the layers that `layer_types` names."""

    def mixer(c: ModelConfig, at: Build, index: int) -> Block | None:
        kinds = read_kinds(c, (*RECURRENT, "attention", "full_attention"), "linear_attention")
        return make_space(c, at.at("mamba"), names) if kinds[index] in RECURRENT else None

    return mixer


def indexed_space(c: ModelConfig, at: Build, index: int) -> Block | None:
    """Mamba-2 in all layers but `attn_layer_indices`."""
    attends = c.get("attn_layer_indices", list, [])
    return None if index in attends else make_space(c, at.at("mamba"), SpaceKeys())


def jamba_scan(c: ModelConfig, at: Build, index: int) -> Block | None:
    """Mamba-1 with norms of its parts, in all but one layer of a period."""
    period, offset = c.get("attn_layer_period", int, 8), c.get("attn_layer_offset", int, 4, low=0)
    if index % period == offset:
        return None
    hidden, eps = c.need("hidden_size", int), c.get("rms_norm_eps", float, 1e-6, low=0.0)
    channels = c.get("mamba_expand", int, 2) * hidden
    sizes = ScanSizes(channels, c.get("mamba_d_state", int, 16), c.get("mamba_d_conv", int, 4, low=2, high=16),
                      read_rank(c, "mamba_dt_rank"))  # fmt: skip
    bias = c.get("mamba_proj_bias", bool, False)
    style = SpaceStyle(bias=bias, conv_bias=c.get("mamba_conv_bias", bool, False), out_bias=bias)
    inside = at.at("mamba")
    named = (("dt_layernorm", sizes.rank), ("b_layernorm", sizes.keys), ("c_layernorm", sizes.keys))
    return SelectiveScan(inside, hidden, sizes, style, tuple(inside.norm(name, n, eps) for name, n in named))


def read_rank(c: ModelConfig, name: str) -> int:
    """The width from which a token's pace is made. "auto": a sixteenth of the hidden size."""
    if c.data.get(name) in (None, "auto"):
        return math.ceil(c.need("hidden_size", int) / 16)
    return c.need(name, int)


def plain_scan(c: ModelConfig, at: Build, index: int) -> Block:
    """Mamba-1; FalconMamba norms its parts without weights."""
    hidden = c.need("hidden_size", int)
    sizes = ScanSizes(c.get("intermediate_size", int, int(c.get("expand", float, 2.0, low=1e-3) * hidden)),
                      c.get("state_size", int, 16),
                      c.get("conv_kernel", int, 4, low=2, high=16), read_rank(c, "time_step_rank"))  # fmt: skip
    bias = c.get("use_bias", bool, False)
    style = SpaceStyle(bias=bias, conv_bias=c.get("use_conv_bias", bool, False), out_bias=bias)
    inside = at.at("mixer")
    norms: tuple[NormSpec, ...] = ()
    if c.has("mixer_rms_eps"):
        eps = c.need("mixer_rms_eps", float, low=0.0)
        ones = [torch.ones(n, dtype=at.dtype, device=at.device) for n in (sizes.rank, sizes.keys, sizes.keys)]
        norms = tuple(NormSpec(one, eps) for one in ones)
    return SelectiveScan(inside, hidden, sizes, style, norms)


def alone(make: Callable[[ModelConfig, Build, int], Block]) -> Callable[[ModelConfig, Build, Build, int], Block]:
    """The rule of a model in which every layer is such a block."""

    def single(c: ModelConfig, b: Build, at: Build, index: int) -> Block:
        return make(c, at, index)

    return single


def plain_space(c: ModelConfig, at: Build, index: int) -> Block:
    """Mamba-2 by itself."""
    names = SpaceKeys("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_bias", "use_conv_bias",
                      "use_bias", expand="expand", eps="layer_norm_epsilon")  # fmt: skip
    return make_space(c, at.at("mixer"), names)


NEMOTRON = ("linear_attention", "full_attention", "moe", "mlp")
_LETTERS = dict(zip("M*E-", NEMOTRON, strict=True))
_NEMOTRON_KEYS = SpaceKeys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_bias",
                           "use_conv_bias", "use_bias", expand="", eps="layer_norm_epsilon",
                           lowest="time_step_min")  # fmt: skip


def nemotron_kinds(c: ModelConfig) -> dict[str, Any]:
    """The kind of each layer, from a list or one letter for each; the list gives the number of layers. Without either
    there are four. For two keys the usual names take precedence over the family's own."""
    listed = next((name for name in ("layer_types", "layers_block_type") if c.has(name)), "")
    if listed:
        kinds = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind)
                 for kind in c.need(listed, list) if isinstance(kind, str)]  # fmt: skip
    elif not c.has("hybrid_override_pattern"):
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    else:
        pattern = c.need("hybrid_override_pattern", str)
        if set(pattern) - set(_LETTERS):
            raise c.refuse("hybrid_override_pattern", f"may only have the letters {' '.join(_LETTERS)}.")
        kinds = [_LETTERS[letter] for letter in pattern]
    if not kinds or set(kinds) - set(NEMOTRON):
        raise c.refuse(listed or "hybrid_override_pattern", f"may only name {', '.join(NEMOTRON)}.")
    if "full_attention" not in kinds:
        raise c.refuse(listed or "hybrid_override_pattern", "must name full_attention for a layer at least.")
    experts = {"n_routed_experts": c.data["num_local_experts"]} if c.has("num_local_experts") else {}
    return {"num_hidden_layers": len(kinds), "layers_block_type": kinds, **experts}


def nemotron_space(c: ModelConfig, at: Build) -> Block:
    """Nemotron's Mamba-2."""
    return make_space(c, at, _NEMOTRON_KEYS)


def griffin(c: ModelConfig, at: Build, index: int) -> Block | None:
    """A gated linear recurrence in the layers that `block_types`, repeated, names."""
    kinds = c.get("block_types", list, ["recurrent", "recurrent", "attention"])
    if not kinds or not set(map(str, kinds)) <= {"recurrent", "attention"}:
        raise c.refuse("block_types", "may only name 'recurrent' and 'attention'.")
    if "attention" not in (kinds * 10_000)[: c.need("num_hidden_layers", int, high=10_000)]:
        raise c.refuse("block_types", "must name 'attention' for a layer at least.")
    if kinds[index % len(kinds)] == "attention":
        return None
    hidden, heads = c.need("hidden_size", int), c.need("num_attention_heads", int)
    channels = c.get("lru_width", int, hidden)
    if channels % heads:
        raise c.refuse("lru_width", f"cannot be shared by {heads} heads.")
    act = read_act(c, gated=True, default="gelu_pytorch_tanh", key="hidden_activation")
    taps = c.get("conv1d_width", int, 4, low=2, high=16)
    return GatedRecurrence(at.at("temporal_block"), (hidden, channels, heads), taps, act)


def olmo_delta(c: ModelConfig, at: Build, index: int) -> Block | None:
    """A gated delta rule in all but every fourth layer, or where `layer_types` names it."""
    kinds = _olmo_kinds(c)
    if kinds[index] == "full_attention":
        return None
    hidden, attending = c.need("hidden_size", int), c.need("num_attention_heads", int)
    keys, values = (c.get(f"linear_num_{part}_heads", int, attending) for part in ("key", "value"))
    if values % keys:
        raise c.refuse("linear_num_value_heads", f"{values} cannot be shared by {keys} key heads.")
    dim = c.get("linear_key_head_dim", int, max(1, int(0.75 * hidden / keys)))
    heads = DeltaHeads(
        keys, values, dim, c.get("linear_value_head_dim", int, 2 * dim),
        c.get("linear_conv_kernel_dim", int, 4, low=2, high=64),
        most_beta=2.0 if c.get("linear_allow_neg_eigval", bool, True) else 1.0,
    )  # fmt: skip
    names = DeltaNames(("q_proj", "k_proj", "v_proj"), ("g_proj", "b_proj", "a_proj"), norm="o_norm", output="o_proj")
    return GatedDelta(at.at("linear_attn"), hidden, heads, 1e-5, names)


def _olmo_kinds(c: ModelConfig) -> list[str]:
    layers = c.need("num_hidden_layers", int)
    if c.has("layer_types"):
        kinds = read_kinds(c, ("linear_attention", "full_attention"), "")
        if len(set(kinds)) < 2:
            raise c.refuse("layer_types", "must name both linear_attention and full_attention.")
        return kinds
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


def short_convolutions(kinds: Callable[[ModelConfig], list[str]]) -> Mixer:
    """A short convolution in the layers of kind "conv"."""

    def mixer(c: ModelConfig, at: Build, index: int) -> Block | None:
        if kinds(c)[index] != "conv":
            return None
        taps = c.get("conv_L_cache", int, 3, low=2, high=16)
        return GatedConvolution(at.at("conv"), c.need("hidden_size", int), taps, bias=c.get("conv_bias", bool, False))

    return mixer


def lfm2_kinds(c: ModelConfig) -> list[str]:
    """ "conv" or "full_attention" of each layer."""
    if c.has("layer_types") or not c.has("full_attn_idxs"):
        return read_kinds(c, ("conv", "full_attention"), "full_attention")
    attends = c.need("full_attn_idxs", list)
    return ["full_attention" if i in attends else "conv" for i in range(c.need("num_hidden_layers", int))]


def lfm3_kinds(c: ModelConfig) -> list[str]:
    """ "conv", "sliding_attention" or "full_attention" of each layer: without a list, one layer of four has a window
    and one sees everything."""
    if c.has("layer_types"):
        return read_kinds(c, ("conv", "sliding_attention", "full_attention"), "")
    kinds = ["conv" if i % 2 else "sliding_attention" if i % 4 == 0 else "full_attention"
             for i in range(c.need("num_hidden_layers", int))]  # fmt: skip
    return ["conv", *kinds[1:]]
