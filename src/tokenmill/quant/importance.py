"""What llama.cpp's `imatrix` counted: how large the inputs of each column were. Owns: reading such a GGUF file.

    NAME.in_sum2 float32 [columns], or [experts, columns]: sums of squares    NAME.counts float32: of so many tokens
Must not know: how rounding uses it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_file import GgufFile, TensorInfo, open_gguf
from tokenmill.core.errors import ModelError

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read(path: Path) -> dict[str, Tensor]:
    """Name of a matrix in GGUF files -> the mean square of each column's input [experts, columns]; columns (and
    experts) that were never reached count as all others do on average."""
    file = open_gguf(path)
    found = {}
    for name, info in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        counts = file.tensors.get(base + _COUNTS)
        if counts is None:
            raise ModelError(f"{path}: '{name}' has no counts beside it.")
        sums, count = (_numbers(file, each, path) for each in (info, counts))
        sums, count = sums.view(-1, info.shape[-1]), count.reshape(-1, 1)
        if count.shape[0] not in (1, sums.shape[0]):
            raise ModelError(f"{path}: '{name}' has {sums.shape[0]} matrices and {count.shape[0]} counts.")
        if not bool(torch.isfinite(sums).all()) or bool((sums < 0).any()) or not bool((count >= 0).all()):
            raise ModelError(f"{path}: '{name}' holds numbers that are no sums of squares.")
        mean = sums / count.clamp(min=1.0)
        usual = mean.mean(1, keepdim=True)
        found[base] = torch.where(usual > 0, torch.where(mean > 0, mean, usual * 1e-4), 1.0)
    if not found:
        raise ModelError(f"{path} is no importance file of llama.cpp: it has no tensors named '...{_SUMS}'.")
    return found


def _numbers(file: GgufFile, info: TensorInfo, path: Path) -> Tensor:
    if info.type.name != "F32":
        raise ModelError(f"{path}: '{info.name}' is stored as {info.type.name}, not F32.")
    return torch.frombuffer(bytearray(file.bytes_of(info)), dtype=torch.float32).view(info.shape)
