"""Opening a model folder. Owns: which weight format a folder has, and reading its config files.
Must not know: architectures, what a config key means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tokenmill.checkpoint.dummy import DummyCheckpoint
from tokenmill.checkpoint.safetensors import SafetensorsCheckpoint, open_safetensors
from tokenmill.checkpoint.torch_bin import TorchBinCheckpoint, open_torch_bin
from tokenmill.core.errors import ModelError, NoWeightsError, UserError
from tokenmill.core.files import present, read_object

FolderCheckpoint = SafetensorsCheckpoint | TorchBinCheckpoint | DummyCheckpoint
LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
MAX_CONFIG_BYTES = 4 << 20
_STORED_AS = ("quantization_config", "compression_config")
"""Keys that say how weights are stored; the second is older. They may also lie in a model's text part."""
_OF_MLX = ("quantization", "quantization_config")
"""The keys under which MLX writes how weights are stored, without its name."""
BESIDE = "quantize_config.json"
"""What AutoGPTQ says of its files where config.json has no `quantization_config`."""


def open_checkpoint(
    path: Path | str, load_format: str = "auto", *, seed: int = 0, device: torch.device | str = "cpu"
) -> FolderCheckpoint:
    """Open the weights of a folder. "auto" prefers safetensors; only dummy weights use `seed` and `device`."""
    folder = Path(path)
    if load_format not in LOAD_FORMATS:
        raise UserError(f"load format {load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return DummyCheckpoint(seed, device)
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder")
    found: SafetensorsCheckpoint | TorchBinCheckpoint | None = None
    if load_format in ("auto", "safetensors"):
        found = open_safetensors(folder)
    if found is None and load_format in ("auto", "pt"):
        found = open_torch_bin(folder)
    if found is None:
        wanted = {"safetensors": "*.safetensors", "pt": "pytorch_model*.bin"}
        names = wanted.get(load_format, "*.safetensors or pytorch_model*.bin")
        raise NoWeightsError(
            f"{folder}: no weights found ({names}); download them, or use --load-format dummy to try without"
        )
    return found


def read_config(path: Path | str) -> dict[str, Any]:
    """Read a folder's config.json. What it says about stored weights is under `quantization_config`, wherever tools
    write it. A ModelError names the file."""
    config, beside = read_object(Path(path) / "config.json", MAX_CONFIG_BYTES), Path(path) / BESIDE
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    said = next((found for part in parts for key in _STORED_AS if (found := part.get(key))), None)
    mlx = next((found for part in parts for key in _OF_MLX if _is_mlx(found := part.get(key))), None)
    if mlx is not None and (said is None or _is_mlx(said)):
        said = {**mlx, "quant_method": "mlx"}
        config = {key: value for key, value in config.items() if key != "quantization"}
    if said is None and present(beside):
        said = {"quant_method": "gptq", **read_object(beside, MAX_CONFIG_BYTES)}
    return config if said is None else {**config, "quantization_config": said}


def _is_mlx(said: object) -> bool:
    return isinstance(said, dict) and {"group_size", "bits"} <= said.keys() and "quant_method" not in said


def read_generation_config(path: Path | str) -> dict[str, Any]:
    """A folder's generation_config.json; {} when there is none."""
    file = Path(path) / "generation_config.json"
    return read_object(file, MAX_CONFIG_BYTES) if present(file) else {}
