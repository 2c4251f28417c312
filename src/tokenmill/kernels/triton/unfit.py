"""Kernels that a device cannot hold. Owns: leaving their calls to plain torch, counted and said once.

Choices are checked against the device before they are made (`shared_memory` and the like). Where that was reckoned
wrongly, for an architecture or a compiler that nobody has tried, the model still runs, more slowly, and shows it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tokenmill.kernels.reference import ReferenceKernels

log = logging.getLogger("tokenmill.kernels")
UNFIT: tuple[type[Exception], ...] = (OutOfResources, PTXASError, CompilationError, RuntimeError)
"""What Triton raises before it launches: nothing has been computed yet. (Of RuntimeErrors `is_unfit` knows which.)"""
_LOWERING = ("PassManager::run failed", "failed to translate module to LLVM IR", "Internal Triton PTX codegen error")
Kind = tuple[object, ...]
M = TypeVar("M", bound=Callable[..., Any])


class Counting(Protocol):
    """Kernels that say what they could not do. unfit: kinds of calls that failed, and operations that were told of."""

    unfit: set[Kind]

    def count(self, op: str, *, fallback: bool = False) -> None: ...


def is_unfit(error: Exception) -> bool:
    """Can this device not hold the kernel, or its compiler not make it? Anything else is an error like any other, lack
    of memory and what CUDA reports among them, which torch derives from RuntimeError."""
    if isinstance(error, RuntimeError):
        return type(error) is RuntimeError and any(text in str(error) for text in _LOWERING)
    return True


def kind_of(op: str, arguments: Iterable[Any]) -> Kind:
    """What calls have in common that launch the same kernels: types and sizes, rows by their power of two. A kernel
    that does not compile would be compiled anew at each call, for seconds."""
    found: list[object] = [op]
    for value in arguments:
        if isinstance(value, Tensor):
            rows = value.shape[0].bit_length() if value.ndim else 0
            found.append((value.dtype, rows, *value.shape[1:]))
        elif isinstance(value, (str, int, type(None))):
            found.append(value)
        elif isinstance(steps := getattr(value, "max_query", None), int):
            found.append(steps.bit_length())
        elif isinstance(layer := getattr(value, "layer", None), int):
            found.append(layer)
    return tuple(found)


def note_unfit(kernels: Counting, op: str, kind: Kind, error: Exception) -> None:
    """Remember it; the first one of an operation is said."""
    kernels.unfit.add(kind)
    if (op,) not in kernels.unfit:
        kernels.unfit.add((op,))
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        log.warning("this device cannot run the kernel of %s (%s); plain torch computes it, more slowly", op, reason)


def else_reference(method: M) -> M:
    """A kernel operation whose call is computed by `ReferenceKernels` where the device cannot hold its kernel."""
    op = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(op, (*args, *kwargs.values())) if self.unfit else ()
        if not kind or kind not in self.unfit:
            try:
                return method(self, *args, **kwargs)
            except UNFIT as error:
                if not is_unfit(error):
                    raise
                note_unfit(self, op, kind_of(op, (*args, *kwargs.values())), error)
        self.count(op, fallback=True)
        return getattr(ReferenceKernels, op)(self, *args, **kwargs)

    return call  # type: ignore[return-value]
