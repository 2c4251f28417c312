"""A model's files, as Ollama tells of them. Owns: their format, size, age, parameters, and how they hold numbers.

Headers alone are read. Must not know: engines, endpoints.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.pull import parts_of
from tokenmill.core.errors import ModelError
from tokenmill.core.files import in_home, read_object
from tokenmill.demo import demo_dir

FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4"},
}
"""`general.file_type` of GGUF files -> the usual name."""
MAX_HEADER = 64 << 20
MAX_CONFIG = 4 << 20
MAX_NAME = 100
MOST_NUMBERS = 1 << 63
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""GGUF's names of a model's sizes, behind its family's, and those in config.json."""


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """A model's files on disk. parameters 0, level or family "": not known. sizes: those of SIZES that are stated."""

    format: str
    size: int
    modified: float
    parameters: int = 0
    level: str = ""
    family: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    def model_info(self, family: str) -> dict[str, int]:
        """The parameters and sizes under the names of /api/show."""
        counted = {"general.parameter_count": self.parameters} if self.parameters else {}
        return counted | {f"{family}.{name}": value for name, value in self.sizes.items()}


def read_stored(root: str) -> StoredFiles | None:
    """The files of the model of this name. None: they do not lie where the name says (hub models)."""
    path = demo_dir("main") if root == "demo" else in_home(root)
    try:
        if path.is_file():
            return _gguf(parts_of(path))
        if not path.is_dir():
            return None
        plain = [*path.glob("*.safetensors")] or [*path.glob("pytorch_model*.bin")]
        if not plain:
            found = sorted(path.glob("*.gguf"))
            return _gguf(found) if found else None
        return _folder(path, plain)
    except (ModelError, OSError, ValueError, RecursionError):
        return None


def _gguf(files: list[Path]) -> StoredFiles:
    opened = [open_gguf(file) for file in files]
    tensors = [info for file in opened for info in file.tensors.values()]
    file_type = opened[0].metadata.get("general.file_type")
    kind = FILE_TYPES.get(file_type) if isinstance(file_type, int) else None
    if kind is None:
        sizes: Counter[str] = Counter()
        for info in tensors:
            sizes[info.type.name] += info.stop - info.start
        kind = max(sizes, key=sizes.__getitem__) if sizes else ""
    count = sum(math.prod(info.shape) for info in tensors)
    family = text_of_header(opened[0].metadata.get("general.architecture"))
    stated = _sizes({name: opened[0].metadata.get(f"{family}.{name}") for name in SIZES})
    return StoredFiles("gguf", _size(files), _modified(files), count, kind, family, stated)


def _folder(path: Path, files: list[Path]) -> StoredFiles:
    config = read_object(path / "config.json", MAX_CONFIG)
    scheme, family = config.get("quantization_config"), text_of_header(config.get("model_type"))
    stated = {**nested, **config} if isinstance(nested := config.get("text_config"), dict) else config
    sizes = _sizes({name: stated.get(key) for name, key in SIZES.items()})
    form = "safetensors" if files[0].suffix == ".safetensors" else "pytorch"
    if isinstance(scheme, dict) and scheme:
        level = text_of_header(scheme.get("quant_method")).upper()
        return StoredFiles(form, _size(files), _modified(files), 0, level, family, sizes)
    kinds: Counter[str] = Counter()
    for file in files if form == "safetensors" else ():
        for kind, count in _header(file):
            kinds[kind] += count
    level = (
        max(kinds, key=kinds.__getitem__) if kinds else text_of_header(config.get("torch_dtype") or config.get("dtype"))
    )
    return StoredFiles(form, _size(files), _modified(files), sum(kinds.values()), level.upper(), family, sizes)


def _sizes(stated: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in stated.items() if type(value) is int and 0 < value < MOST_NUMBERS}


def _header(file: Path) -> list[tuple[str, int]]:
    """(dtype, count of numbers) for each tensor in a safetensors header. A ValueError says that it is not one: clients
    send such files, and nothing has loaded this one yet."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER:
            raise ValueError(size)
        found = json.loads(opened.read(size))
    if not isinstance(found, dict):
        raise ValueError("no table")
    return [_tensor(entry) for name, entry in found.items() if name != "__metadata__"]


def _tensor(entry: object) -> tuple[str, int]:
    kind, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("no tensor")
    count = math.prod(shape)
    if count > MOST_NUMBERS:
        raise ValueError("no such tensor")
    return kind[:MAX_NAME], count


def text_of_header(value: object) -> str:
    """A name in a file, or "" if it is not a name."""
    return value[:MAX_NAME] if isinstance(value, str) else ""


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _modified(files: list[Path]) -> float:
    return max(file.stat().st_mtime for file in files)
