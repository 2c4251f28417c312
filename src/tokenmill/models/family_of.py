"""Which family a config.json is of. Owns: reading `architectures` and `model_type` together, and the words for a config
that names none.

Files name an architecture and a type, and the two may differ: Transformers computes some types with a class that it
shares among several and writes that class's name; people leave the name out, misspell it, or store a body without its
head. Must not know: how a family is built, tensors.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ModelError, shown
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.multimodal import OUTERS, TEXTS
from tokenmill.models.text_part import outer_of

NOTE = "_tokenmill_note"
"""Key of a settled config: how its family was found, if the file does not name it outright."""
BODY = "_tokenmill_body"
"""Key of a settled config: the file describes a body without a head."""
BY_TYPE = {row.model_type: name for name, row in FIELDS.items()}
SAME = {"gpt-sw3": "gpt2", "kimi_k2": "deepseek_v3", "minimax_m1": "minimax", "minimax_text_01": "minimax"}
"""Model types that are the same as another type."""
SHARED = {
    **dict.fromkeys(("exaone", "internlm3", "iquestcoder"), "LlamaForCausalLM"),
    "sarvam_mla": "DeepseekV3ForCausalLM",
    "sarvam_moe": "Glm4MoeForCausalLM",
}
"""Model types -> the class with which Transformers computes them; their folders name this class."""
NAMES = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    **dict.fromkeys(("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), "MiniMaxForCausalLM"),
}
"""What published files call a class of Transformers."""
_OUTER_TYPES = {outer.model_type: outer.text for outer in OUTERS.values()}
_HEAD = re.compile(r"(ForCausalLM|LMHeadModel)$", re.IGNORECASE)
_OTHER_TASK = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|MaskedLM|PreTraining|Reward\w*|"
    r"NextSentencePrediction|\w*Classification|\w*Embedding|\w*Retrieval)$|(RewardModel|DoubleHeadsModel)$"
)
_ALIKE = 0.9
"""How similar a misspelt name must be: LlamaForCausalLMEagle is another model."""


def names_of(config: Mapping[str, Any]) -> list[str]:
    """The architectures that a config names."""
    listed = config.get("architectures")
    listed = [listed] if isinstance(listed, str) else listed
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def type_of(config: Mapping[str, Any]) -> str | None:
    """The model type, in the spelling of its family."""
    kind = config.get("model_type")
    return SAME.get(kind, kind) if isinstance(kind, str) else None


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its family as the only architecture; unchanged if no family is found."""
    found = dict(config)
    named = config.get("architectures")
    if outer_of(config) is not None or NOTE in config or not isinstance(named, list | str | None):
        return found
    names, kind = names_of(config), type_of(config)
    family, note = _by_name(names, kind)
    if family is None and (names or not config.get("auto_map")):
        family, note = _by_type(names, kind, 1.0 if config.get("auto_map") else _ALIKE)
    if family is None:
        return found
    body = BODY in config or (family not in names and any(_is_body(name, family, kind) for name in names))
    if note:
        found[NOTE] = note
    if family not in names or kind == FIELDS[family].model_type:
        found["model_type"] = FIELDS[family].model_type
    found["architectures"] = [family]
    return {**found, BODY: True} if body else found


def _by_name(names: list[str], kind: str | None) -> tuple[str | None, str]:
    """The family that is named, unless that class is known to compute this other type as well."""
    known = next((NAMES.get(name, name) for name in names if NAMES.get(name, name) in FIELDS), None)
    if known is None:
        return None, ""
    if kind in BY_TYPE and SHARED.get(kind) == known:
        return BY_TYPE[kind], f"model_type {kind!r} is read as {BY_TYPE[kind]}: {known} computes several types"
    strange = kind is not None and not _is_of(kind, known) and kind not in BY_TYPE
    return known, f"model_type {kind!r} is not known here: read as {known}" if strange else ""


def _is_of(kind: str, family: str) -> bool:
    """Is this type the family's own, or that of a model around it?"""
    own = FIELDS[family].model_type
    text = TEXTS.get(kind)
    return own in (kind, f"{kind}_text", _OUTER_TYPES.get(kind)) or (text is not None and text.architecture == family)


def _by_type(names: list[str], kind: str | None, alike: float) -> tuple[str | None, str]:
    """The family of the type, if the name is absent, misspelt, or the name of the body alone. alike: how similar a
    misspelt name must be, as a share. (A model with code of its own has a name of its own.)"""
    typed = BY_TYPE.get(kind or "")
    if typed is None and kind is None:
        typed = next((family for family in FIELDS if any(_is_body(name, family, None) for name in names)), None)
    if typed is None:
        return None, ""
    if not names:
        return typed, f"config.json names no architecture: model_type {kind!r} is {typed}"
    for name in names:
        if _is_body(name, typed, kind):
            return typed, f"{name} is {typed} without its head: it gives vectors, and no text"
        near = difflib.SequenceMatcher(None, _plain(name), _plain(typed)).ratio()
        if near >= alike and not _OTHER_TASK.search(name):
            return typed, f"architecture {name!r} is not known: model_type {kind!r} is {typed}"
    return None, ""


def _is_body(name: str, family: str, kind: str | None) -> bool:
    """Is this the name of the family's layers without their head?"""
    stems = {_HEAD.sub("", one) for one in (family, SHARED.get(kind or "", family))}
    return _plain(name) in {_plain(stem + end) for stem in stems for end in ("Model", "TextModel")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_ours(config: Mapping[str, Any]) -> bool:
    """Is a settled config, as far as known, of a family that is built here? If another type stands beside a class's
    name, Transformers may compute that type with the class but read its config differently."""
    names, kind = names_of(config), type_of(config)
    known = next((name for name in names if name in FIELDS), None)
    return known is not None and (kind is None or kind in BY_TYPE or _is_of(kind, known))


def has_other_task(config: Mapping[str, Any]) -> bool:
    """Do all named architectures have a head for something other than next tokens?"""
    names = names_of(config)
    return bool(names) and all(_OTHER_TASK.search(name) for name in names)


def can_elsewhere(config: Mapping[str, Any]) -> bool:
    """Does the installed Transformers have a causal model of this type?"""
    return bool(importlib.import_module("tokenmill.models.foreign").can_build(config))


def architecture_of(config: Mapping[str, Any]) -> str:
    """The family of a settled config, or a sentence that says why there is none."""
    listed = config.get("architectures")
    if not isinstance(listed, list | str | None):
        raise ModelError(f"config.json: 'architectures' must be a list, not {shown(listed)}.")
    names = names_of(config)
    for name in names:
        if name in FIELDS:
            return name
    raise ModelError(_unknown(config, names))


def _unknown(config: Mapping[str, Any], names: list[str]) -> str:
    kind = config.get("model_type")
    if not names and not isinstance(kind, str):
        return (
            "config.json names no architecture and no model_type: say what it is, like "
            '--hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\'.'
        )
    named = ", ".join(names) or str(kind)
    if config.get("auto_map"):
        return (
            f"Architecture '{named}' comes with its own Python code (auto_map in config.json), and remote code is "
            "never run."
        )
    if has_other_task(config):
        return f"Architecture '{named}' has a head for something else than next tokens: only language models are built."
    first = (names or [named])[0]
    close = nearest(first, 0.75) or BY_TYPE.get(str(kind)) or nearest(first)
    hint = f" (the nearest that is: {close})" if close else ""
    head = f"Architecture '{named}' is not built here{hint}"
    if importlib.util.find_spec("transformers") is None:
        return f"{head}; with Transformers installed, --model-impl transformers may run it, more slowly."
    if can_elsewhere(config):
        return f"{head}; --model-impl transformers runs it through Transformers, more slowly."
    lacks = f"model_type {kind!r}" if isinstance(kind, str) else "no model_type to find it by"
    return f"{head}, nor can --model-impl transformers run it: the installed Transformers has no causal {lacks}."


def nearest(name: str, alike: float = 0.5) -> str | None:
    """The known architecture with the most similar name, if any is similar enough."""
    short = {known.removesuffix("ForCausalLM").lower(): known for known in FIELDS}
    wanted = re.sub(r"(For\w+|LMHeadModel|Model)$", "", name).lower()
    found = difflib.get_close_matches(wanted, short, n=1, cutoff=alike)
    return short[found[0]] if found else None
