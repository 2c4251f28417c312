"""Compute kernels. Owns: which backend serves a device. Knows nothing of models, caches or engines."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from tokenmill.core.forward import Kernels
from tokenmill.kernels.reference import ReferenceKernels

__all__ = ["ReferenceKernels", "make_kernels"]


OPTIONAL = ("fusion", "cascade", "dependent-launch", "many-rows")
"""What kernels of a GPU can do without, to measure its worth."""


def make_kernels(device: str, *, steady: bool = False, without: Collection[str] = ()) -> Kernels:
    """A new set of kernels for "cpu" or "cuda...": native ones or Triton where they exist, else plain torch.

    steady: rows do not depend on their company (on a CPU they never do). without: some of OPTIONAL, GPU only.
    """
    if device.split(":")[0] == "cpu":
        try:
            native = importlib.import_module("tokenmill.kernels.cpu").CpuKernels
        except (ImportError, AttributeError):
            return ReferenceKernels()
        return native()
    try:
        triton = importlib.import_module("tokenmill.kernels.triton").TritonKernels
    except ImportError:
        return ReferenceKernels()
    return triton(device, steady=steady, without=without)
