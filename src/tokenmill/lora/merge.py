"""Merging an adapter into its base. Owns: W + scale * up @ down (DoRA: with scaled rows), matrix by matrix, and leaving
no half-written folder behind. A head that shared the embeddings' matrix gets one of its own if the two differ now. Must
not know: command lines, engines.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.new_folder import check_free, new_folder
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.lora.fit import shared_out
from tokenmill.lora.names import Names
from tokenmill.lora.peft import WIDE, Adapter, LowRank, TokenRows, all_finite
from tokenmill.lora.stacked_base import Stacked, add_to_experts, find_stacked
from tokenmill.lora.store import read_adapter
from tokenmill.lora.weight import Source
from tokenmill.models.family_of import names_of, settled
from tokenmill.quant.convert import checked, copy_rest, kept, write_json

SHARD_BYTES = 2 << 30
_TRANSPOSED = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")
_EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "embed_in", "word_embeddings", "wte", "tokens_embed"})
_HEADS = {"BioGptForCausalLM": "output_projection",
          **dict.fromkeys(("GPTNeoXForCausalLM", "GPTNeoXJapaneseForCausalLM"), "embed_out")}  # fmt: skip
"""Names of heads that are not called lm_head."""
Tell = Callable[[str, int, int], None]
"""(weight name, how many are done, how many there are)."""


def merge(base: Path, adapter: Path, target: Path, tell: Tell = lambda name, done, total: None) -> int:
    """Write `base` with `adapter` worked in to the new folder `target`, whole or not at all; -> matrices changed."""
    config = read_config(base)
    if config.get("quantization_config"):
        raise ModelError(f"{base} is quantised: merge into the unquantised model, then quantise the result.")
    check_free(target)
    architecture = next(iter(names_of(settled(config))), "")
    found = read_adapter(adapter, config)
    found.check_numbers()
    checkpoint = open_checkpoint(base)
    transposed = architecture in _TRANSPOSED
    try:
        ends = _ends(config, architecture, checkpoint)
        stored = _Base(checkpoint, ends, architecture)
        changes = _changes(found, stored, transposed=transposed)
        apart = any(name in changes for name in (ends.embedding, ends.head))
        rows = {stored.find(found, module, "weight"): each for module, each in found.tokens.items()}
        apart |= any(name == ends.head for name, _ in rows)
        if apart and ends.tied:  # the head follows the embeddings, unless it has rows of its own
            rows = {(ends.head, shape): each for (_, shape), each in rows.items()} | rows
        for (name, shape), each in rows.items():
            changes[name] = _setting(found, name, shape, each, changes.get(name))
        with new_folder(target) as made:
            _write(checkpoint, made, changes, ends if apart and ends.tied else None, tell)
            copy_rest(base, made)
            if apart:
                write_json(made / "config.json", _untied(config))
            else:
                shutil.copyfile(base / "config.json", made / "config.json")
    finally:
        checkpoint.close()
    return len(changes)


Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Ends:
    """The tensors of embeddings and head; tied: the head is not stored, and the embeddings are its matrix."""

    embedding: str
    head: str
    tied: bool


def _ends(config: dict[str, Any], architecture: str, checkpoint: Checkpoint) -> _Ends:
    stored = list(checkpoint.names())
    called = _HEADS.get(architecture, "lm_head")
    head = next((name for name in stored if name.endswith(f"{called}.weight")), None)
    tables = (name for name in stored if name.removesuffix(".weight").rpartition(".")[2] in _EMBEDDINGS)
    embedding = next((name for name in tables if name.endswith(".weight")), "")
    tied = head is None and config.get("tie_word_embeddings") is not False
    return _Ends(embedding, head or f"{called}.weight", tied and bool(embedding))


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose head has a matrix of its own."""
    inner = config.get("text_config")
    text = {"text_config": {**inner, "tie_word_embeddings": False}} if isinstance(inner, dict) else {}
    return {**config, **text, "tie_word_embeddings": False}


class _Base:
    """The base's tensors by the adapter's names."""

    def __init__(self, checkpoint: Checkpoint, ends: _Ends, architecture: str) -> None:
        self.checkpoint, self.ends = checkpoint, ends
        self.stacked = find_stacked(checkpoint, architecture)
        stored = {*checkpoint.names(), *((ends.head,) if ends.tied else ())}
        plain = (name.removesuffix(".weight") for name in stored if name.endswith(".weight"))
        self.names = Names([*plain, *self.stacked])

    def find(self, adapter: Adapter, module: str, end: str) -> tuple[str, tuple[int, ...]]:
        """A tensor's name and shape; refused where there is none."""
        found = self._stored(module, end)
        if found is not None:
            return found
        why = "is it another model's adapter?"
        if end == "bias" and self._stored(module, "weight") is not None:
            why = "only an unmerged adapter can bring one (serve --lora-modules)."
        raise ModelError(f"{adapter.where}: the base has no {end} of {module[:160]}: {why}")

    def _stored(self, module: str, end: str) -> tuple[str, tuple[int, ...]] | None:
        path, ends = self.names.find(module), self.ends
        name = f"{path}.{end}"
        stored = ends.embedding if ends.tied and name == ends.head else name
        shape = self.checkpoint.shape(stored) if path is not None and self.checkpoint.has(stored) else None
        return None if shape is None else (name, tuple(shape))

    def source(self, path: str) -> Source | None:
        """A stored matrix."""
        if (each := self.within(path)) is not None:
            return Source(path, each.shape, flipped=each.flipped)
        found = self._stored(path, "weight")
        return None if found is None else Source(path, (found[1][0], found[1][1]))

    def within(self, module: str) -> Stacked | None:
        """Where it lies, if it is an expert that is stored with others."""
        return self.stacked.get(self.names.find(module) or "")

    def numbers(self, prefix: str) -> list[int]:
        """The experts of a mixture."""
        return self.names.numbers(prefix)


def _changes(adapter: Adapter, base: _Base, *, transposed: bool) -> dict[str, Change]:
    """Tensor name -> what becomes of it; refused where the base has no such tensor, or another shape."""
    changes = _replaced(adapter, base)
    experts: list[tuple[str, LowRank]] = []
    within: dict[str, dict[Stacked, LowRank]] = {}
    for module, low in adapter.stacked.items():
        experts += shared_out(base, adapter, module, low)
    for module, low in (*adapter.linear.items(), *adapter.tables.items(), *experts):
        if (each := base.within(module)) is not None:
            _check_plain(adapter, module, low, each)
            if within.setdefault(each.name, {}).setdefault(each, low) is not low:
                raise ModelError(f"{adapter.where}: two of its modules are the same expert of the base ({module}).")
            continue
        name, shape = base.find(adapter, module, "weight")
        flipped = module in adapter.tables or (transposed and name != base.ends.head)
        wanted = (low.down.shape[1], low.up.shape[0]) if flipped else (low.up.shape[0], low.down.shape[1])
        if shape != wanted:
            raise ModelError(f"{adapter.where}: {module} is {list(shape)} in the base, but the adapter needs {wanted}.")
        own = adapter.whole.get(module, {}).get("weight")  # what it was trained on, if the file tells
        if name in changes:
            raise ModelError(f"{adapter.where}: two of its modules are the same matrix of the base ({name}).")
        if own is not None and tuple(own.shape) != shape:
            raise ModelError(f"{adapter.where}: {module} is {list(shape)} in the base, not {list(own.shape)}.")
        changes[name] = _adding(low, flipped=flipped, own=own)
        if own is not None and base.ends.tied and name == base.ends.embedding:
            changes.setdefault(base.ends.head, _replacing(own))
        if low.bias is not None:
            bias, _ = base.find(adapter, module, "bias")
            changes[bias] = _summing(low.bias.float() * low.scale, changes.get(bias))
    return changes | {name: partial(add_to_experts, experts=lows) for name, lows in within.items()}


def _check_plain(adapter: Adapter, module: str, low: LowRank, expert: Stacked) -> None:
    """Refuse what cannot be worked into an expert that is stored with others."""
    wanted = low.up.shape[0], low.down.shape[1]
    if expert.shape != wanted:
        raise ModelError(
            f"{adapter.where}: {module} is {list(expert.shape)} in the base, but the adapter needs {list(wanted)}."
        )
    if low.magnitude is not None or low.bias is not None or module in adapter.whole:
        raise ModelError(f"{adapter.where}: {module} is stored with other experts, where it can have low rank only.")


def _replaced(adapter: Adapter, base: _Base) -> dict[str, Change]:
    """What the adapter stores completely."""
    changes: dict[str, Change] = {}
    for module, tensors in adapter.whole.items():
        for end, tensor in tensors.items():
            if end == "weight" and (module in adapter.linear or module in adapter.tables):
                continue  # saved beside its adapter
            name, shape = base.find(adapter, module, end)
            if shape != tuple(tensor.shape):
                raise ModelError(f"{adapter.where}: {module} is {list(shape)} in the base, not {list(tensor.shape)}.")
            changes[name] = _replacing(tensor)
    return changes


def _adding(low: LowRank, *, flipped: bool, own: Tensor | None) -> Change:
    """own: in the place of the base's."""

    def change(weight: Tensor) -> Tensor:
        before = weight if own is None else own
        wide = (before.t() if flipped else before).float()
        wide = wide + low.scale * (low.up.float() @ low.down.float())
        if low.magnitude is not None:
            wide = wide * (low.magnitude.float() / torch.linalg.vector_norm(wide, dim=1))[:, None]
        return (wide.t() if flipped else wide).to(weight.dtype).contiguous()

    return change


def _summing(bias: Tensor, before: Change | None) -> Change:
    """before: what becomes of the base's own."""
    return lambda old: ((before(old) if before else old).float() + bias).to(old.dtype)


def _setting(adapter: Adapter, name: str, shape: tuple[int, ...], found: TokenRows, before: Change | None) -> Change:
    """Other rows for some tokens. before: what else becomes of the tensor."""
    if max(found.ids) >= shape[0] or found.rows.shape[1:] != shape[1:]:
        raise ModelError(
            f"{adapter.where}: {name} is {list(shape)} in the base, and the adapter has row {max(found.ids)} of "
            f"{found.rows.shape[1]} numbers."
        )
    ids = torch.tensor(found.ids)
    return lambda old: (before(old) if before else old).index_copy(0, ids, found.rows.to(old.dtype))


def _replacing(tensor: Tensor) -> Change:
    return lambda old: tensor.to(old.dtype)


def _write(checkpoint: Checkpoint, folder: Path, changes: dict[str, Change], parting: _Ends | None, tell: Tell) -> None:
    """All tensors, in files of a bounded size, with an index if there are several; parting: the head begins as what the
    embeddings were."""
    files: list[list[str]] = []
    total = done = 0
    for waiting in _shards(checkpoint):
        if parting is not None and parting.embedding in waiting:
            waiting[parting.head] = waiting[parting.embedding]
        for name, tensor in waiting.items():
            if name not in changes:
                kept(tensor, name)
                continue
            if tensor.dtype not in WIDE:
                raise ModelError(f"{name} is stored as {tensor.dtype}: merge into the unquantised model.")
            waiting[name] = _merged(changes[name], tensor, name)
            done += 1
            tell(name, done, len(changes))
        save_file({k: v.clone() for k, v in waiting.items()}, folder / f"part-{len(files):05}", {"format": "pt"})
        files.append(list(waiting))
        total += sum(tensor.nbytes for tensor in waiting.values())
    count = len(files)
    names = (
        [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    for number, name in enumerate(names):
        (folder / f"part-{number:05}").chmod(0o644)
        (folder / f"part-{number:05}").rename(folder / name)
    if count > 1:
        where = {key: name for keys, name in zip(files, names, strict=True) for key in keys}
        table = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _merged(change: Change, weight: Tensor, name: str) -> Tensor:
    """The changed tensor; refused if its type cannot hold it."""
    found = change(weight)
    if not all_finite(found):
        checked(weight, name)
        kind = str(found.dtype).removeprefix("torch.")
        raise ModelError(f"{name} with this adapter has infinite numbers or NaN in {kind}, as the base stores it.")
    return found


def _shards(checkpoint: Checkpoint) -> Iterator[dict[str, Tensor]]:
    waiting: dict[str, Tensor] = {}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > SHARD_BYTES:
            yield waiting
            waiting = {}
        waiting[name] = tensor
    yield waiting
