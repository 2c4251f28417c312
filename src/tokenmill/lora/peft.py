"""PEFT's folders. Owns: turning an adapter's files into matrices by module, with every check of them.

Must not know: the model that the adapter is for (lora/fit.py does), devices.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint
from tokenmill.checkpoint.torch_bin import TorchBinCheckpoint
from tokenmill.core.errors import ModelError
from tokenmill.core.files import present
from tokenmill.lora.config import BIAS, MAGNITUDE, MOST_RANK, AdapterConfig, read_adapter_config

log = logging.getLogger("tokenmill.lora")
SAFE, OLD = "adapter_model.safetensors", "adapter_model.bin"
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_TENSORS = 1 << 18
_KEY = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[\w-]+)?(?P<end>\.weight|\.bias)?"
)
"""The module, what it is, the adapter's own name in older files, and the tensor."""
_TOKENS = re.compile(r"(?P<module>.+?)\.token_adapter\.trainable_tokens_delta(\.[\w-]+)?")
_WHOLE = re.compile(r"(?P<module>.+?)(?P<inner>(\.modules_to_save(\.[\w-]+)?|\.base_layer|\.original_module)*)"
                    r"\.(?P<end>weight|bias)")  # fmt: skip


@dataclass(slots=True)
class LowRank:
    """up [out, r] @ down [r, in] * scale for one module; magnitude [out] of DoRA; bias [out] behind `up`."""

    down: Tensor
    up: Tensor
    scale: float = 1.0
    magnitude: Tensor | None = None
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows [n, width] that these tokens get, of embeddings or a head."""

    ids: tuple[int, ...]
    rows: Tensor


@dataclass(slots=True)
class Adapter:
    """What an adapter's files hold, by module. `tables`: of embeddings, down [r, vocabulary], up [width, r]; `whole`:
    weight and bias that replace the module's own; `stacked`: of experts' parameters, one below the other."""

    where: Path
    linear: dict[str, LowRank] = field(default_factory=dict)
    tables: dict[str, LowRank] = field(default_factory=dict)
    whole: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stacked: dict[str, LowRank] = field(default_factory=dict)
    tokens: dict[str, TokenRows] = field(default_factory=dict)
    base: str = ""
    arch: str = ""
    """Of GGUF files: the architecture, whose converter may have changed the numbers (lora/layout.py)."""
    config: AdapterConfig | None = None
    """Of stacked experts: their parameters' names, and so their ranks, are known with the model alone."""

    def numbers(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its module's name."""
        for group in (self.linear, self.tables, self.stacked):
            for module, low in group.items():
                for tensor in (low.down, low.up, low.magnitude, low.bias):
                    if tensor is not None:
                        yield module, tensor
        for module, tensors in self.whole.items():
            for tensor in tensors.values():
                yield module, tensor
        for module, found in self.tokens.items():
            yield module, found.rows

    def drop(self, apart: Callable[[str], bool]) -> int:
        """Leave these modules out: -> how many there were."""
        count = 0
        for group in (self.linear, self.tables, self.whole, self.stacked, self.tokens):
            gone = [module for module in group if apart(module)]
            for module in gone:
                del group[module]
            count += len(gone)
        return count

    def check_numbers(self) -> None:
        """Refuse NaN and infinity: they would end up in other requests' caches, too."""
        for module, tensor in self.numbers():
            if not all_finite(tensor):
                raise ModelError(f"{self.where}: the adapter of {module[:120]} holds NaN or infinity.")


def all_finite(tensor: Tensor) -> bool:
    """Has it neither NaN nor infinity?"""
    # A sum tells of either at a fraction of the time; large numbers may overflow in it, so it only acquits.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def stem(module: str) -> str:
    """The own name of stacked experts."""
    return re.sub(r"(\.base_layer)+$", "", module)


def read_peft(folder: Path) -> Adapter:
    """A folder's adapter; raises ModelError that names what is wrong."""
    config = read_adapter_config(folder)
    checkpoint = _open(folder)
    names = sorted(checkpoint.names())
    if not names:
        raise ModelError(f"{folder}: the adapter holds no tensors.")
    if len(names) > _MOST_TENSORS:
        raise ModelError(f"{folder}: {len(names)} tensors are more than any adapter has.")
    halves: dict[str, dict[str, Tensor]] = {}
    found = Adapter(folder, base=config.base, config=config)
    for name in names:
        tensor = checkpoint.tensor(name)
        if tensor.dtype not in WIDE:
            raise ModelError(f"{folder}: {name[:120]} is stored as {str(tensor.dtype).removeprefix('torch.')}.")
        plain = name.removeprefix("base_model.model.")
        key = _KEY.fullmatch(plain)
        if key is not None:
            kind = key["kind"] + (".bias" if key["end"] == ".bias" else "")
            if kind in halves.setdefault(key["module"], {}):
                raise ModelError(f"{folder}: {name[:120]} is there twice.")
            halves[key["module"]][kind] = tensor
            continue
        if (tokens := _TOKENS.fullmatch(plain)) is not None:
            found.tokens[tokens["module"]] = _token_rows(found, config, tokens["module"], tensor)
            continue
        whole = _WHOLE.fullmatch(plain)
        if whole is None:
            raise ModelError(f"{folder}: {name[:120]} is not a tensor of a LoRA adapter.")
        if ".original_module" not in whole["inner"]:
            found.whole.setdefault(whole["module"], {})[whole["end"]] = tensor
    for module, tensors in halves.items():
        _take(found, config, module, tensors)
    _check_whole(found, config)
    _note_names(found, config)
    if not (found.linear or found.tables or found.whole or found.stacked or found.tokens):
        raise ModelError(f"{folder}: the adapter changes nothing.")
    return found


def _open(folder: Path) -> SafetensorsCheckpoint | TorchBinCheckpoint:
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder.")
    if present(folder / SAFE):
        return SafetensorsCheckpoint(folder, [folder / SAFE], copied=True)
    if present(folder / OLD):
        return TorchBinCheckpoint(folder, [folder / OLD])
    raise ModelError(f"{folder}: there is no {SAFE} or {OLD}.")


def _take(found: Adapter, config: AdapterConfig, module: str, tensors: dict[str, Tensor]) -> None:
    """One module's tensors, whole and of shapes that go together."""
    table = "lora_embedding_A" in tensors or "lora_embedding_B" in tensors
    names = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A", "lora_B")
    where = f"{found.where}: the adapter of {module[:120]}"
    for name in names:
        if name not in tensors:
            raise ModelError(f"{where} has no {name}.")
    if left := sorted(set(tensors) - {*names, MAGNITUDE, BIAS}):
        raise ModelError(f"{where} has a {left[0]} that does not belong there.")
    down, up = (tensors[name] for name in names)
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
        raise ModelError(f"{where}: {names[0]} {list(down.shape)} and {names[1]} {list(up.shape)} do not fit together.")
    stacked = bool(config.parameters) and not table and re.search(r"(^|\.)experts(\.base_layer)*$", module)
    if stacked:
        if MAGNITUDE in tensors or BIAS in tensors:
            raise ModelError(f"{where}: stacked experts have no magnitudes or biases.")
        found.stacked[module] = LowRank(down, up)
        return
    rank = config.rank_of(module)
    if down.shape[0] != rank:
        raise ModelError(f"{where} has rank {down.shape[0]}, and adapter_config.json says {rank}.")
    if rank > MOST_RANK:
        raise ModelError(f"{where}: rank {rank} is more than {MOST_RANK}.")
    magnitude = _magnitude(where, config, tensors, up.shape[0])
    bias = tensors.get(BIAS)
    if bias is None and BIAS in config.beside and not table:
        raise ModelError(f"{where} has no bias of lora_B, and adapter_config.json says lora_bias.")
    if bias is not None and BIAS not in config.beside:
        raise ModelError(f"{where} has a bias of lora_B, but adapter_config.json does not say lora_bias.")
    if bias is not None and tuple(bias.shape) != (up.shape[0],):
        raise ModelError(f"{where}: the bias of lora_B has shape {list(bias.shape)}, not [{up.shape[0]}].")
    if bias is not None and magnitude is not None:
        raise ModelError(f"{where}: DoRA with a bias of lora_B is not supported.")
    group = found.tables if table else found.linear
    group[module] = LowRank(down, up, config.scale_of(module, rank), magnitude, bias)


def _token_rows(found: Adapter, config: AdapterConfig, module: str, rows: Tensor) -> TokenRows:
    """The rows of one module, with the tokens that adapter_config.json gives it."""
    name = next((name for name in config.tokens if _is_named(module, name)), "")
    ids = config.tokens.get(name, ())
    if rows.ndim != 2 or len(rows) != len(ids):
        raise ModelError(
            f"{found.where}: the file has {list(rows.shape)} numbers for tokens of {module[:120]}, and "
            f"trainable_token_indices in adapter_config.json names {len(ids)}."
        )
    return TokenRows(ids, rows)


def _magnitude(where: str, config: AdapterConfig, tensors: dict[str, Tensor], rows: int) -> Tensor | None:
    """DoRA's magnitudes of one module; None where the adapter has none."""
    found = tensors.get(MAGNITUDE)
    if found is None:
        if MAGNITUDE in config.beside:
            raise ModelError(f"{where} has no lora_magnitude_vector, and adapter_config.json says use_dora.")
        return None
    if MAGNITUDE not in config.beside:
        raise ModelError(f"{where} has a lora_magnitude_vector, but adapter_config.json does not say use_dora.")
    if found.numel() != rows:
        raise ModelError(f"{where}: lora_magnitude_vector has {found.numel()} entries, not {rows}.")
    return found.reshape(-1)


def _check_whole(found: Adapter, config: AdapterConfig) -> None:
    for name in config.saved:
        if not any(_is_named(module, name) for module in found.whole):
            raise ModelError(f"{found.where}: modules_to_save names {name[:120]!r}, which the file does not hold.")
    for name in config.parameters:
        if not _is_stacked(found, name):
            raise ModelError(f"{found.where}: target_parameters names {name[:120]!r}, which the file does not hold.")
    if config.tokens and not found.tokens:
        raise ModelError(f"{found.where}: trainable_token_indices names tokens, and the file holds no rows of them.")


def _is_stacked(found: Adapter, parameter: str) -> bool:
    """Does the file hold something of the module whose parameter this is? PEFT names the module's tensors alone."""
    module, _, name = parameter.rpartition(".")
    if not module:
        return bool(found.linear if name == "weight" else found.stacked)
    return any(_is_named(stem(held), module) for held in (*found.stacked, *found.linear))


def _note_names(found: Adapter, config: AdapterConfig) -> None:
    """Say where the list of modules and the file differ. A list may name what no layer of the model is called, so it is
    no error; but a file that was not saved whole looks the same. PEFT leaves out what the list does not name."""
    if not config.targets:
        return
    low = [stem(module) for module in (*found.linear, *found.tables)]
    held = [*low, *(stem(module) for module in (*found.stacked, *found.whole, *found.tokens))]
    lacking = [name for name in config.targets if not any(_is_named(module, name) for module in held)]
    if lacking:
        log.warning("%s: target_modules names %s, and the file holds nothing of that.", found.where, _few(lacking))
    more = [module for module in low if not any(_is_named(module, name) for name in config.targets)]
    if more:
        said = "%s: target_modules does not name %s; what the file holds of that is applied."
        log.warning(said, found.where, _few(more))


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith("." + name)


def _few(names: list[str]) -> str:
    return ", ".join(repr(name[:120]) for name in names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
