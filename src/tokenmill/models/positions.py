"""How positions enter attention, family by family: rope settings from a config, and queries scaled by position.

Owns: every family's own spelling. Every rule is a function of the config; rows of the table name them. Must not know:
tensors, frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.core.errors import ModelError, shown
from tokenmill.layers.rope import RopeSettings, rope_settings
from tokenmill.models.config import ModelConfig

OWN_NAMES = ("llama_4_scaling_beta", "max_position_embeddings", "alpha", "short_mscale", "long_mscale")
"""Names in an object of rope settings that single families read themselves."""

RopeRule = Callable[[ModelConfig, int, str], RopeSettings]
"""(config, head size, kind of layer) -> settings."""


@dataclass(frozen=True)
class Temper:
    """In layers that have it, queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) /
    span))."""

    beta: float
    span: float
    offset: float = 0.0
    rotated: bool = True
    """True: in layers that rotate. False: in layers that do not."""


def whole_rope(c: ModelConfig, dim: int, kind: str = "") -> RopeSettings:
    """The whole of each head rotates, the same way in every layer."""
    found = rope_settings(c.data, dim)
    _check_whole(c, found, dim)
    return found


def _check_whole(c: ModelConfig, found: RopeSettings, dim: int) -> None:
    if found.dim != dim:
        raise ModelError(f"config.json: 'partial_rotary_factor' is not supported in {c.architecture}.")


def partial_rope(c: ModelConfig, dim: int, kind: str = "") -> RopeSettings:
    """A part of each head may rotate."""
    return rope_settings(c.data, dim)


def phi3_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """In this family "yarn" is an older name of longrope, and there is no other scaling."""
    found = rope_settings(c.data, dim)
    if found.kind not in ("default", "longrope", "yarn"):
        raise ModelError(f"config.json: rope type '{found.kind}' is not supported in Phi-3 (only longrope).")
    return replace(found, kind="longrope") if found.kind == "yarn" else found


def default_rope(values: dict[str, Any]) -> RopeRule:
    """The family's own scaling, for a config without rotary settings."""

    def rule(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
        if not c.has("rope_parameters") and not c.get("rope_scaling", dict, {}):
            c = ModelConfig({**c.data, "rope_parameters": dict(values)}, architecture=c.architecture)
        return whole_rope(c, dim, kind)

    return rule


def rope_of_kind(c: ModelConfig, own: dict[str, Any], dim: int, kind: str, *, whole: bool = True) -> RopeSettings:
    """The settings of one kind of layer; values beside the object, which are for all kinds, do not apply to it."""
    rule = whole_rope if whole else partial_rope
    if own.get("truncate") not in (None, True):
        raise ModelError(f"config.json: 'truncate' is not supported in the rope settings of one kind of layer: {kind}.")
    own = {name: value for name, value in own.items() if name != "truncate"}  # nor is it read if it is null
    outer = {"rope_scaling": None, "rope_theta": None, "original_max_position_embeddings": None}
    return rule(ModelConfig({**c.data, **outer, "rope_parameters": own}, architecture=c.architecture), dim, kind)


def gemma3_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """Local layers have their own base and no scaling, in either spelling."""
    local = kind == "sliding_attention"
    nested = c.get("rope_parameters", dict, {})
    if nested and not any(isinstance(value, dict) for value in nested.values()):
        raise c.refuse("rope_parameters", "must say it for each kind of layer (full_attention, sliding_attention).")
    if "rope_type" not in c.get("rope_scaling", dict, {"rope_type": ""}):
        raise c.refuse("rope_scaling", "needs a 'rope_type'.")
    base = c.get("rope_local_base_freq" if local else "rope_theta", float, 10000.0 if local else 1e6, low=1.0)
    own = ModelConfig(nested, "rope_parameters").get(kind, dict, {})
    scaled = {} if local else c.get("rope_scaling", dict, {})
    return rope_of_kind(c, {"rope_theta": base, **own, **scaled}, dim, kind)


_OLMO3_THETA = 500000.0


def typed_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """Each kind of layer has its own settings; the older spelling scales only layers that see everything."""
    nested, scaling = c.get("rope_parameters", dict, {}), c.get("rope_scaling", dict, {})
    if nested and not any(isinstance(value, dict) for value in nested.values()):
        raise c.refuse("rope_parameters", "must say it for each kind of layer (full_attention, sliding_attention).")
    if scaling and "rope_type" not in scaling:
        raise c.refuse("rope_scaling", "needs a 'rope_type'.")
    own = ModelConfig(nested, "rope_parameters").get(kind, dict, {})
    if kind == "full_attention":
        own = {**own, **scaling}
    if "rope_theta" not in own and c.get("rope_theta", float, _OLMO3_THETA) != _OLMO3_THETA:
        raise c.refuse("rope_theta", "must be said in 'rope_parameters' for each kind of layer.")
    return rope_of_kind(c, {"rope_theta": _OLMO3_THETA, **own}, dim, kind)


def layered_rope(*, part: float = 0.0, **defaults: dict[str, Any]) -> RopeRule:
    """Each kind of layer has its own settings, in `rope_parameters` alone. part: a part of each head may rotate, and
    without scaling it is this one if it is not said (0: whole heads rotate)."""

    def rule(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
        nested = c.get("rope_parameters", dict, {}) or defaults
        if not isinstance(nested.get(kind), dict) or "rope_theta" not in nested[kind]:
            raise c.refuse("rope_parameters", f"must hold an object for '{kind}' with a 'rope_theta'.")
        own = nested[kind]
        if part and own.get("rope_type", "default") == "default" and own.get("partial_rotary_factor") is None:
            own = {**own, "partial_rotary_factor": part}
        return rope_of_kind(c, own, dim, kind, whole=not part)

    return rule


def neox_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """This family has its own names for two of the rotary values."""
    names = {"partial_rotary_factor": c.get("rotary_pct", float, 0.25, low=0.0, high=1.0),
             "rope_theta": c.get("rotary_emb_base", float, 10000.0, low=1.0)}  # fmt: skip
    return rope_settings({**c.data, **names}, dim)


def griffin_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """A part of each head rotates, without scaling."""
    found = partial_rope(c, dim, kind)
    if found.kind != "default":
        raise ModelError(f"config.json: rope type '{found.kind}' is not supported in RecurrentGemma (only default).")
    return found


def rotary_dim(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """`rotary_dim` entries of each head rotate, with the usual base and no scaling."""
    turning = c.need("rotary_dim", int, high=dim)
    if turning % 2:
        raise c.refuse("rotary_dim", "must be even.")
    return replace(rope_settings({}, dim), dim=turning)


_MINISTRAL3 = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
               "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
               "llama_4_scaling_beta": 0.1}  # fmt: skip
_MISTRAL4 = {**_MINISTRAL3, "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}


def _tempered(c: ModelConfig) -> dict[str, Any]:
    """The settings of Ministral 3 and Mistral 4."""
    absent = _MISTRAL4 if c.architecture == "Mistral4ForCausalLM" else _MINISTRAL3
    return c.get("rope_scaling", dict, {}) or c.get("rope_parameters", dict, {}) or dict(absent)


def tempered_rope(c: ModelConfig, dim: int, kind: str = "") -> RopeSettings:
    """Yarn, unless the config says otherwise."""
    own = {name: value for name, value in _tempered(c).items()
           if name not in ("llama_4_scaling_beta", "max_position_embeddings")}  # fmt: skip
    data = {**c.data, "rope_parameters": own, "rope_scaling": None}
    return whole_rope(ModelConfig(data, architecture=c.architecture), dim, kind)


def mistral4_rope(c: ModelConfig, dim: int) -> RopeSettings:
    """The share of a head that rotates may be said; it must be that of `qk_rope_head_dim`."""
    own = _tempered(c)
    share = own.get("partial_rotary_factor", c.data.get("partial_rotary_factor"))
    heads = dim + c.need("qk_nope_head_dim", int)
    if share is not None and (not isinstance(share, int | float) or int(heads * share) != dim):
        raise ModelError(
            f"config.json: 'partial_rotary_factor' = {shown(share)} contradicts 'qk_rope_head_dim' = {dim}."
        )
    said = {"rope_parameters": {**own, "partial_rotary_factor": None}, "rope_scaling": None}
    return tempered_rope(
        ModelConfig({**c.data, **said, "partial_rotary_factor": None}, architecture=c.architecture), dim
    )


def span_temper(c: ModelConfig) -> Temper:
    """`llama_4_scaling_beta`, counted in spans of the positions before the stretching."""
    own = ModelConfig(_tempered(c), "rope_parameters")
    return Temper(own.need("llama_4_scaling_beta", float, low=0.0),
                  own.need("original_max_position_embeddings", int))  # fmt: skip


def hunyuan_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """In this family "dynamic" with an `alpha` stretches the base once and for all."""
    values = c.get("rope_scaling", dict, {}) or c.get("rope_parameters", dict, {})
    named = values.get("rope_type") or values.get("type")
    if named != "dynamic" or not values.get("alpha"):
        return whole_rope(c, dim, kind)
    if dim <= 2:
        raise c.refuse("head_dim", "leaves nothing that an `alpha` could stretch.")
    own = ModelConfig(values, "rope_parameters")
    theta = own.get("rope_theta", float, c.get("rope_theta", float, 10000.0, low=1.0), low=1.0)
    stretched = theta * own.need("alpha", float, low=1e-6) ** (dim / (dim - 2))
    plain = {"rope_type": "default", "rope_theta": min(stretched, 1e12)}
    return whole_rope(ModelConfig({**c.data, "rope_parameters": plain, "rope_scaling": None}), dim, kind)


def phimoe_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """Longrope whose gain on cos and sin is given for short and for long runs."""
    found = rope_settings(c.data, dim, also=("short_mscale", "long_mscale"))
    original = dict(found.values).get("original_max_position_embeddings")
    if original is not None and original != found.original_positions:
        raise c.refuse("original_max_position_embeddings", f"contradicts {original} in the rope scaling.")
    if found.kind not in ("default", "longrope"):
        raise ModelError(f"config.json: rope type '{found.kind}' is not supported in PhiMoE (only longrope).")
    _check_whole(c, found, dim)
    if found.kind == "longrope":
        found.value("short_mscale"), found.value("long_mscale")
    return found


def minimax_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """`rotary_dim` entries of each head rotate, if it is given."""
    if not c.has("rotary_dim") or c.has("partial_rotary_factor"):
        return partial_rope(c, dim, kind)
    part = c.need("rotary_dim", int, high=dim) / dim
    return partial_rope(ModelConfig({**c.data, "partial_rotary_factor": part}), dim, kind)


def dbrx_rope(c: ModelConfig, dim: int, kind: str) -> RopeSettings:
    """The base is in `attn_config`; the usual keys may also give it."""
    inner = c.need("attn_config.rope_theta", float)
    nested = c.get("rope_scaling", dict, {}) or c.get("rope_parameters", dict, {})
    theta = nested.get("rope_theta") or c.get("rope_theta", float, inner)
    if theta != inner:
        raise ModelError(f"config.json: 'rope_theta' = {theta!r} contradicts 'attn_config.rope_theta' = {inner!r}.")
    return whole_rope(ModelConfig({**c.data, "rope_theta": inner}, architecture=c.architecture), dim, kind)


def llama4_temper(c: ModelConfig) -> Temper | None:
    """Queries of layers that do not rotate are scaled by their position."""
    tuning = c.data.get("attn_temperature_tuning")
    number = isinstance(tuning, int) and not isinstance(tuning, bool)  # some published files have a number here
    if not (tuning if number else c.get("attn_temperature_tuning", bool, True)):
        return None
    scale, span = c.get("attn_scale", float, 0.1), c.get("floor_scale", int, 8192)
    return Temper(scale, span, offset=1.0, rotated=False)
