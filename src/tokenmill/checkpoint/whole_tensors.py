"""What checkpoints share: those whose whole tensors cost little, as they are maps of files, or are made as a whole, and
those that stand around another one. Owns: cutting parts out of the former; asking the latter's inner one; putting
tensors in the place of others.
Must not know: file formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError


class WholeTensors(ABC):
    """A checkpoint whose parts are views of whole tensors. where: the file or folder that errors name, if there is
    one."""

    where: Path | None = None

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor."""

    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """start:stop of one dimension. Of a mapped file only that part is read, when it is used."""
        whole = self.tensor(name, shape, dtype)
        if not 0 <= dim < whole.ndim or not 0 <= start <= stop <= whole.shape[dim]:
            where = "" if self.where is None else f"{self.where}: "
            raise ModelError(
                f"{where}tensor {name!r} of shape {list(whole.shape)} has no part {start}:{stop} in dimension {dim}"
            )
        return whole.narrow(dim, start, stop - start)


class AroundCheckpoint:
    """A checkpoint around another one. What it makes of whole tensors it makes of parts, too."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner

    def stored(self, name: str, shape: tuple[int, ...] | None) -> str:
        """The inner one's name of a tensor that is asked for."""
        return name

    def taken(self, name: str, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        """What is given of a tensor, or a part of one."""
        return found

    def names(self) -> Iterable[str]:
        """As the inner one."""
        return self.inner.names()

    def has(self, name: str) -> bool:
        """As the inner one."""
        return self.inner.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As the inner one."""
        return self.inner.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor."""
        return self.taken(name, self.inner.tensor(self.stored(name, shape), shape, dtype), dtype)

    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """start:stop of one dimension."""
        return self.taken(name, self.inner.part(self.stored(name, shape), dim, start, stop, shape, dtype), dtype)

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()


class Overlaid(WholeTensors):
    """A checkpoint in which tensors are given in place of another one's, or beside them, and some are hidden."""

    def __init__(self, inner: Checkpoint, given: Mapping[str, Tensor], hidden: Iterable[str] = ()) -> None:
        self.inner, self.given, self.hidden = inner, dict(given), frozenset(hidden)
        self.close = inner.close

    def names(self) -> Iterable[str]:
        """All names."""
        return dict.fromkeys([*(name for name in self.inner.names() if name not in self.hidden), *self.given])

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self.given or (name not in self.hidden and self.inner.has(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Its shape."""
        return tuple(self.given[name].shape) if name in self.given else self.inner.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """What is given, or else the inner one's tensor."""
        return self.given[name] if name in self.given else self.inner.tensor(name, shape, dtype)

    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """start:stop of one dimension."""
        if name in self.given:
            return super().part(name, dim, start, stop, shape, dtype)
        return self.inner.part(name, dim, start, stop, shape, dtype)

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Any | None:
        """Quantised blocks, if the inner one has any."""
        ask = getattr(self.inner, "blocks", None)
        return None if ask is None or name in self.given else ask(name, shape)
