"""CUDA graphs of work that may be impossible to record. Owns: finding that out, and what must have run before.

Work that waits for the device cannot be recorded, and work whose scratch memory is not there yet must not be. So work
runs once before it is recorded, unless work of its kind that needed at least as much has already been.
Must not know: what is computed, which recordings are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from tokenmill.compute.forward import Kernels
from tokenmill.device.graphs import Recorder, Recording

T = TypeVar("T")


class GraphMaker:
    """Makes recordings whose temporary tensors share the memory of `recorder` (None: of one made at first use).
    on_all: is it so on all ranks that do this work together? If work runs on one rank and not on another, its sums
    wait for ever. possible: becomes False once some work proves impossible to record."""

    def __init__(
        self, kernels: Kernels, recorder: Recorder | None = None, on_all: Callable[[bool], bool] = bool
    ) -> None:
        self.kernels = kernels
        self.recorder = recorder
        self.on_all = on_all
        self.possible = True
        self.proven: set[Hashable] = set()
        """Kinds of work of which some has been recorded."""

    def record_work(self, compute: Callable[[], T], kind: Hashable = None) -> Recording[T] | None:
        """Record work that may run more than once; None: one of its operations waits for the device. kind: what this
        work has in common with later work that needs no more scratch memory; None: there is none such."""
        found = self._record_unseen(compute) if kind in self.proven else None
        if kind in self.proven and not self.on_all(found is not None):
            found = None
        if found is None:
            before = self.kernels.waits
            compute()  # allocates scratch memory and shows whether an operation waits
            self.possible = self.kernels.waits == before
            found = self._recorder().record(compute) if self.possible else None
        if found is not None and kind is not None:
            self.proven.add(kind)
        return found

    def _record_unseen(self, compute: Callable[[], T]) -> Recording[T] | None:
        """Record work that has never run, which halves the time that start-up takes for each recording. None: the work
        does something that no work of this kind has done yet."""
        before = self.kernels.waits
        try:
            found = self._recorder().record(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None
        return found if self.kernels.waits == before else None

    def _recorder(self) -> Recorder:
        if self.recorder is None:
            self.recorder = Recorder()
        return self.recorder
