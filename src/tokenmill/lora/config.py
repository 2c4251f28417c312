"""What adapter_config.json says. Owns: reading it strictly: a key that changes a result is obeyed or refused by name.

Must not know: tensors, models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.core.files import present, read_object

FILE = "adapter_config.json"
MOST_RANK = 1024
"""Largest rank. It is twice the usual limit, because PEFT doubles ranks where experts join gate_proj and up_proj."""
_MAX_BYTES = 4 << 20
_MOST_PATTERNS = 4096
_MOST_PATTERN_CHARS = 512

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("layer_replication", "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "velora_config"),
        (None, [], {}),
    ),
    **dict.fromkeys(("monteclora_config", "megatron_config"), (None, [], {})),
    "use_qalora": (False, None),
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
}
"""Keys that change what an adapter computes, with their neutral values; other values are refused."""
_READ = frozenset(
    {
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "target_modules"),
        *("modules_to_save", "bias", "fan_in_fan_out", "init_lora_weights", "lora_bias", "target_parameters"),
        *("base_model_name_or_path", "ensure_weight_tying", "trainable_token_indices"),
    }
)
_OF_TRAINING = frozenset(
    {
        *("lora_dropout", "inference_mode", "revision", "auto_mapping", "peft_version", "runtime_config"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size", "use_rslora_init", "merge_weights"),
        *("enable_lora", "base_model_class", "parent_library", "unsloth_fixed", "torch_dtype", "dtype"),
    }
)
"""Keys about training, or about which modules have an adapter, which the file's tensors show anyway."""
MAGNITUDE, BIAS = "lora_magnitude_vector", "lora_B.bias"
_BESIDE = {"use_dora": MAGNITUDE, "lora_bias": BIAS}
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's published weights."""


@dataclass(frozen=True)
class AdapterConfig:
    """r and alpha with exceptions by pattern, and what else matters."""

    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rooted: bool = False
    """Rank-stabilised: the scale is alpha / sqrt(r) instead of alpha / r."""
    beside: frozenset[str] = frozenset()
    """What each module has besides its matrices: DoRA's magnitudes, a bias of lora_B."""
    transposed: bool = False
    saved: tuple[str, ...] = ()
    """Modules that are stored completely."""
    parameters: tuple[str, ...] = ()
    """Stacked parameters of experts that have adapters, in the order in which wrappers lie."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name of embeddings or head ("": the embeddings), the tokens whose rows are stored."""
    base: str = ""
    targets: tuple[str, ...] = ()
    """The modules that target_modules lists by name."""

    def rank_of(self, module: str) -> int:
        """The rank that a module's tensors must have."""
        return int(_found(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """What a module's product is multiplied by."""
        alpha = _found(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rooted else alpha / rank


def read_adapter_config(folder: Path) -> AdapterConfig:
    """A folder's adapter_config.json; raises ModelError that names the file and the key."""
    file = folder / FILE
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: is not a folder; an adapter is PEFT's folder (with {FILE}), or a GGUF file (.gguf)"
        )
    if not present(file):
        raise ModelError(f"{folder}: has no {FILE}; an adapter is PEFT's folder with it, or a GGUF file (.gguf)")
    data = read_object(file, _MAX_BYTES)
    for name, neutral in _NEUTRAL.items():
        value = data.get(name, neutral[0])
        if not any(type(value) is type(each) and value == each for each in neutral):
            raise ModelError(f"{file}: {name} = {_shown(value)} is not supported.")
    for name in data:
        if name not in _READ and name not in _OF_TRAINING and name not in _NEUTRAL and data[name] not in (None, False):
            raise ModelError(f"{file}: {_shown(name)} is not known, and may change what the adapter computes.")
    reader = _Reader(file, data)
    started = data.get("init_lora_weights", True)
    if isinstance(started, str) and started.lower().startswith(_BASE_CHANGED):
        raise ModelError(
            f"{file}: init_lora_weights = {_shown(started)} changed the base model's weights in training: convert the "
            "adapter with PEFT's path_initial_model_for_weight_conversion, or merge it."
        )
    saved = reader.names("modules_to_save")
    if reader.flag("ensure_weight_tying") and saved:
        raise ModelError(f"{file}: ensure_weight_tying together with modules_to_save is not supported.")
    bias = data.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise ModelError(f"{file}: bias = {_shown(bias)} is not supported.")
    target = data.get("target_modules")
    if isinstance(target, str) and target != "all-linear":
        _compiled(file, "target_modules", target, matched=False)
    return AdapterConfig(
        rank=reader.whole("r", 8),
        alpha=reader.number("lora_alpha", 8),
        ranks={k: reader.rank("rank_pattern", v) for k, v in reader.patterns("rank_pattern").items()},
        alphas={k: reader.real("alpha_pattern", v) for k, v in reader.patterns("alpha_pattern").items()},
        rooted=reader.flag("use_rslora"),
        beside=frozenset(name for flag, name in _BESIDE.items() if reader.flag(flag)),
        transposed=reader.flag("fan_in_fan_out"),
        saved=saved,
        parameters=reader.names("target_parameters"),
        tokens=reader.tokens("trainable_token_indices"),
        base=str(data.get("base_model_name_or_path") or "")[:512],
        targets=() if isinstance(target, str) else reader.names("target_modules"),
    )


class _Reader:
    """Values of one file, by type."""

    def __init__(self, file: Path, data: Mapping[str, Any]) -> None:
        self.file, self.data = file, data

    def flag(self, name: str) -> bool:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return bool(value)

    def whole(self, name: str, default: int) -> int:
        return self.rank(name, self.data.get(name, default))

    def rank(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANK:
            raise self._bad(name, f"a whole number from 1 to {MOST_RANK}", value)
        return value

    def number(self, name: str, default: float) -> float:
        return self.real(name, self.data.get(name, default))

    def real(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
            raise self._bad(name, "a number", value)
        return float(value)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.data.get(name)
        if value is None:
            return ()
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._bad(name, "a list of names", value)
        return tuple(value)

    def tokens(self, name: str) -> dict[str, tuple[int, ...]]:
        value = self.data.get(name) or {}
        found = value if isinstance(value, dict) else {"": value}
        for ids in found.values():
            whole = isinstance(ids, list) and all(type(each) is int and each >= 0 for each in ids)
            if not whole or not ids or len(set(ids)) < len(ids):
                raise self._bad(name, "a list of different tokens, or such lists by module", value)
        return {module: tuple(ids) for module, ids in found.items()}

    def patterns(self, name: str) -> dict[str, Any]:
        value = self.data.get(name) or {}
        if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
            raise self._bad(name, f"an object of at most {_MOST_PATTERNS} patterns", value)
        for pattern in value:
            _compiled(self.file, name, pattern)
        return value

    def _bad(self, name: str, wanted: str, value: Any = None) -> ModelError:
        value = self.data.get(name) if value is None else value
        return ModelError(f"{self.file}: {name} must be {wanted}, not {_shown(value)}.")


_NESTED = re.compile(r"[*+}]\)?[*+{]|\)[*+{]")
"""Repetitions of repetitions and of groups: matching such a pattern may never end."""
_REPEATED = re.compile(r"(?<!\\)[*+{]")
_OPTIONAL = re.compile(r"(?<![\\(*+}?])\?")
_GROUP = re.compile(r"\((?:\?[:=!])?([^()]*)\)")
_MOST_REPEATED = 4
"""Most repetitions in a pattern: each multiplies the matching time by the length of a name."""
_MOST_WAYS = 1 << 16
_MOST_STEPS = 1 << 24
"""Of matching one name: a tenth of a second, in which nothing else of the process runs."""


def _compiled(file: Path, name: str, pattern: str, *, matched: bool = True) -> None:
    """Refuse a pattern that cannot be read, or whose matching might never end."""
    deep = matched and (
        _NESTED.search(pattern) or len(_REPEATED.findall(pattern)) > _MOST_REPEATED or _ways(pattern) > _MOST_WAYS
    )
    if deep or len(pattern) > (_MOST_PATTERN_CHARS if matched else _MAX_BYTES):
        raise ModelError(f"{file}: {name} holds a pattern that is too long or too deep: {_shown(pattern)}.")
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise ModelError(f"{file}: {name} holds a pattern that cannot be read: {_shown(pattern)}.") from error


def _ways(pattern: str) -> int:
    """In how many ways options and alternatives can be chosen, at most; of alternatives that begin with different
    letters one alone can fit."""
    ways = 1 << min(len(_OPTIONAL.findall(pattern)) + _GROUP.sub("", pattern).count("|"), 64)
    for inner in _GROUP.findall(pattern):
        firsts = [each[:1] for each in inner.split("|")]
        ways *= max(map(firsts.count, firsts)) if all(map(str.isalnum, firsts)) else len(firsts)
    return ways


def _found(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The first pattern that a module's name ends with, or its default."""
    for pattern, value in patterns.items():
        if module == pattern or module.endswith("." + pattern):
            return value
        if _SIMPLE.fullmatch(pattern):
            continue
        repeated = len(_REPEATED.findall(pattern))
        if _ways(pattern) * math.comb(len(module) + repeated, repeated) * (module.count(".") + 1) > _MOST_STEPS:
            raise ModelError(f"{FILE}: the pattern {_shown(pattern)} is too deep to be matched with {_shown(module)}.")
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


_SIMPLE = re.compile(r"[A-Za-z0-9_.]*")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
