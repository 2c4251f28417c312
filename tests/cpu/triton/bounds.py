"""Memory that kernels may touch, watched. Owns: comparing the addresses of every load, store and atomic of Triton's
interpreter with the memory of the tensors that a launch is given.

A GPU reads what lies behind a tensor and goes on, until there is nothing: the test that trips is seldom the one that is
wrong. Tensors that begin as they are found (torch.empty) are filled with the largest numbers, so that a place that was
read there lies far outside. Must not know: kernels, engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, interpreter_builder
from triton.tools.tensor_descriptor import TensorDescriptor

ACCESSES: dict[str, tuple[int, int | None]] = {
    "create_masked_load": (0, 1),
    "create_masked_store": (0, 2),
    "create_atomic_rmw": (1, 3),
    "create_atomic_cas": (0, None),
}
"""The interpreter's operations on memory (all others come down to these): which arguments are pointers and mask."""


class OutOfBoundsError(Exception):
    """A kernel touched memory that its launch was not given."""


def flat(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Arguments by name; those of a tuple by its name and theirs."""
    for name, given in arguments:
        if isinstance(given, tuple):
            fields = getattr(given, "_fields", range(len(given)))
            yield from flat((f"{name}.{field}", one) for field, one in zip(fields, given, strict=True))
        else:
            yield name, given


class Bounds:
    """Watches launches; `launches` counts them by kernel."""

    def __init__(self, opened: Callable[[Any], Any] = lambda x: x) -> None:
        """opened: what the interpreter is given in place of a tensor."""
        self.opened = opened
        self.kernel = ""
        self.starts = np.empty(0, dtype=np.uint64)
        self.ends = np.empty(0, dtype=np.uint64)
        self.names: list[str] = []
        self.launches: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[Bounds]:
        """All launches of this process, until it ends."""
        run, bounds = InterpretedFunction.run, self

        def watched(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            args, kwargs = tuple(map(bounds._open, args)), {k: bounds._open(v) for k, v in kwargs.items()}
            bounds._begin(function, args, kwargs)
            run(function, *args, grid=grid, warmup=warmup, **kwargs)

        plain = {name: getattr(InterpreterBuilder, name) for name in ACCESSES}
        filled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory
        InterpretedFunction.run = watched
        options = interpreter_builder.options
        interpreter_builder.options = replace(options, sanitize_overflow=True)
        for name, places in ACCESSES.items():
            setattr(InterpreterBuilder, name, self._watched(name, *places))
        try:
            yield self
        finally:
            InterpretedFunction.run = run
            interpreter_builder.options = options
            for name, operation in plain.items():
                setattr(InterpreterBuilder, name, operation)
            torch.use_deterministic_algorithms(filled[0], warn_only=filled[1])

    def _open(self, given: Any) -> Any:
        if isinstance(given, TensorDescriptor):
            return TensorDescriptor(
                self.opened(given.base), given.shape, given.strides, given.block_shape, given.padding
            )
        if isinstance(given, tuple):
            return type(given)(*map(self._open, given)) if hasattr(given, "_fields") else tuple(map(self._open, given))
        return self.opened(given)

    def _begin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A launch with these arguments."""
        self.kernel = function.fn.__name__
        self.launches[self.kernel] += 1
        parts: dict[int, tuple[int, str]] = {}
        for name, given in flat([*zip(function.arg_names, args, strict=False), *kwargs.items()]):
            tensor = given.base if isinstance(given, TensorDescriptor) else given
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                before = parts.get(memory.data_ptr(), (0, ""))[1]
                parts[memory.data_ptr()] = memory.data_ptr() + memory.nbytes(), f"{before} {name}"
        self.starts = np.array(sorted(parts), dtype=np.uint64)
        self.ends = np.array([parts[start][0] for start in sorted(parts)], dtype=np.uint64)
        self.names = [parts[start][1] for start in sorted(parts)]

    def _watched(self, name: str, pointer: int, mask: int | None) -> Callable[..., Any]:
        """This operation, after its pointers have been looked at."""
        plain, bounds = getattr(InterpreterBuilder, name), self

        def watched(builder: Any, *args: Any, **more: Any) -> Any:
            pointers = args[pointer]
            wanted = pointers.data
            if mask is not None:
                real = (
                    args[mask] if isinstance(args[mask], np.ndarray) else args[mask].data
                )  # descriptors have no handle
                wanted = wanted[np.broadcast_to(real.astype(bool), wanted.shape)]
            bounds._check(name, wanted.reshape(-1), max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            return plain(builder, *args, **more)

        return watched

    def _check(self, what: str, wanted: np.ndarray[Any, Any], size: int) -> None:
        if not wanted.size:
            return
        if not self.starts.size:
            raise OutOfBoundsError(f"{self.kernel}: {what} without any tensor")
        addresses = wanted.astype(np.uint64)
        place = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        wrong = (place < 0) | (addresses + np.uint64(size) > self.ends[np.maximum(place, 0)])
        if wrong.any():
            nearest, far = int(place[wrong][0]), "before all that it was given"
            if nearest >= 0:
                far = f"{int(addresses[wrong][0]) - int(self.ends[nearest])} bytes behind{self.names[nearest]}"
            raise OutOfBoundsError(f"{self.kernel}: {what} at {int(wrong.sum())} wrong places, the first {far}")
