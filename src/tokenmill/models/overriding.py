"""What --hf-overrides make of a config. Owns: values that have two names or two places, of which the given one counts.

Must not know: how configs are read, families, tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.models.text_part import OUTER_KEYS, outer_of, unwrapped

_ROTATION = ("rope_scaling", "rope_parameters")
"""Two spellings of the settings of rotation."""
_BASE = ("rope_theta", "partial_rotary_factor")
"""What lies in these settings or beside them."""
_NEOX = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""Names of these two in files of GPT-NeoX."""
_LISTS = {
    "layer_types": ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval",
                    "max_window_layers", "global_attn_every_n_layers", "full_attn_idxs", "attn_layer_indices",
                    "prefix_dense_sliding_window_pattern"),
    "no_rope_layers": ("no_rope_layer_interval",),
    "moe_layers": ("interleave_moe_layer_step",),
    "mlp_layer_types": ("first_k_dense_replace",),
    "layers_block_type": ("hybrid_override_pattern",),
}  # fmt: skip
"""Lists that say something of each layer, and the rules for all layers that do not count beside them."""
_SAME = {"dtype": "torch_dtype", "torch_dtype": "dtype"}


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these keys replaced. Keys of a text part may be given within `text_config` or beside it."""
    config = unwrapped(config)
    inner = config.get("text_config")
    if outer_of({**config, **overrides}) is None or not isinstance(inner, Mapping):
        return _replaced(config, overrides)
    given = overrides.get("text_config")
    beside = {key: value for key, value in overrides.items() if key not in OUTER_KEYS}
    inner = _replaced(inner, {**beside, **(given if isinstance(given, Mapping) else {})})
    outside = {key: value for key, value in overrides.items() if key in OUTER_KEYS}
    return {**_replaced(config, outside), "text_config": inner}


def _replaced(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    _check_lists(config, given)
    gone = {_SAME[key] for key in given if key in _SAME and _SAME[key] not in given}
    found = {**{key: value for key, value in config.items() if key not in gone}, **given}
    stated = next((said for name in _ROTATION if isinstance(said := config.get(name), Mapping) and said), {})
    by_layer = any(isinstance(value, Mapping) for value in stated.values())
    if by_layer:
        _check_layers(stated, given)
    elif any(name in given for name in _ROTATION):
        found.update(_settings(stated, given))
    elif stated:
        said = {**{name: given[key] for key, name in _NEOX.items() if key in given}, **given}
        changed = {key: said[key] for key in _BASE if key in said and key in stated}
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


def _check_lists(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A rule beside a list of the file would not count."""
    void = [(key, name) for name, keys in _LISTS.items() if config.get(name) and name not in given for key in keys]
    if config.get("model_type") == "nemotron_h":
        lists = ("layer_types", "layers_block_type", "hybrid_override_pattern")
        void += [("num_hidden_layers", name) for name in lists if config.get(name) and not given.keys() & set(lists)]
    for key, name in void:
        if key in given and given[key] != config.get(key):
            raise ParameterError(
                f"--hf-overrides: {key!r} has no effect here, because this model's {name!r} says it for each layer: "
                f"give {name!r}.",
                param="hf_overrides",
            )


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
