"""Kernels that a device cannot hold. Owns: leaving their calls to plain torch, counted and said once.

Choices are checked against the device before they are made (`shared_memory` and the like). Where that was reckoned
wrongly, for an architecture or a compiler that nobody has tried, the model still runs, more slowly, and shows it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tokenmill.kernels.reference import ReferenceKernels

log = logging.getLogger("tokenmill.kernels")
UNFIT: tuple[type[Exception], ...] = (OutOfResources, PTXASError, CompilationError)
"""What Triton raises before it launches: nothing has been computed yet."""
M = TypeVar("M", bound=Callable[..., Any])


class Counting(Protocol):
    """Kernels that say what they could not do."""

    unfit: set[str]

    def count(self, op: str, *, fallback: bool = False) -> None: ...


def note_unfit(kernels: Counting, op: str, error: Exception) -> None:
    """Count the fallback; the first one of an operation is said."""
    kernels.count(op, fallback=True)
    if op not in kernels.unfit:
        kernels.unfit.add(op)
        reason = str(error).splitlines()[0][:200]
        log.warning("this device cannot run the kernel of %s (%s); plain torch computes it, more slowly", op, reason)


def else_reference(method: M) -> M:
    """A kernel operation whose call is computed by `ReferenceKernels` where the device cannot hold its kernel."""
    op = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except UNFIT as error:
            note_unfit(self, op, error)
            return getattr(ReferenceKernels, op)(self, *args, **kwargs)

    return call  # type: ignore[return-value]
