"""A model folder in, one GGUF file out. Owns: which type each tensor gets, and the inverse of what `gguf_names` does.
Must not know: command lines, engines, how blocks or containers are laid out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config, read_generation_config
from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.checkpoint.gguf_metadata import GgufPlace, architecture, epsilon_of, metadata_of, place, rope_divisors
from tokenmill.checkpoint.gguf_model import unweave
from tokenmill.checkpoint.gguf_write import IDS, Entry, write_gguf
from tokenmill.checkpoint.new_folder import check_new
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError
from tokenmill.models.config import ModelConfig
from tokenmill.models.config_fields import complete
from tokenmill.quant.convert import LayerError, Tell, check_lost, checked, relative, without_match
from tokenmill.quant.gguf_rounding import ENCODERS
from tokenmill.quantize.gguf_proof import prove
from tokenmill.text.gguf_write import tokenizer_metadata

FILE_TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15,
              "q5_k": 17, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25,
              "iq3_s": 26, "iq2_s": 28, "iq4_xs": 30, "iq1_m": 31, "bf16": 32, "tq1_0": 36, "tq2_0": 37}  # fmt: skip
"""The kinds of file that can be written, and their numbers in `general.file_type`. (q3_k to q5_k are the variants named
M.)"""
_MIXES = {"q2_k": ("Q2_K", "Q4_K", "Q3_K"), "q3_k": ("Q3_K", "Q5_K", "Q4_K"), "q4_k": ("Q4_K", "Q6_K", "Q4_K"),
          "q5_k": ("Q5_K", "Q6_K", "Q5_K"), "iq4_nl": ("IQ4_NL", "Q5_K", "IQ4_NL"),
          "iq4_xs": ("IQ4_XS", "Q5_K", "IQ4_XS"),
          **{kind: (kind.upper(), "Q4_K", "IQ2_S") for kind in ("iq1_s", "iq1_m")},
          **{kind: (kind.upper(), "Q4_K", "IQ3_S") for kind in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")},
          "iq3_s": ("IQ3_S", "Q5_K", "Q4_K"),
          **{kind: (kind.upper(),) * 3 for kind in ("tq1_0", "tq2_0")}}  # fmt: skip
"""The type of most matrices, and the types of the two halves of those that lose most."""
_BY_32 = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
           **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "IQ4_NL"),
           **dict.fromkeys(("TQ1_0", "TQ2_0"), "Q4_0")}  # fmt: skip
"""Used for matrices whose rows are not multiples of 256: the next larger type with blocks of 32, as in llama.cpp."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight")
_SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down|ffn_down_exps)\.weight")
_HEADS = ("token_embd.weight", "output.weight")
_LEAST = 32
"""The fewest numbers of a block."""
_PIECE = 1 << 22
"""The most numbers that are rounded at once."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "max_position_embeddings")  # fmt: skip
_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor of the file: the source tensors that it stacks (one, or one per expert), and its type."""

    name: str
    sources: list[tuple[str, GgufPlace]]
    shape: tuple[int, ...]
    type: str


def export(
    source: Path,
    target: Path,
    kind: str,
    skip: re.Pattern[str] | None = None,
    tell: Tell = lambda name, done, total: None,
    importance: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[list[LayerError], str | None]:
    """Write the model of folder `source` to the file `target`, completely or not at all. Returns the loss of rounding
    for each matrix, and a sentence for the user, if there is one.

    skip: names (in the source) of matrices that stay in 16 bits. importance: of columns, by the matrix's name in the
    file (importance.py)."""
    config, arch = _described(source)
    check_new(target)
    ckpt = open_checkpoint(source)
    try:
        stored = _plan(ckpt, config, arch, kind, skip, str(source))
        if importance and not any(item.name in importance for item in stored):
            raise UserError("The importance names no matrix of this model: it is of another one.")
        prove(config, arch, [item.name for item in stored], str(source))
        metadata, note = _metadata(source, config, arch, kind)
        note = "; ".join(filter(None, (note, _note_smaller_blocks(stored, kind)))) or None
        errors: list[LayerError] = []
        entries = []
        for item in stored:
            counts = _counts(importance, item)
            pieces = partial(_pieces, ckpt, item, errors, partial(_told, tell, item.name, len(stored)), counts)
            entries.append(Entry(item.name, item.shape, item.type, pieces))
        if (divisors := rope_divisors(config)) is not None:
            raw = torch.tensor(divisors, dtype=torch.float32).numpy().tobytes()
            entries.append(Entry("rope_freqs.weight", (len(divisors),), "F32", lambda: [raw]))
        write_gguf(target, metadata, entries)
    finally:
        ckpt.close()
    return errors, note


def check_export(source: Path, kind: str, skip: re.Pattern[str] | None = None) -> None:
    """Refuse what `export` would refuse of a model, before anything is measured for it."""
    config, arch = _described(source)
    ckpt = open_checkpoint(source)
    try:
        stored = _plan(ckpt, config, arch, kind, skip, str(source))
    finally:
        ckpt.close()
    prove(config, arch, [item.name for item in stored], str(source))
    _metadata(source, config, arch, kind)


def _described(source: Path) -> tuple[dict[str, Any], str]:
    """The config with its family's defaults, and the family's name in GGUF files."""
    config = read_config(source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} is already quantised; start from the unquantised model.")
    arch = architecture(config, str(source))
    return _whole(config, source), arch


def _whole(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The config with its family's defaults. A missing size is an error."""
    found = complete(config, str(config["architectures"][0]))
    for key in _SIZES:
        if found.get(key) is None:
            raise ModelError(f"{source}: config.json has no {key!r}.")
        ModelConfig(found).need(key, int)
    for key in ("num_key_value_heads", "head_dim", "sliding_window"):
        ModelConfig(found).get(key, int, 0, low=0)
    if epsilon_of(found) is None:
        raise ModelError(f"{source}: config.json has no 'rms_norm_eps'.")
    return found


def _metadata(source: Path, config: Mapping[str, Any], arch: str, kind: str) -> tuple[dict[str, Any], str | None]:
    generation = read_generation_config(source)
    ends = generation.get("eos_token_id") or []
    ends = [ends] if isinstance(ends, int) else ends
    tokenizer, note = tokenizer_metadata(source, int(config["vocab_size"]), ends)
    metadata = metadata_of(config, arch, str(source))
    metadata["general.name"] = source.resolve().name
    metadata["general.file_type"] = FILE_TYPES[kind]
    if kind not in ("f16", "bf16"):
        metadata["general.quantization_version"] = 2
    for ours, theirs in _SAMPLING.items():
        if isinstance(generation.get(ours), int | float) and not isinstance(generation[ours], bool):
            value = generation[ours]
            metadata[f"general.sampling.{theirs}"] = int(value) if ours == "top_k" else float(value)
    return {**metadata, **tokenizer}, note


def _plan(
    ckpt: Checkpoint, config: Mapping[str, Any], arch: str, kind: str, skip: re.Pattern[str] | None, path: str
) -> list[StackedTensor]:
    """Every tensor of the file, in the order of the source."""
    found: dict[str, list[tuple[str, GgufPlace]]] = {}
    for name in ckpt.names():
        where = place(name, arch, config, path)
        if where is not None:
            found.setdefault(where.name, []).append((name, where))
    stored, matched = [], False
    for target, sources in found.items():
        sources.sort(key=lambda item: item[1].expert or 0)
        shapes = {ckpt.shape(name) for name, _ in sources}
        shape = shapes.pop()
        assert shape is not None
        stacked = sources[0][1].expert is not None
        if shapes or (stacked and [where.expert for _, where in sources] != list(range(len(sources)))):
            raise ModelError(f"{path}: the experts of {target} are not all there, or differ in shape.")
        shape = (len(sources), *shape) if stacked else shape
        skipped = skip is not None and any(skip.search(name) for name, _ in sources)
        layers = int(config["num_hidden_layers"])
        usual = _type(target, shape, kind, layers, skipped=False)
        found_type = _type(target, shape, kind, layers, skipped=True) if skipped else usual
        matched = matched or found_type != usual
        stored.append(StackedTensor(target, sources, shape, found_type))
    if skip is not None and not matched:
        raise without_match(skip)
    if kind not in ("f16", "bf16") and all(item.type in _PLAIN for item in stored):
        raise UserError(f"{path}: no matrix would be rounded, as rows are no multiples of {_LEAST} (or by --skip): "
                        "--format gguf-f16 says so.")  # fmt: skip
    return stored


def _type(name: str, shape: tuple[int, ...], kind: str, layers: int, *, skipped: bool) -> str:
    """The type of a tensor. Norms and routers stay in 32 bits, heads get 6; the value matrices and the last matrix of
    an MLP get more bits than other matrices."""
    if len(shape) < 2 or _ROUTER.fullmatch(name):
        return "F32"
    if kind in ("f16", "bf16") or skipped or shape[-1] % _LEAST:
        return "BF16" if kind == "bf16" else "F16"
    wide = shape[-1] % 256 == 0
    if kind == "q8_0":
        return "Q8_0"
    if name in _HEADS or kind == "q6_k":
        return "Q6_K" if wide else _BY_32["Q6_K"]
    if kind not in _MIXES:
        return kind.upper()
    usual, more, less = _MIXES[kind]
    sensitive = _SENSITIVE.fullmatch(name)
    if sensitive is not None:
        layer, eighth = int(sensitive[1]), layers // 8  # the layers that llama.cpp gives more bits
        usual = more if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2 else less
    return usual if wide else _BY_32.get(usual, usual)


def _note_smaller_blocks(stored: list[StackedTensor], kind: str) -> str | None:
    """A sentence about matrices that had to take a type with smaller blocks, or to stay in 16 bits, or None."""
    odd = [item for item in stored if len(item.shape) > 1 and item.shape[-1] % _LEAST and item.type == "F16"]
    told = []
    if odd and kind != "f16":
        told = [
            f"{len(odd)} of {len(stored)} tensors have rows that are no multiples of {_LEAST}: they stay in 16 bits"
        ]
    if kind not in _MIXES and kind != "q6_k":
        return "".join(told) or None
    found = [item.type for item in stored if item.shape[-1] % 256 and item.type in {*_BY_32.values()} - {kind.upper()}]
    if found:
        types = ", ".join(sorted(set(found)))
        told.append(f"{len(found)} of {len(stored)} have rows that are not whole blocks of 256: they are {types}")
    return "; ".join(told) or None


def _told(tell: Tell, name: str, total: int, done: int) -> None:
    tell(name, done, total)


def _counts(importance: Mapping[str, Tensor], item: StackedTensor) -> Tensor | None:
    """The weight of an error in each column, for each source [sources or 1, columns]."""
    found = importance.get(item.name)
    # the sources' columns, one source after the other
    if found is not None and found.shape == (1, len(item.sources) * item.shape[-1]):
        found = found.view(len(item.sources), item.shape[-1])
    if found is not None and (found.shape[1] != item.shape[-1] or len(found) not in (1, len(item.sources))):
        raise UserError(f"The importance of {item.name} has the shape {list(found.shape)}: it is of another model.")
    return found


def _pieces(
    ckpt: Checkpoint,
    item: StackedTensor,
    errors: list[LayerError],
    tell: Callable[[int], None],
    importance: Tensor | None = None,
) -> Iterator[bytes]:
    """The tensor's bytes, piece by piece."""
    lost = total = count = 0.0
    for number, (name, where) in enumerate(item.sources):
        weights = None if importance is None else importance[number % len(importance)]
        values = checked(ckpt.tensor(name), name)
        if where.heads:
            values = values[unweave(where.heads, values.shape[0]).argsort()]
        rows = max(1, _PIECE // values.shape[-1])
        for part in values.split(rows):
            wide = part.float() + where.more
            raw, back = _stored(item.type, wide, weights)

            def again(by: float, wide: Tensor = wide, weights: Tensor | None = weights) -> float:
                return relative(_stored(item.type, wide * by, weights)[1], wide * by)

            advice = "--format gguf-bf16 can" if item.type in _PLAIN else "use --skip for it"
            check_lost(relative(back, wide), wide, name, again, advice)
            if item.type in _PLAIN:
                yield raw.numpy().tobytes()
                continue
            lost += float((back - wide).double().square().sum())
            total += float(wide.double().square().sum())
            count += wide.numel()
            yield raw.numpy().tobytes()
    if count:
        errors.append(LayerError(item.name, (lost / total) ** 0.5 if total else 0.0, int(count)))
    tell(len(errors))


def _stored(kind: str, wide: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers as bytes of a type, and what these mean."""
    if kind in _PLAIN:
        plain = wide.to(_PLAIN[kind]).contiguous()
        return plain.view(torch.uint8), plain.float()
    raw = ENCODERS[kind](wide.contiguous(), weights)
    return raw, Blocks(TYPES[IDS[kind]], raw).dense()
