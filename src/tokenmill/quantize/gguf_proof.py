"""Refuses what GGUF metadata cannot express. Owns: the proof that a config read back from the metadata computes the
same.

A small model of the config, and one of what the file would say about it, get the same random tensors; their logits must
be equal. This finds everything that changes an answer, even what the writer of the metadata did not think of.
Must not know: files, blocks, tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.gguf_config import read_config
from tokenmill.checkpoint.gguf_metadata import metadata_of, rope_divisors
from tokenmill.core.errors import ModelError, shown
from tokenmill.kernels import make_kernels
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.registry import build_model
from tokenmill.quantize.forward import forward_in_parts, logits

_TOKENS = 96
_WINDOW = 24
_VOCAB = 64
_SAME = (1e-4, 1e-2)
"""How far logits may be from others that count as the same, at least and at most: deep models enlarge roundings."""
_ROUNDED = 1e-6
"""A change of all weights that shows how much a model enlarges roundings."""
_LOUD = 10.0
"""Dummy weights are multiplied by this, so that activations leave the range in which one function looks like
another."""
CPU = torch.device("cpu")


class _Loud(DummyCheckpoint):
    """Random numbers for every tensor; those of norms are near one."""

    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.factor = 1.0 + more

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The invented tensor."""
        random = super().tensor(f"{name}.loud", shape, dtype) * _LOUD
        return (random + 1.0 if "norm" in name else random) * self.factor


def prove(config: Mapping[str, Any], arch: str, names: Iterable[str], path: str) -> None:
    """Refuse a config if a file with these tensors would describe another model. The error names the keys that cause
    this, if they are found."""
    stored, small = set(names), _small(config)
    reach = max(int(small["max_position_embeddings"]), 16)
    wanted, back = _logits(small, reach), _back(small, arch, stored, path)
    found = _logits(back, reach)
    bound = min(max(_apart(wanted, _logits(small, reach, _ROUNDED)), _SAME[0]), _SAME[1])
    if _apart(wanted, found) <= bound:
        return
    row, guilty = FIELDS[str(config["architectures"][0])], []
    for key in config:
        if not (row.knows(key) or key in row.only) or small.get(key, row) == back.get(key):
            continue
        changed = _changed(small, back, key, reach)
        if any(_apart(each, found) <= bound for each in changed):
            guilty = [key]
            break
        if any(_apart(each, wanted) > bound for each in changed):
            guilty.append(key)
    keys = ", ".join(f"'{key}' = {shown(config[key])}" for key in guilty) or "a setting of config.json"
    raise ModelError(f"{path}: {keys} cannot be expressed in GGUF files of the family '{arch}'.")


def _changed(small: Mapping[str, Any], back: Mapping[str, Any], key: str, reach: int) -> list[Tensor]:
    """The logits without what the config says under this key, and with what is read back, where these can be built."""
    without = {name: each for name, each in small.items() if name != key}
    results = []
    for variant in (without, {**without, key: back[key]}) if key in back else (without,):
        with suppress(ModelError):
            results.append(_logits(variant, reach))
    return results


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the same layers, but few and small sizes. Windows become a few tokens long."""
    heads = int(config["num_attention_heads"])
    keys = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or config["hidden_size"] // heads)
    few = {"vocab_size": _VOCAB, "hidden_size": 2 * head, "intermediate_size": 64, "num_attention_heads": 2,
           "num_key_value_heads": 2 if keys == heads else 1, "moe_intermediate_size": 32, "num_experts": 4,
           "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    made = {**config, **{name: value for name, value in few.items() if config.get(name)}}
    if config.get("sliding_window"):
        made["sliding_window"] = min(int(config["sliding_window"]), _WINDOW)
    return made


def _back(small: dict[str, Any], arch: str, stored: set[str], path: str) -> dict[str, Any]:
    """The config that is read back from the small model's metadata."""
    shape = (_VOCAB, small["hidden_size"])
    info: Any = SimpleNamespace(shape=shape, type=SimpleNamespace(name="F16"), start=0, stop=2)
    divisors, written = rope_divisors(small), metadata_of(small, arch, path)
    try:
        return read_config(
            written, dict.fromkeys(stored, info), lambda name: divisors if name == "rope_freqs.weight" else None, path,
        )  # fmt: skip
    except ModelError as error:
        why = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise ModelError(f"{path}: it cannot be expressed in GGUF files of the family '{arch}': {why}.") from None


def _logits(config: dict[str, Any], reach: int, more: float = 0.0) -> Tensor:
    """The logits [tokens, vocabulary] of a model with this config. more: added to all weights, as a share of them."""
    kernels = make_kernels("cpu")
    model = build_model(config, _Loud(more), dtype=torch.float32, device=CPU, kernels=kernels, max_positions=reach)
    tokens = torch.randint(0, _VOCAB, (1, min(_TOKENS, reach)), generator=torch.Generator().manual_seed(0))
    return logits(model, forward_in_parts(model, tokens, kernels, CPU)[0], kernels, CPU)


def _apart(one: Tensor, other: Tensor) -> float:
    """How far the second is from the first, as a share of it."""
    return float((one - other).norm() / one.norm()) if one.shape == other.shape else math.inf
