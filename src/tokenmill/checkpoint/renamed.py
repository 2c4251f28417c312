"""A checkpoint under other names. Owns: translating a requested name into the stored one before asking the inner
checkpoint.

A checkpoint that lists no names (invented weights) is asked by the requested names. Must not know: architectures, why
names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tokenmill.checkpoint.whole_tensors import AroundCheckpoint
from tokenmill.compute.model import Checkpoint


class RenamedCheckpoint(AroundCheckpoint):
    """The tensors of `inner` that `table` (name -> stored name) lists. An empty table lists all."""

    def __init__(self, inner: Checkpoint, table: Mapping[str, str]) -> None:
        super().__init__(inner)
        self.table = dict(table)

    def names(self) -> Iterable[str]:
        """The new names."""
        return self.table.keys()

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return name in self.table if self.table else self.inner.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """As the inner one."""
        return self.inner.shape(self.stored(name))

    def __getattr__(self, name: str) -> Any:
        """Methods that only some checkpoints have (blocks)."""
        found = getattr(self.inner, name)
        return partial(self._blocks, found) if name == "blocks" else found

    def _blocks(self, ask: Callable[..., Any], name: str, *args: Any) -> Any:
        return ask(self.stored(name), *args)

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """The inner one's name."""
        return self.table.get(name, name)
