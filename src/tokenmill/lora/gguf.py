"""llama.cpp's adapters: GGUF files of the type `adapter`. Owns: turning their tensors into matrices by module.

Names, and the order of query and key rows, are those of models in GGUF files. Must not know: the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import decode
from tokenmill.checkpoint.gguf_file import GgufFile, open_gguf
from tokenmill.checkpoint.gguf_model import unweave
from tokenmill.checkpoint.gguf_names import LAYER_PARTS, SPECIAL_PARTS, TOP_PARTS, woven
from tokenmill.core.errors import ModelError
from tokenmill.lora.config import MOST_RANK
from tokenmill.lora.peft import Adapter, LowRank

Heads = tuple[int, int]
"""Query heads, key heads."""


def read_gguf_adapter(path: Path, heads: Heads) -> Adapter:
    """A file's adapter; raises ModelError that names what is wrong."""
    file = open_gguf(path)
    metadata = file.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise ModelError(f"{path}: it is not a LoRA adapter (general.type is {metadata.get('general.type')!r}).")
    arch, alpha = str(metadata.get("general.architecture", "")), metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise ModelError(f"{path}: adapter.lora.alpha must be a number, not {alpha!r}.")
    if metadata.get("adapter.alora.invocation_tokens"):
        raise ModelError(f"{path}: adapters that begin at certain tokens (aLoRA) are not supported.")
    found = Adapter(path, base=str(metadata.get("general.base_model.0.name", ""))[:512])
    for name in sorted(file.tensors):
        stem, _, end = name.rpartition(".")
        if end not in ("lora_a", "lora_b"):
            raise ModelError(f"{path}: {name[:120]!r} is not a tensor of an adapter.")
        if end == "lora_b" and f"{stem}.lora_a" not in file.tensors:
            raise ModelError(f"{path}: {stem[:120]!r} has no lora_a.")
        if end == "lora_a":
            _take(found, file, stem, arch, float(alpha), heads)
    if not (found.linear or found.tables):
        raise ModelError(f"{path}: the adapter holds no tensors.")
    return found


def _take(found: Adapter, file: GgufFile, stem: str, arch: str, alpha: float, heads: Heads) -> None:
    if f"{stem}.lora_b" not in file.tensors:
        raise ModelError(f"{file.path}: {stem[:120]!r} has no lora_b.")
    down, up = (_matrix(file, f"{stem}.{end}") for end in ("lora_a", "lora_b"))
    module, part = _module(file.path, stem, arch)
    table = stem == "token_embd.weight"
    if table:
        down = down.t()
    if down.shape[0] != up.shape[1] or not 1 <= down.shape[0] <= MOST_RANK:
        raise ModelError(f"{file.path}: {stem[:120]!r}: {list(down.shape)} and {list(up.shape)} do not fit together.")
    if part in ("attn_q", "attn_k") and woven(arch):
        count = heads[part == "attn_k"]
        if count < 1 or up.shape[0] % (2 * count):
            raise ModelError(f"{file.path}: the {up.shape[0]} rows of {stem[:120]!r} are not pairs of {count} heads.")
        up = up[unweave(count, up.shape[0])]
    (found.tables if table else found.linear)[module] = LowRank(down, up, alpha / down.shape[0] if alpha else 1.0)


def _matrix(file: GgufFile, name: str) -> Tensor:
    info: Any = file.tensors[name]
    if len(info.shape) != 2:
        raise ModelError(f"{file.path}: {name[:120]!r} has the shape {list(info.shape)}; only matrices can be read.")
    return decode(info, file.bytes_of(info)).to(torch.float32)


def _module(path: str, stem: str, arch: str) -> tuple[str, str]:
    """The module of a tensor's name, and which part of a layer that is."""
    base, _, kind = stem.rpartition(".")
    if kind == "weight" and base in TOP_PARTS:
        return TOP_PARTS[base], base
    parts = base.split(".")
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit():
        ours = {**LAYER_PARTS, **SPECIAL_PARTS.get(arch, {})}.get(parts[2])
        if ours is not None:
            return f"model.layers.{int(parts[1])}.{ours}", parts[2]
    raise ModelError(f"{path}: {stem[:120]!r} is not a matrix that adapters can change here.")
