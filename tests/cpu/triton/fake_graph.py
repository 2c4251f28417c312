"""CUDA graphs without a device: what ran is noted, operation by operation, and a replay runs the same operations on the
same tensors. Nothing of the Python around them runs again, so a number that was read while recording stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

_RUN = InterpretedFunction.run
_MEMORY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class FakeRecording:
    """Noted operations; `made` are the tensors that a replay fills again."""

    def __init__(self, operations: list[Callable[[], None]], made: Any) -> None:
        self.operations = operations
        self.made = made

    def replay(self) -> Any:
        for operation in self.operations:
            operation()
        return self.made


class FakeRecorder:
    """In place of device.graphs.Recorder, for kernels in Triton's interpreter."""

    def record(self, compute: Callable[[], Any]) -> FakeRecording:
        notes = _Notes()
        InterpretedFunction.run = notes.launch
        try:
            with notes:
                made = compute()
        finally:
            InterpretedFunction.run = _RUN
        return FakeRecording(notes.operations, made)


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.launching = False

    @property
    def launch(self) -> Any:
        notes = self

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            def again() -> None:
                _RUN(function, *args, grid=grid, warmup=warmup, **kwargs)

            notes.launching = True  # what the interpreter does with torch is not part of the step
            again()
            notes.launching = False
            notes.operations.append(again)

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self.launching and func._schema.name not in _MEMORY:
            self.operations.append(lambda: _again(func, args, kwargs, made))
        return made


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    found = func(*args, **kwargs)
    for old, new in zip(tree_leaves(made), tree_leaves(found), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
