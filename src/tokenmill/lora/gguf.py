"""llama.cpp's adapters: GGUF files of the type `adapter`. Owns: turning their tensors into matrices by module.

Names and the order of rows are those of models in GGUF files, so their tables (checkpoint/gguf_names.py) say what is
what. Must not know: the model, but for its config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import decode
from tokenmill.checkpoint.gguf_file import GgufFile, TensorInfo, open_gguf
from tokenmill.checkpoint.gguf_model import unweave
from tokenmill.checkpoint.gguf_names import name_table
from tokenmill.checkpoint.gguf_source import Given, Joined, TensorSource
from tokenmill.core.errors import ModelError, shown
from tokenmill.lora.config import MOST_RANK
from tokenmill.lora.peft import Adapter, LowRank

_EMBEDDING = "token_embd.weight"
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "num_attention_heads"),
    "num_kv_heads": ("n_head_kv", "num_attention_heads"),
}
"""What the tables of names ask of a config, and what else families call it. The last of keys: as many as queries."""
_ANY = 1 << 20
"""More layers than any model has."""


def read_gguf_adapter(path: Path, config: Mapping[str, Any]) -> Adapter:
    """A file's adapter for a model of this config; raises ModelError that names what is wrong."""
    file = open_gguf(path)
    metadata = file.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise ModelError(f"{path}: it is not a LoRA adapter (general.type is {metadata.get('general.type')!r}).")
    arch, alpha = str(metadata.get("general.architecture", "")), metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise ModelError(f"{path}: adapter.lora.alpha must be a number, not {alpha!r}.")
    if metadata.get("adapter.alora.invocation_tokens"):
        raise ModelError(f"{path}: adapters that begin at certain tokens (aLoRA) are not supported.")
    found = Adapter(path, base=str(metadata.get("general.base_model.0.name", ""))[:512], arch=arch)
    pairs = _pairs(file)
    if not pairs:
        raise ModelError(f"{path}: the adapter holds no tensors.")
    places = _places(file, arch, pairs, config)
    for stem, (down, up) in pairs.items():
        scale = float(alpha) / up.shape[-1] if alpha else 1.0
        if stem == _EMBEDDING:
            found.tables[places[stem][0][0]] = LowRank(down, up, scale)
            continue
        for module, source in places[stem]:
            one, other = (down, up) if source.expert is None else (down[source.expert], up[source.expert])
            found.linear[module] = LowRank(one, _ordered(file, source, other), scale)
    return found


def _pairs(file: GgufFile) -> dict[str, tuple[Tensor, Tensor]]:
    """The two halves of each changed matrix: down [.., r, in] and up [.., out, r]."""
    found = {}
    for name in sorted(file.tensors):
        stem, _, end = name.rpartition(".")
        if end not in ("lora_a", "lora_b"):
            raise ModelError(f"{file.path}: {name[:120]!r} is not a tensor of an adapter.")
        other = "lora_b" if end == "lora_a" else "lora_a"
        if f"{stem}.{other}" not in file.tensors:
            raise ModelError(f"{file.path}: {stem[:120]!r} has no {other}.")
        if end == "lora_b":
            continue
        down, up = (_numbers(file, f"{stem}.{half}") for half in ("lora_a", "lora_b"))
        if stem == _EMBEDDING:
            down = down.transpose(-2, -1)
        fits = down.ndim == up.ndim and down.shape[:-2] == up.shape[:-2] and down.shape[-2] == up.shape[-1]
        if not fits or not 1 <= down.shape[-2] <= MOST_RANK:
            raise ModelError(
                f"{file.path}: {stem[:120]!r}: {list(down.shape)} and {list(up.shape)} do not fit together."
            )
        found[stem] = down, up
    return found


def _numbers(file: GgufFile, name: str) -> Tensor:
    info = file.tensors[name]
    if len(info.shape) not in (2, 3):
        raise ModelError(f"{file.path}: {name[:120]!r} has the shape {list(info.shape)}; only matrices can be read.")
    return decode(info, file.bytes_of(info)).view(info.shape).float()


def _places(
    file: GgufFile, arch: str, pairs: Mapping[str, tuple[Tensor, Tensor]], config: Mapping[str, Any]
) -> dict[str, list[tuple[str, TensorSource]]]:
    """The modules whose matrices each of these tensors holds, as the tables for models say."""
    infos = {}
    for stem, (down, up) in pairs.items():
        shape = (*up.shape[:-1], down.shape[-1]) if stem != _EMBEDDING else (down.shape[-1], up.shape[0])
        infos[stem] = TensorInfo(stem, file.tensors[f"{stem}.lora_a"].type, shape, 0, 0)
    try:
        table = name_table(arch, infos, _facts(config))
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"{file.path}: it is for a model of type {arch[:60]!r}, and this one is another.") from error
    found: dict[str, list[tuple[str, TensorSource]]] = {stem: [] for stem in pairs}
    for name, source in table.items():
        if isinstance(source, Joined | Given):
            continue
        module, _, end = name.rpartition(".")
        flat = source.info.shape if source.expert is None else source.info.shape[1:]
        if name != source.info.name and end == "weight" and len(flat) == 2 and source.lifted in ((), flat):
            found[source.info.name].append((module, source))
    for stem, places in found.items():
        if not places:
            raise ModelError(f"{file.path}: {stem[:120]!r} is not a matrix that adapters can change here.")
    return found


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config under the names that tables ask for."""
    inner = config.get("text_config")
    said = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    for name, others in _ALIASES.items():
        if said.get(name) is None:
            value = next((said[other] for other in others if said.get(other) is not None), None)
            if value is not None:
                said[name] = value
    return {"new_decoder_architecture": False, "num_hidden_layers": _ANY, **said}


def _ordered(file: GgufFile, source: TensorSource, up: Tensor) -> Tensor:
    """Rows in the order of the module."""
    if source.rows:
        return up[list(source.rows)]
    if not source.heads:
        return up
    heads: object = source.heads  # as a config says it that nobody has read yet (merge)
    if not isinstance(heads, int) or heads < 1 or up.shape[0] % (2 * heads):
        raise ModelError(
            f"{file.path}: the {up.shape[0]} rows of {source.info.name!r} are not pairs of {shown(heads)} heads."
        )
    return up[unweave(source.heads, up.shape[0])]
