"""What --hf-overrides make of a config. Owns: values that have two names or two places, of which the given one counts.

Must not know: how configs are read, families, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.models.text_part import OUTER_KEYS, outer_of

_ROTATION = ("rope_scaling", "rope_parameters")
"""Two spellings of the settings of rotation."""
_BASE = ("rope_theta", "partial_rotary_factor")
"""What lies in these settings or beside them."""
_SAME = {"dtype": "torch_dtype", "torch_dtype": "dtype"}


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these keys replaced. Keys of a text part may be given within `text_config` or beside it."""
    inner = config.get("text_config")
    if outer_of({**config, **overrides}) is None or not isinstance(inner, Mapping):
        return _replaced(config, overrides)
    given = overrides.get("text_config")
    beside = {key: value for key, value in overrides.items() if key not in OUTER_KEYS}
    inner = _replaced(inner, {**beside, **(given if isinstance(given, Mapping) else {})})
    outside = {key: value for key, value in overrides.items() if key in OUTER_KEYS}
    return {**_replaced(config, outside), "text_config": inner}


def _replaced(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    gone = {_SAME[key] for key in given if key in _SAME and _SAME[key] not in given}
    found = {**{key: value for key, value in config.items() if key not in gone}, **given}
    stated = next((said for name in _ROTATION if isinstance(said := config.get(name), Mapping) and said), {})
    by_layer = any(isinstance(value, Mapping) for value in stated.values())
    if by_layer:
        _check_layers(stated, given)
    elif any(name in given for name in _ROTATION):
        found.update(_settings(stated, given))
    elif stated:
        changed = {key: given[key] for key in _BASE if key in given and key in stated}
        name = next(name for name in _ROTATION if config.get(name))
        found[name] = {**stated, **changed}
    return found


def _settings(stated: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings alone, in their spelling. What they do not say of the base stays."""
    name = next((name for name in _ROTATION if given.get(name)), None)
    base = {key: stated[key] for key in _BASE if key in stated and key not in given}
    if name is None:
        return {"rope_scaling": None, "rope_parameters": {"rope_type": "default", **base} if base else None}
    said = given[name]
    flat = isinstance(said, Mapping) and not any(isinstance(value, Mapping) for value in said.values())
    return {**dict.fromkeys(_ROTATION), **given, name: {**base, **said} if flat else said}


def _check_layers(stated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A base beside settings for each kind of layer would not count."""
    inside = {key for said in stated.values() if isinstance(said, Mapping) for key in said}
    for key in (*_BASE, "rope_local_base_freq") if not given.get("rope_parameters") else ():
        if given.get(key) is not None and key.replace("rope_local_base_freq", "rope_theta") in inside:
            raise ParameterError(
                f"--hf-overrides: {key!r} has no effect here, because this model's 'rope_parameters' say it for each "
                "kind of layer: give 'rope_parameters'.",
                param="hf_overrides",
            )
