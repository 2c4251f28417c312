"""The text part of a model that also sees or hears. Owns: its config as the family that it is would have it.

Positions that have three parts are plain ones where all three are equal, as they are in text. What belongs to the
other parts is not read. Must not know: how families are built, tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenmill.core.errors import ModelError, shown
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.multimodal import OUTERS, TEXTS, Outer, Text

TEXT_OF = "_text_of"
"""A key in the config of a text part: the architecture from which it was taken."""
_SAID_OUTSIDE = ("quantization_config", "compression_config", "auto_map")
"""Settings of the whole file that also concern the text part."""
OUTER_KEYS = ("architectures", "model_type", "text_config", "vision_config", "audio_config", "tie_word_embeddings",
          "dtype", "torch_dtype", *_SAID_OUTSIDE)  # fmt: skip
_ALSO = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Two names for the same key."""
_PARTS = ("mrope_section", "mrope_interleaved", "interleaved")
"""How positions with three parts are distributed among pairs. It has no effect if the three parts are equal."""


def outer_of(config: Mapping[str, Any]) -> str | None:
    """The architecture around a text part, if this config names one."""
    names = config.get("architectures")
    return (
        next((name for name in names if isinstance(name, str) and name in OUTERS), None)
        if isinstance(names, list)
        else None
    )


def unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its text part where most files have it. Qwen's Omni models have a second part with words, which
    speaks, and an object for each."""
    name = outer_of(config)
    within = OUTERS[name].within if name is not None else ""
    part = config.get(within)
    if not within or not isinstance(part, Mapping):
        return dict(config)
    beside = {key: value for key, value in config.items() if key != within}
    return {**{key: value for key, value in part.items() if key != "architectures"}, **beside}


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text part in the form of its family. Any other config is returned as it is."""
    config, name = unwrapped(config), outer_of(config)
    if name is None:
        return _plain_positions(config)
    outer, inner = OUTERS[name], config.get("text_config")
    if inner is None and outer.flat:
        inner = {key: value for key, value in config.items() if key not in (*OUTER_KEYS, *outer.own)}
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: {name} needs an object 'text_config', not {shown(inner)}.")
    inner = {**outer.absent, **inner}
    kind = inner.get("model_type") or outer.text
    text = TEXTS.get(kind) if isinstance(kind, str) else None
    if text is None:
        raise ModelError(
            f"config.json: the text part of this {name} is of the kind {shown(kind)}, which is not supported here. "
            f"Known: {', '.join(sorted(TEXTS))}."
        )
    _check_type(config, name, outer)
    _check_outside(config, inner, outer)
    _check_fixed(inner, kind, text)
    absent = {key: value for key, value in text.defaults.items() if inner.get(_ALSO.get(key, key)) is None}
    unread = {"architectures", "auto_map", *(key for key in text.fixed if inner.get(key) is None)}
    found = {**absent, **{key: value for key, value in inner.items() if key not in unread}}
    found.update({key: config[key] for key in _SAID_OUTSIDE if config.get(key) is not None})
    dtype = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype")
    if dtype is not None:
        found["dtype"] = dtype
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    if tied is None:
        found.pop("tie_word_embeddings", None)  # the tensors show it: see `settle_tie`
    else:
        found["tie_word_embeddings"] = tied
    found.update(architectures=[text.architecture], model_type=kind)
    return {**_plain_positions(found), "model_type": FIELDS[text.architecture].model_type, TEXT_OF: name}


def settle_tie(config: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Decide whether the head shares the embedding's matrix, if the file of a text part does not say: it does if no
    head is stored."""
    stored = set(names)
    if TEXT_OF not in config or "tie_word_embeddings" in config or not stored:
        return config
    return {**config, "tie_word_embeddings": not any(name.startswith("lm_head.") for name in stored)}


def _check_type(config: Mapping[str, Any], name: str, outer: Outer) -> None:
    kind = config.get("model_type")
    if kind is not None and kind != outer.model_type:
        raise ModelError(f"config.json: architecture '{name}' and model_type {shown(kind)} contradict each other.")


def _check_fixed(inner: Mapping[str, Any], kind: str, text: Text) -> None:
    for key, values in text.fixed.items():
        value = inner.get(key)
        heads = inner.get("num_attention_heads")
        if key == "head_dim" and isinstance(value, int) and isinstance(heads, int):
            if value and value * heads == inner.get("hidden_size"):
                continue
        if value is not None and value not in values:
            raise ModelError(f"config.json: 'text_config.{key}' = {repr(value)[:80]} is not read in {kind}.")


def _check_outside(config: Mapping[str, Any], inner: Mapping[str, Any], outer: Outer) -> None:
    """Refuse keys beside the text part that look as if they should be read, because they are not."""
    for key, value in config.items():
        if value is None or key in OUTER_KEYS or key in inner or key in outer.own or _APART.search(key):
            continue
        if _CHANGES.search(key) and value not in (False, 0, 1, "", [], {}):
            raise ModelError(
                f"config.json: '{key}' = {repr(value)[:80]} lies beside 'text_config' and is not read there; if it is "
                f"a leftover, load with --hf-overrides '{{\"{key}\": null}}'."
            )


_APART = re.compile(r"image|vision|visual|video|audio|speech|projector|perceiver|(^|_)mm_|^bo[ia]_|^eo[ia]_")
"""Names of settings that belong to image and audio parts."""
_CHANGES = re.compile(r"rope|rotary|window|cap(ping)?$|multiplier|(^|_)scal(e|es|ing)(_|$)|norm|sink|logit_|clip")


def _plain_positions(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without the distribution of three-part positions, in families that have it."""
    if not re.fullmatch(
        r"(qwen2(_5)?_(vl|omni)|qwen3_(vl|omni)(_moe)?|qwen3_5(_moe)?|glm4v(_moe)?|glm_ocr|hy_v4_vl)(_text)?",
        str(config.get("model_type")),
    ):
        return config
    for name in ("rope_scaling", "rope_parameters"):
        said = config.get(name)
        if isinstance(said, Mapping) and (any(part in said for part in _PARTS) or "mrope" in said.values()):
            kept = {key: value for key, value in said.items() if key not in _PARTS}
            kept.update({key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"})
            config = {**config, name: kept}
    return config
