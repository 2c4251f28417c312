"""Work that a drafter does again and again. Owns: recordings of it by key, and when they are made.

The work reads its inputs from fixed places and changes nothing but its results, so it may run twice. A CUDA graph is
made when a key is first met (or ahead), a native tape when it comes again.
Must not know: what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.runner.graph_maker import GraphMaker

T = TypeVar("T")
ROOM = 32 << 20
"""Bytes that the temporary tensors of native tapes may take together: tapes run one after the other."""
MOST = 256
"""The most recordings that are kept; further work is computed call by call."""


class Replays:
    """Recordings of one drafter. record: False if nothing is recorded at all."""

    def __init__(self, kernels: Kernels, *, record: bool) -> None:
        self.kernels = kernels
        self.possible = record
        self.made: dict[Hashable, tuple[Any, Callable[[], object], object]] = {}
        """The result, how to compute it again, and what holds the memory that this reads."""
        self.seen: set[Hashable] = set()
        self.room: Tensor | None = None
        self.graphs = GraphMaker(kernels)

    def make_or_replay(self, key: Hashable, computing: Callable[[], Callable[[], T]]) -> T:
        """What the function that `computing` returns makes. Only that function is recorded, not the call of
        `computing`. Equal keys must mean the same work on the same memory."""
        found = self.made.get(key)
        if found is not None:
            found[1]()
            return found[0]
        compute = computing()
        if not self.possible or len(self.made) >= MOST:
            return compute()
        return self._tape(key, compute) if self.kernels.records else self._graph(key, compute)

    def forget_weights(self) -> None:
        """Drop tapes, which name copies that kernels made of small tensors. Graphs stay: they read what a weight
        settled into."""
        if self.kernels.records:
            self.made.clear()
            self.seen.clear()

    def _tape(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self.seen:
            self.seen.add(key)
            return compute()
        if self.room is None:  # numpy's zeros take memory only when they are first used
            self.room = torch.from_numpy(np.zeros(ROOM, dtype=np.uint8))
        made, again = self.kernels.record(compute, self.room)
        if again is None:
            self.possible = False
        else:
            self.made[key] = made, again, compute
        return made

    def _graph(self, key: Hashable, compute: Callable[[], T]) -> T:
        recording = self.graphs.record_work(compute)
        if recording is None:
            self.possible = False
            return compute()
        self.made[key] = recording.made, recording.replay, compute
        return recording.replay()
