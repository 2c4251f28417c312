"""Compute kernels. Owns: which backend serves a device. Knows nothing of models, caches or engines."""

from __future__ import annotations

import importlib

from tokenmill.core.protocols import Kernels
from tokenmill.kernels.reference import ReferenceKernels

__all__ = ["ReferenceKernels", "make_kernels"]


def make_kernels(device: str) -> Kernels:
    """A new set of kernels for "cpu" or "cuda...": native ones or Triton where they exist, else plain torch."""
    if device.split(":")[0] == "cpu":
        try:
            native = importlib.import_module("tokenmill.kernels.cpu").CpuKernels
        except (ImportError, AttributeError):
            return ReferenceKernels()
        return native()
    try:
        return importlib.import_module("tokenmill.kernels.triton").TritonKernels(device)
    except ImportError:
        return ReferenceKernels()
