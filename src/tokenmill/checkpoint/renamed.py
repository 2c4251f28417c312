"""A checkpoint under other names. Owns: translating a requested name into the stored one before asking the inner
checkpoint.

A checkpoint that lists no names (invented weights) is asked by the requested names. Must not know: architectures, why
names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint


class RenamedCheckpoint:
    """The tensors of `inner` that `table` (name -> stored name) lists. An empty table lists all."""

    def __init__(self, inner: Checkpoint, table: Mapping[str, str]) -> None:
        self.inner, self.table = inner, dict(table)

    def names(self) -> Iterable[str]:
        """The new names."""
        return self.table.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self.table if self.table else self.inner.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As the inner one."""
        return self.inner.shape(self._stored(name))

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor."""
        return self.inner.tensor(self._stored(name), shape, dtype)

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
        return self.inner.part(self._stored(name), dim, start, stop, shape, dtype)

    def __getattr__(self, name: str) -> Any:
        """Methods that only some checkpoints have (blocks)."""
        found = getattr(self.inner, name)
        return partial(self._blocks, found) if name == "blocks" else found

    def _blocks(self, ask: Callable[..., Any], name: str, *args: Any) -> Any:
        return ask(self._stored(name), *args)

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()

    def _stored(self, name: str) -> str:
        return self.table.get(name, name)
