"""A model's files, as Ollama tells of them. Owns: their format, size, age, parameters, and how they hold numbers.

Headers alone are read. Must not know: engines, endpoints.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.core.errors import ModelError
from tokenmill.demo import demo_dir

FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE"},
}
"""general.file_type of GGUF files -> what everybody calls it."""
MAX_HEADER = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """What lies on the disk. parameters 0, level "": not known."""

    format: str
    size: int
    modified: float
    parameters: int = 0
    level: str = ""


def stored(root: str) -> Stored | None:
    """The files of the model of this name; None for those that do not lie where the name says (hub models)."""
    path = demo_dir("main") if root == "demo" else Path(root).expanduser()
    try:
        if path.is_file():
            return _gguf([*_parts(path)])
        if not path.is_dir():
            return None
        plain = [*path.glob("*.safetensors")] or [*path.glob("pytorch_model*.bin")]
        if not plain:
            found = sorted(path.glob("*.gguf"))
            return _gguf(found) if found else None
        return _folder(path, plain)
    except (ModelError, OSError, ValueError):
        return None


def _parts(path: Path) -> list[Path]:
    """All files of a model in parts."""
    head, mark, _ = path.name.partition("-00001-of-")
    return sorted(path.parent.glob(f"{head}-*-of-*.gguf")) if mark else [path]


def _gguf(files: list[Path]) -> Stored:
    opened = [open_gguf(file) for file in files]
    tensors = [info for file in opened for info in file.tensors.values()]
    kind = FILE_TYPES.get(opened[0].metadata.get("general.file_type", -1))
    if kind is None:
        sizes: Counter[str] = Counter()
        for info in tensors:
            sizes[info.type.name] += info.stop - info.start
        kind = max(sizes, key=sizes.__getitem__) if sizes else ""
    count = sum(math.prod(info.shape) for info in tensors)
    return Stored("gguf", _size(files), _modified(files), count, kind)


def _folder(path: Path, files: list[Path]) -> Stored:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    scheme = config.get("quantization_config") or {}
    form = "safetensors" if files[0].suffix == ".safetensors" else "pytorch"
    entries = [entry for file in files for entry in _header(file)] if form == "safetensors" else []
    if scheme:
        return Stored(form, _size(files), _modified(files), 0, str(scheme.get("quant_method", "")).upper())
    kinds: Counter[str] = Counter()
    for entry in entries:
        kinds[str(entry["dtype"])] += math.prod(entry["shape"])
    level = max(kinds, key=kinds.__getitem__) if kinds else str(config.get("torch_dtype") or config.get("dtype") or "")
    return Stored(form, _size(files), _modified(files), sum(kinds.values()), level.upper())


def _header(file: Path) -> list[dict[str, Any]]:
    """The tensors that a safetensors file lists."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER:
            raise ValueError(size)
        found = json.loads(opened.read(size))
    return [entry for name, entry in found.items() if name != "__metadata__"]


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _modified(files: list[Path]) -> float:
    return max(file.stat().st_mtime for file in files)
