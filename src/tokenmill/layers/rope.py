"""Rotary embeddings. Owns: every frequency scaling, and the tables, one per distinct setting.

Reads both spellings of config files: `rope_parameters` (possibly nested per layer type), and `rope_theta` with
`rope_scaling`. Scalings that depend on the length of the run (dynamic, longrope) are fixed by `max_positions`, so
that a cached key never changes its meaning. Knows nothing of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import RopeSpec
from tokenmill.core.errors import ModelError, shown
from tokenmill.core.yarn import yarn_gain
from tokenmill.layers.build import Build

_NAMES = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "finetuned"),
    }
)
"""Every known name in an object of rope settings."""

_MOST_ROTATED = 1 << 14
"""The most entries of a head that may rotate: far more than any model has, and the table can still be made."""


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """What a config says about rotation, in one spelling. `values` holds the scaling's own numbers."""

    kind: str
    theta: float
    dim: int
    max_positions: int
    original_positions: int
    values: tuple[tuple[str, Any], ...]

    def value(self, name: str, default: float | None = None) -> float:
        """One number of the scaling."""
        found = dict(self.values).get(name)
        if found is None and default is None:
            raise ModelError(f"config.json: the rope scaling '{self.kind}' needs '{name}'.")
        return _number(name, default if found is None else found)

    def factors(self, name: str) -> Tensor:
        """One list of the scaling, dim / 2 numbers."""
        found = dict(self.values).get(name)
        if not isinstance(found, tuple) or len(found) != self.dim // 2:
            raise ModelError(f"config.json: '{name}' of the rope scaling must list {self.dim // 2} numbers.")
        return torch.tensor([_number(name, value) for value in found], dtype=torch.float32)


def rope_settings(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    layer_type: str | None = None,
    theta: float = 10000.0,
    also: tuple[str, ...] = (),
) -> RopeSettings:
    """Read both spellings into one; if a config has both, the older one counts. `theta` is the family's default base;
    `also` are names that only this family reads."""
    values = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    if any(isinstance(value, dict) for value in values.values()):
        if layer_type is None:
            raise ModelError("config.json: 'rope_parameters' by kind of layer are not supported in this architecture.")
        values = _object(values, layer_type)
    kind = str(values.get("rope_type") or values.get("type") or "default")
    _check_names(kind, values, also)
    longest = _number("max_position_embeddings", config.get("max_position_embeddings") or 2048, low=1)
    name = "original_max_position_embeddings"
    # A zero is not absent: it is out of bounds, or leaves nothing that rotates, and is refused by its name.
    partial = _said(values.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
    if kind == "proportional":
        values = {**values, "partial_rotary_factor": partial}
    return RopeSettings(
        kind={"su": "longrope", "deepseek_yarn": "yarn"}.get(kind, kind),
        theta=_number("rope_theta", _said(values.get("rope_theta"), config.get("rope_theta"), theta), low=1.0),
        dim=head_dim if kind == "proportional" else int(head_dim * _number("partial_rotary_factor", partial, high=1.0)),
        max_positions=int(longest),
        original_positions=int(_number(name, _said(config.get(name), values.get(name), longest), low=2)),
        values=tuple(sorted((k, _frozen(v)) for k, v in values.items())),
    )


def _said(*values: Any) -> Any:
    """The first of these that is not null."""
    return next((value for value in values if value is not None), None)


def _check_names(kind: str, values: Mapping[str, Any], also: tuple[str, ...]) -> None:
    """Refuse unknown names: everything in this object is about rotation, so nothing may be dropped."""
    for name, value in values.items():
        if name not in _NAMES and name not in also and value is not None:
            raise ModelError(f"config.json: {name!r} of the rope scaling is not supported.")
    if kind == "default" and values.get("factor") not in (None, 1, 1.0):
        raise ModelError("config.json: the rope scaling has a 'factor' but no 'rope_type'.")


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise ModelError(f"config.json: '{name}' must be an object, not {shown(found)}.")
    return found


def _number(name: str, value: Any, *, low: float = 0.0, high: float = 1e12) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelError(f"config.json: '{name}' must be a number from {low:g} to {high:g}, not {shown(value)}.")
    return float(value)


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, so that settings can be keys; objects have no meaning here."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else None if isinstance(value, dict) else value


def make_rope(b: Build, settings: RopeSettings, *, interleaved: bool = False, start: int = 0) -> RopeSpec:
    """The tables for these settings; equal ones are shared within a model."""
    key = (settings, interleaved, start)
    if key not in b.book.ropes:
        inverse, gain = frequencies(settings, b.max_positions)
        where = b.device if b.device.type == "meta" else "cpu"
        angle = torch.arange(b.max_positions, dtype=torch.float32, device=where)[:, None] * inverse.to(where)
        # cos and sin in double: rounded once, they do not depend on how torch splits the table among threads.
        cos, sin = (angle.double().cos() * gain).float(), (angle.double().sin() * gain).float()
        b.book.ropes[key] = RopeSpec(cos.to(b.device), sin.to(b.device), settings.dim, interleaved, start)
    return b.book.ropes[key]


def frequencies(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the gain on cos and sin, for a run of that many positions."""
    if settings.dim > _MOST_ROTATED:
        raise ModelError(f"config.json: heads of {settings.dim} numbers are more than can rotate ({_MOST_ROTATED}).")
    if settings.dim % 2 or settings.dim < 2:
        raise ModelError(
            f"config.json: rotary embeddings need an even number of dimensions, not {settings.dim}: see 'head_dim' (or "
            "'hidden_size' / 'num_attention_heads') and 'partial_rotary_factor'."
        )
    if settings.kind not in _SCALINGS:
        raise ModelError(f"config.json: rope type '{settings.kind}' is not supported. Known: {', '.join(_SCALINGS)}.")
    try:
        inverse, gain = _SCALINGS[settings.kind](settings, positions)
        usable = bool(torch.isfinite(inverse).all()) and math.isfinite(gain)
    except ModelError:
        raise
    except (ArithmeticError, ValueError):
        usable = False
    if not usable:
        raise ModelError(f"config.json: the values of the rope scaling '{settings.kind}' give no usable frequencies.")
    return inverse, gain


def attention_gain(settings: RopeSettings) -> float:
    """The factor on the softmax scale that `mscale_all_dim` asks for (DeepSeek), else 1."""
    everywhere = settings.value("mscale_all_dim", 0.0)
    if settings.kind == "default" or not everywhere:
        return 1.0
    return yarn_gain(_factor(settings), everywhere) ** 2


def _base(settings: RopeSettings, theta: float | None = None) -> Tensor:
    exponent = torch.arange(0, settings.dim, 2, dtype=torch.int64).float() / settings.dim
    return 1.0 / ((settings.theta if theta is None else theta) ** exponent)


def _default(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    return _base(settings), 1.0


def _linear(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    return _base(settings) / settings.value("factor"), 1.0


def _dynamic(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    factor, dim = settings.value("factor"), settings.dim
    length = max(positions, settings.max_positions)
    stretch = (factor * length / settings.max_positions) - (factor - 1)
    return _base(settings, settings.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    low, high = settings.value("low_freq_factor"), settings.value("high_freq_factor")
    factor, original = settings.value("factor"), settings.original_positions
    inverse = _base(settings)
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled), 1.0


def _yarn(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    factor, dim = _factor(settings), settings.dim
    gain = _stated_gain(settings)
    if gain is None:
        mscale, everywhere = settings.value("mscale", 0.0), settings.value("mscale_all_dim", 0.0)
        gain = yarn_gain(factor, mscale) / yarn_gain(factor, everywhere) if mscale and everywhere else yarn_gain(factor)

    def correction(rotations: float) -> float:
        spread = math.log(settings.original_positions / (rotations * 2 * math.pi))
        return dim * spread / (2 * math.log(settings.theta))

    low = correction(settings.value("beta_fast", 32.0) or 32.0)
    high = correction(settings.value("beta_slow", 1.0) or 1.0)
    if dict(settings.values).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    inverse = _base(settings)
    return inverse / factor * (1 - keep) + inverse * keep, gain


def _longrope(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    factor = _factor(settings)
    gain = _stated_gain(settings)
    if gain is None:
        gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(settings.original_positions))
    which = "long" if positions > settings.original_positions else "short"
    gain = settings.value(f"{which}_mscale", gain)
    return _base(settings) / settings.factors(f"{which}_factor"), gain


def _proportional(settings: RopeSettings, positions: int) -> tuple[Tensor, float]:
    """The slowest pairs of a head stand still."""
    share = _number("partial_rotary_factor", settings.value("partial_rotary_factor", 1.0), high=1.0)
    turning = int(share * settings.dim // 2)
    inverse = _base(settings)
    inverse[turning:] = 0.0
    return inverse / settings.value("factor", 1.0), 1.0


def _stated_gain(settings: RopeSettings) -> float | None:
    """The gain on cos and sin, if the config states it. With a zero, attention would not see positions or content."""
    stated = dict(settings.values).get("attention_factor")
    return None if stated is None else _number("attention_factor", stated, low=1e-6)


def _factor(settings: RopeSettings) -> float:
    return settings.value("factor", settings.max_positions / settings.original_positions)


_SCALINGS: dict[str, Callable[[RopeSettings, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
