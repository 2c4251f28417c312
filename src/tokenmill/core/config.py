"""Configuration. Owns: frozen option groups, the one mapping from flat names to them, and the environment mirror.

CLI flags, LLM keyword arguments, environment variables and docs are generated from these fields: the flag of
`max_model_len` is --max-model-len, its variable TOKENMILL_MAX_MODEL_LEN. Nothing else in the package reads the
environment. Options are never patched: resolving makes new objects and keeps reasons.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, get_type_hints

from tokenmill.core.errors import ParameterError


def option(default: Any, help: str, *aliases: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with its help text, other spellings and allowed values."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how its weights are read."""

    model: str = option("demo", "Folder, .gguf file, hub name, or `demo`.")
    tokenizer: str | None = option(None, "Folder or hub name of the tokenizer, if it is not the model's.")
    dtype: str = option("auto", "Compute type.", choices=("auto", "float32", "bfloat16", "float16", "float", "half"))
    load_format: str = option(
        "auto", "Where weights come from; `dummy` invents them.", choices=("auto", "safetensors", "pt", "dummy")
    )
    quantization: str | None = option(None, "Quantise the weights at load.")
    max_model_len: int | None = option(None, "Longest prompt + output in tokens (default: the model's, if it fits).")
    skip_tokenizer_init: bool = option(False, "Token ids in, token ids out.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    hf_overrides: dict[str, Any] | None = option(None, "Entries that replace those of config.json (JSON).")
    seed: int = option(0, "Seed for dummy weights, and for requests without a seed when given.")
    trust_remote_code: bool = option(False, "Accepted for compatibility; code from model folders is never run.")
    served_model_name: str | None = option(None, "The name that clients use for the model.")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The K/V cache."""

    block_size: int = option(16, "Tokens per K/V block.")
    kv_cache_dtype: str = option("auto", "Type of stored K/V.", "kv_dtype", choices=("auto", "float32", "bfloat16"))
    kv_cache_memory_bytes: int | None = option(None, "Bytes for the K/V cache (default: measured).")
    gpu_memory_utilization: float = option(0.9, "Share of the device's memory to use in all.")
    num_gpu_blocks_override: int | None = option(None, "Exactly this many K/V blocks per pool.", "num_blocks")
    enable_prefix_caching: bool = option(True, "Reuse K/V of equal prefixes.")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """How requests share a step."""

    max_num_seqs: int = option(256, "Sequences that run at once.")
    max_num_batched_tokens: int | None = option(None, "Tokens per step (default: 2048 on CPU, 8192 on GPU).")
    long_prefill_token_threshold: int = option(0, "Most prompt tokens of one request per step (0: no limit).")
    scheduling_policy: str = option("fcfs", "Who goes first.", choices=("fcfs", "priority"))
    max_waiting: int = option(100_000, "Requests that may wait; more are refused.")


@dataclass(frozen=True, kw_only=True)
class ExecuteOptions:
    """Where and how steps run."""

    device: str = option("auto", "`cpu`, `cuda`, `cuda:1`, or `auto`.")
    executor: str = option(
        "inprocess", "Run the model here or in a process of its own.", choices=("inprocess", "process")
    )
    pipeline_depth: int | None = option(None, "Plans in flight (default: 1 in process on a CPU, else 2).", "depth")
    threads: int | None = option(None, "CPU threads for kernels (default: the cores this process may use).")
    kernels: str = option("auto", "Kernel backend.", choices=("auto", "reference"))
    enforce_eager: bool = option(False, "No recorded steps (graphs).")
    disable_log_stats: bool = option(False, "Accepted for compatibility.")


@dataclass(frozen=True, kw_only=True)
class SpeculateOptions:
    """Guessing ahead."""

    speculative_config: dict[str, Any] | None = option(
        None, 'JSON: {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}.'
    )


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "schedule": ScheduleOptions,
    "execute": ExecuteOptions,
    "speculate": SpeculateOptions,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    execute: ExecuteOptions = field(default_factory=ExecuteOptions)
    speculate: SpeculateOptions = field(default_factory=SpeculateOptions)


def all_options() -> dict[str, tuple[str, Field, Any]]:
    """Flat option name -> (group name, field, type)."""
    found = {}
    for group, cls in GROUPS.items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            found[item.name] = (group, item, hints[item.name])
    return found


def make_config(environment: Mapping[str, str] | None = None, **flat: Any) -> EngineConfig:
    """EngineConfig from flat names; unset ones come from TOKENMILL_* variables, then from the defaults."""
    known = all_options()
    names = {alias: name for name, (_, item, _) in known.items() for alias in item.metadata["aliases"]}
    chosen: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    environment = os.environ if environment is None else environment
    for name, (group, _, kind) in known.items():
        text = environment.get(f"TOKENMILL_{name.upper()}")
        if text is not None:
            chosen[group][name] = _parse(name, text, kind)
    for given, value in flat.items():
        name = names.get(given, given)
        if name not in known:
            close = difflib.get_close_matches(given, [*known, *names], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ParameterError(f"Unknown option {given!r}.{hint}", param=given)
        chosen[known[name][0]][name] = value
    for values in chosen.values():
        for name, value in values.items():
            _check(name, value, known[name][1], known[name][2])
    return EngineConfig(**{group: GROUPS[group](**values) for group, values in chosen.items()})


def override(config: EngineConfig, group: str, **values: Any) -> EngineConfig:
    """A copy with some options of one group replaced."""
    return replace(config, **{group: replace(getattr(config, group), **values)})


def _parse(name: str, text: str, kind: Any) -> Any:
    plain = [k for k in getattr(kind, "__args__", (kind,)) if k is not type(None)]
    try:
        if bool in plain:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if int in plain:
            return int(text)
        if float in plain:
            return float(text)
        if str in plain:
            return text
        return json.loads(text)
    except (KeyError, ValueError) as error:
        raise ParameterError(f"TOKENMILL_{name.upper()}={text!r} cannot be read.", param=name) from error


def _check(name: str, value: Any, item: Field, kind: Any) -> None:
    choices = item.metadata["choices"]
    if choices and value is not None and value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(choices)}, got {value!r}.", param=name)
    allowed = getattr(kind, "__args__", (kind,))
    numeric = [k for k in allowed if k in (int, float)]
    if numeric and bool not in allowed and value is not None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ParameterError(f"{name} must be a number, got {value!r}.", param=name)
        if int in numeric and float not in numeric and not isinstance(value, int):
            raise ParameterError(f"{name} must be an integer, got {value!r}.", param=name)
        if value < 0 or (value == 0 and name in _POSITIVE):
            raise ParameterError(f"{name} must be positive, got {value}.", param=name)
    if allowed == (bool,) and not isinstance(value, bool):
        raise ParameterError(f"{name} must be true or false, got {value!r}.", param=name)


_POSITIVE = frozenset(
    {
        "block_size",
        "max_num_seqs",
        "max_model_len",
        "max_num_batched_tokens",
        "pipeline_depth",
        "threads",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    }
)


def calm_threads() -> None:
    """Let idle OpenMP threads sleep; call it before torch is imported.

    They spin by default: with another busy process on the same cores every parallel region then costs a scheduler
    slice (milliseconds instead of microseconds).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
