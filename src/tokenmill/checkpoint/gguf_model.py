"""A GGUF file (or its parts) as a model. Owns: joining split files, and serving tensors under the names that models ask
for, with the converter's changes undone. Must not know: tokenizers, layers, how a quantised tensor is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint import gguf_config
from tokenmill.checkpoint.gguf_blocks import PLAIN, Blocks, blocks, decode, plain
from tokenmill.checkpoint.gguf_file import GgufFile, TensorInfo, open_gguf, part_names
from tokenmill.checkpoint.gguf_names import name_table
from tokenmill.checkpoint.gguf_source import Given, Joined, TensorSource
from tokenmill.checkpoint.no_model import check_gguf
from tokenmill.checkpoint.shards import check_shape, no_tensor
from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.core.errors import ModelError

MAX_PARTS = 1000
MAX_FACTORS = 1 << 16


class GgufModel:
    """One model's GGUF files: `metadata`, `config` (as in config.json) and tensors."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files = _open_parts(self.path)
        check_gguf(self.files[0], self.path)
        self.metadata: dict[str, Any] = self.files[0].metadata
        self.where: dict[str, GgufFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, info in file.tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{file.path}: tensor {name!r} is in {self.where[name].path} as well.")
                self.tensors[name], self.where[name] = info, file
        if not self.tensors:
            raise ModelError(f"{self.path}: it holds no tensors; a vocabulary alone is not a model.")
        self.config = gguf_config.read_config(self.metadata, self.tensors, self._numbers, str(self.path))

    def open_checkpoint(self) -> GgufCheckpoint:
        """Open the weights."""
        table = name_table(str(self.metadata["general.architecture"]), self.tensors, self.config)
        return GgufCheckpoint(self.path, table, self.where)

    def _numbers(self, name: str) -> list[float] | None:
        info = self.tensors.get(name)
        if info is None:
            return None
        if len(info.shape) != 1 or info.shape[0] > MAX_FACTORS:
            raise ModelError(f"{self.path}: tensor {name!r} should be a short list, not {info.shape}.")
        values: list[float] = decode(info, self.where[name].bytes_of(info)).float().tolist()
        return values


def _open_parts(path: Path) -> list[GgufFile]:
    """Open the file, or all files of a split model in order."""
    first = open_gguf(path)
    count = first.metadata.get("split.count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
        raise ModelError(f"{path}: split.count must be a number up to {MAX_PARTS}, not {count!r}.")
    if count <= 1:
        return [first]
    names = [path.parent / name for name in part_names(path.name)]
    if len(names) != count:
        raise ModelError(f"{path}: it is one of {count} parts, but is not named like NAME-00001-of-{count:05}.gguf.")
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        raise ModelError(f"{path}: the other parts of the model are needed beside it; missing: {', '.join(missing)}.")
    files = [first if name.name == path.name else open_gguf(name) for name in names]
    for number, file in enumerate(files):
        if file.metadata.get("split.no") != number or file.metadata.get("split.count") != count:
            raise ModelError(f"{file.path}: it does not say that it is part {number + 1} of {count}.")
    return files


def unweave(heads: int, rows: int) -> Tensor:
    """The order of rows that turns interleaved pairs of each head (a0 b0 a1 b1 ...) into halves (a0 a1 ... b0 b1
    ...)."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


class GgufCheckpoint(WholeTensors):
    """A Checkpoint over GGUF files. `blocks` gives quantised matrices as they lie in the file."""

    where: Path

    def __init__(
        self, path: Path, table: Mapping[str, TensorSource | Joined | Given], files: Mapping[str, GgufFile]
    ) -> None:
        self.where, self._table, self._files = path, dict(table), dict(files)

    def names(self) -> Iterable[str]:
        """All names: our own, and the stored names of tensors that mean nothing here."""
        return self._table.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self._table

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape as models expect it."""
        return self._source(name).shape

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in `dtype`, or as stored (float32 if it is quantised)."""
        source = self._source(name)
        check_shape(self.where, name, source.shape, shape)
        if isinstance(source, Joined | Given):
            made = self._joined(source) if isinstance(source, Joined) else torch.tensor(source.values)
            return made.reshape(source.shape) if dtype is None else made.reshape(source.shape).to(dtype)
        values = plain(source.info, self._data(source))
        if values is None:
            quantised = self._blocks(name, source)
            assert quantised is not None
            values = quantised.dense().view(source.info.shape if source.turned else source.shape)
        else:
            values = values if source.expert is None else values[source.expert]
            if (order := self._order(name, source)) is not None:
                values = values[order]
        if source.less:
            values = values.float() - source.less
        if source.negated_exp:
            values = torch.log(-values.float())
        if source.turned:
            values = values.transpose(-2, -1)
        if source.lifted:
            values = values.reshape(source.lifted)
        return values if dtype is None else values.to(dtype)

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Blocks | None:
        """The rows of a quantised tensor, not decoded. None: the tensor is not quantised, or its rows are columns in
        the model."""
        source = self._source(name)
        check_shape(self.where, name, source.shape, shape)
        return None if isinstance(source, Joined | Given) or source.turned else self._blocks(name, source)

    def _blocks(self, name: str, source: TensorSource) -> Blocks | None:
        if source.info.type.name in PLAIN:
            return None
        forget = partial(self._files[source.info.name].forget, source.info)
        found = blocks(source.info, self._data(source), forget)
        if source.expert is not None:
            rows = source.info.shape[1] if len(source.info.shape) > 2 else 1
            found = Blocks(found.type, found.raw[source.expert * rows : (source.expert + 1) * rows], found.forget)
        order = self._order(name, source) if len(source.shape) > 1 else None
        return found if order is None else found.take(order)

    def close(self) -> None:
        """Close the files. A map goes when the last tensor over it is freed."""
        self._table.clear()
        self._files.clear()

    def _joined(self, source: Joined) -> Tensor:
        """Keys and values head by head, as the product of both needs them."""
        parts = [decode(info, self._files[info.name].bytes_of(info)).view(info.shape).float()
                 for info in (source.info, source.values)]  # fmt: skip
        return torch.cat((parts[0].transpose(1, 2), parts[1]), dim=1).reshape(source.shape)

    def _source(self, name: str) -> TensorSource | Joined | Given:
        source = self._table.get(name)
        if source is None:
            raise no_tensor(self.where, name)
        return source

    def _data(self, source: TensorSource) -> memoryview:
        return self._files[source.info.name].bytes_of(source.info)

    def _order(self, name: str, source: TensorSource) -> Tensor | None:
        """The order of rows that models expect; None: the stored order."""
        if source.rows:
            return torch.tensor(source.rows)
        if not source.heads:
            return None
        rows = source.shape[0]
        if rows % (2 * source.heads):
            raise ModelError(f"{self.where}: the {rows} rows of {name!r} are not pairs of {source.heads} heads.")
        return unweave(source.heads, rows)
