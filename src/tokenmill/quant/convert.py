"""A model folder in, a quantised model folder out. Owns: which weights are rounded, and leaving no half-written folder
behind. Must not know: command lines, engines, how a folder is found.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.new_folder import check_free, new_folder
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError, shown
from tokenmill.kernels import fp8
from tokenmill.quant import compressed, left_out
from tokenmill.quant.fused import joined
from tokenmill.quant.rounding import round_best

SHARD_BYTES = 2 << 30
MAX_COPIED_BYTES = 64 << 20
GROUPS = (256, 128, 64, 32)
"""Columns that may share a scale."""
REPORT = "quantization_report.json"
KEPT = re.compile(
    r"(embed|wte|wpe|word_embeddings|norm[^.]*\.weight$|\bln_|lm_head|embed_out|router|(^|\.)gate(\.wg)?\.weight$|"
    r"shared_expert_gate|rotary|_coefs\.weight$|indexer\.weights_proj)"
)
"""Never rounded: embeddings, heads, norms, routers, what weighs the heads of an index of keys, and Gemma 3n's mixing
factors. They are small, or would lose too much."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".index.json", ".onnx", ".h5", ".msgpack")
_OF_WEIGHTS = ("config.json", "hf_quant_config.json", "quantize_config.json", REPORT)
"""Files that say how a folder's weights are stored: the new ones are stored in another way."""
_USUAL = (2.0**-10, 2.0**10)
"""The largest magnitudes of matrices that every form can express."""
_WORSE, _MORE = 1.5, 0.02
_TRANSPOSED = ("GPT2LMHeadModel", "gpt2", "gpt-sw3")
"""Architectures and model types whose matrices are [in, out]."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to round: 8 or 4 bits, columns per scale, and a pattern of the weights to leave alone. fp8: float8 with a
    scale per row."""

    bits: int
    group: int = 32
    skip: re.Pattern[str] | None = None
    fp8: bool = False
    apart: frozenset[str] = frozenset()
    """Tensors outside of the part that generates text."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of rounding one weight, relative to its size."""

    name: str
    error: float
    weights: int


Tell = Callable[[str, int, int], None]
"""(weight name, how many are done, how many there are)."""


def convert(
    source: Path, target: Path, recipe: Recipe, tell: Tell = lambda name, done, total: None
) -> list[LayerError]:
    """Write `source`, quantised, to the new folder `target`, completely or not at all."""
    config = _check(source, target, recipe)
    ckpt = open_checkpoint(source)
    try:
        chosen = roundable(ckpt, recipe.skip, recipe.apart)
        whole = [] if recipe.fp8 else kept_whole(ckpt, chosen, recipe.group)
        chosen -= set(whole)
        check_kept(ckpt, chosen)
        with new_folder(target) as partial:
            errors = _write(ckpt, partial, chosen, recipe, tell)
            ignore = [name.removesuffix(".weight") for name in linear_names(ckpt) - chosen | {"lm_head.weight"}]
            left = left_out.told(ignore, {name.removesuffix(".weight") for name in recipe.apart})
            quant_config = compressed.fp8_config(left) if recipe.fp8 else compressed.quantization_config(
                recipe.bits, recipe.group, left
            )  # fmt: skip
            write_json(partial / "config.json", {**config, "quantization_config": quant_config})
            write_json(partial / REPORT, {"weights": [asdict(e) for e in errors], "bits": recipe.bits,
                                           "group": recipe.group, "kept": whole})  # fmt: skip
            copy_rest(source, partial)
    finally:
        ckpt.close()
    return errors


def _check(source: Path, target: Path, recipe: Recipe) -> dict[str, Any]:
    """Read the config of a source, and refuse one that cannot be quantised into this target."""
    config = read_config(source)
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "?") if isinstance(method, dict) else method
        raise ModelError(f"{source} is already quantised ({method}); start from the unquantised model.")
    check_upright(config, source)
    if recipe.group not in GROUPS:
        raise UserError(f"--group {recipe.group}: use 32, 64, 128 or 256.")
    check_free(target)
    return config


def check_upright(config: dict[str, Any], source: Path) -> None:
    """Refuse matrices stored as [in, out]: no form of files can record this, and methods would take rows for
    columns."""
    names = config.get("architectures")
    if any(name in _TRANSPOSED for name in (*(names if isinstance(names, list) else ()), config.get("model_type"))):
        raise ModelError(f"{source}: this architecture stores its matrices transposed, which the format cannot say.")


def roundable(ckpt: Checkpoint, skip: re.Pattern[str] | None, apart: Set[str] = frozenset()) -> set[str]:
    """Matrices that can be rounded: not among those always kept, not skipped, not of another part. None left is an
    error."""
    every = {name for name in linear_names(ckpt) - apart if not KEPT.search(name)}
    names = {name for name in every if skip is None or not skip.search(name)}
    if skip is not None and every and names == every:
        raise without_match(skip)
    if not names:
        raise ModelError("There is no weight to quantise here (or --skip leaves none).")
    return names


def without_match(skip: re.Pattern[str]) -> UserError:
    """The error for a --skip that leaves out nothing."""
    return UserError(f"--skip {shown(skip.pattern)} has no effect: it matches no weight that would be rounded.")


def kept_whole(ckpt: Checkpoint, names: Set[str], columns: int, rows: int = 1, *, chosen: bool = True) -> list[str]:
    """Those of these matrices that are not in whole groups of columns and rows, and what engines multiply with them as
    one: they keep their precision. If that is all of them, it is an error. chosen: people may choose the columns."""
    shapes = {name: ckpt.shape(name) or () for name in sorted(names)}
    odd = [name for name, shape in shapes.items() if shape[1] % columns or shape[0] % rows]
    together = joined(names)
    found = sorted({other for name in odd for other in together[name]})
    if odd and len(found) == len(names):
        groups = " and ".join(f"{size} {what}" for size, what in ((columns, "columns"), (rows, "rows")) if size > 1)
        width = shapes[odd[0]][1]
        other = "; choose another --group" if chosen and width % columns and not width % GROUPS[-1] else ""
        raise UserError(
            f"No matrix would be rounded: {odd[0]} has shape {list(shapes[odd[0]])}, which is not in whole groups of "
            f"{groups}, and the others are no better{other}."
        )
    return found


def checked(weight: Tensor, name: str) -> Tensor:
    """The weight, if it can be rounded: numbers of 16 bits or more, all of them finite."""
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ModelError(f"{name} is stored as {weight.dtype}: the model is quantised already.")
    if not bool(torch.isfinite(weight).all()):
        raise ModelError(f"{name} holds infinite numbers or NaN: the model is damaged.")
    return weight


def check_kept(ckpt: Checkpoint, chosen: Set[str]) -> None:
    """Refuse a model that holds NaN in a tensor that is copied as it is."""
    for name in ckpt.names():
        if name not in chosen:
            kept(ckpt.tensor(name), name)


def kept(tensor: Tensor, name: str) -> Tensor:
    """The tensor, if it can be copied as it is. (Masks may hold infinite numbers.)"""
    if bool(torch.isnan(tensor).any()):
        raise ModelError(f"{name} holds NaN: the model is damaged.")
    return tensor


def relative(rounded: Tensor, weight: Tensor) -> float:
    """The error of rounding relative to the matrix. (Squares of the smallest numbers are none of float32.)"""
    lost, size = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (rounded - weight, weight))
    return lost / size if size else 0.0


def check_lost(
    error: float, weight: Tensor, name: str, again: Callable[[float], float], advice: str = "use --skip for it"
) -> None:
    """Refuse a matrix whose numbers a form cannot express, by the relative error of rounding. again: the error of the
    matrix times a power of two. One of unusual size is rounded once more in the usual one: that must not be better."""
    most = float(weight.abs().max()) if weight.numel() else 0.0
    odd = most > 0 and not _USUAL[0] <= most <= _USUAL[1]
    if math.isfinite(error) and not (odd and error > _WORSE * again(math.ldexp(1.0, -math.frexp(most)[1])) + _MORE):
        return
    size = "smaller" if odd and most < 1.0 else "larger"
    raise ModelError(f"{name} holds {size} numbers than the scales of this form can express: {advice}.")


def linear_names(ckpt: Checkpoint) -> set[str]:
    """Every matrix that multiplies, recognised by its shape and name."""
    shapes = {name: ckpt.shape(name) or () for name in ckpt.names() if name.endswith(".weight")}
    matrices = (name for name, shape in shapes.items() if len(shape) == 2 and 0 not in shape)
    return {
        name for name in matrices if not re.search(r"(embed_tokens|embed_positions|wte|wpe|word_embed|embed_in)", name)
    }


def stacked_experts(ckpt: Checkpoint) -> list[str]:
    """Tensors that hold several experts each. They are not rounded."""
    return [name for name in ckpt.names() if "experts" in name and len(ckpt.shape(name) or ()) == 3]


def _write(ckpt: Checkpoint, folder: Path, chosen: set[str], recipe: Recipe, tell: Tell) -> list[LayerError]:
    """Write all weights in shards. Returns the error of each rounded one."""
    errors: list[LayerError] = []
    shards = Shards(folder)
    for name in ckpt.names():
        tensor = ckpt.tensor(name)
        if name not in chosen:
            shards.add({name: tensor})
            continue
        packed, error = _rounded(checked(tensor, name), recipe)

        def again(by: float, tensor: Tensor = tensor) -> float:
            return _rounded(tensor * by, recipe)[1]

        check_lost(error, tensor, name, again)
        base = name.removesuffix(".weight")
        shards.add({f"{base}.{part}": value for part, value in packed.items()})
        errors.append(LayerError(name, error, tensor.numel()))
        tell(name, len(errors), len(chosen))
    shards.close()
    return errors


def _rounded(tensor: Tensor, recipe: Recipe) -> tuple[dict[str, Tensor], float]:
    """The tensors that replace a weight, and the relative error."""
    if recipe.fp8:
        data, scales = fp8.round_rows(tensor)
        error = relative(fp8.widen(data, scales), tensor.float())
        return {"weight": data, "weight_scale": scales}, error
    q, scales, error = round_best(tensor, recipe.bits, recipe.group, tensor.dtype)
    shape = torch.tensor(tensor.shape, dtype=torch.int64)
    return {"weight_packed": compressed.pack(q, recipe.bits), "weight_scale": scales, "weight_shape": shape}, error


class Shards:
    """Tensors collected into files of a bounded size. files: the names in each file, of earlier ones too; wrote: called
    when a file is written, with all tensors that were added before."""

    def __init__(
        self, folder: Path, files: list[list[str]] | None = None, wrote: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.wrote = folder, wrote
        self.waiting: dict[str, Tensor] = {}
        self.files = [] if files is None else files

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors that must be in the same file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self.waiting.values()) + size > SHARD_BYTES:
            self._flush()
        self.waiting.update(tensors)

    def close(self) -> None:
        """Write the rest, and the index if there are several files. Then each has its name."""
        self._flush()
        count = len(self.files)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        names = names if count > 1 else ["model.safetensors"]
        if count > 1:
            where = {key: name for keys, name in zip(self.files, names, strict=True) for key in keys}
            total = sum(_data_bytes(self.folder / shard_name(number)) for number in range(count))
            table = {"metadata": {"total_size": total}, "weight_map": where}
            write_json(self.folder / "model.safetensors.index.json", table)
        for number, name in enumerate(names):
            (self.folder / shard_name(number)).chmod(0o644)  # the library makes files that only their owner may read
            (self.folder / shard_name(number)).rename(self.folder / name)

    def _flush(self) -> None:
        if self.waiting:
            self._write()
            self.wrote()

    def _write(self) -> None:
        whole: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.waiting.items():
            start = tensor.untyped_storage().data_ptr()
            # The library refuses tensors that share memory.
            whole[name] = tensor.clone() if start in seen else tensor.contiguous()
            seen.add(start)
        path = self.folder / shard_name(len(self.files))
        half = path.with_suffix(".writing")
        save_file(whole, half, metadata={"format": "pt"})
        half.rename(path)
        self.files.append(list(self.waiting))
        self.waiting = {}


def shard_name(number: int) -> str:
    """The name of a file of `Shards` until all are written."""
    return f"part-{number:05}.safetensors"


def _data_bytes(path: Path) -> int:
    """The size of a safetensors file without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def copy_rest(source: Path, target: Path) -> None:
    """Copy every small file that holds no weights and says nothing of them (tokenizer, templates, generation defaults),
    unless the target has its own."""
    for path in _files(source):
        fits = not path.name.endswith(_WEIGHTS) and path.name not in _OF_WEIGHTS
        if fits and path.stat().st_size <= MAX_COPIED_BYTES and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
