"""Compute kernels. Owns: which backend serves a device. Must not know: models, caches, engines."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

import torch

from tokenmill.compute.forward import Kernels
from tokenmill.core.errors import UserError
from tokenmill.kernels.reference import ReferenceKernels

__all__ = ["ReferenceKernels", "has_kernels", "make_kernels"]


def has_kernels(device: str) -> bool:
    """Are there kernels of our own for it, beyond plain torch? AMD's GPUs are named cuda, too."""
    return device.startswith("cpu") or (device.startswith("cuda") and torch.version.hip is None)


def make_kernels(
    device: str,
    *,
    steady: bool = False,
    without: Collection[str] = (),
    cache: Path | None = None,
    pruned: str = "auto",
) -> Kernels:
    """A new set of kernels for a device: native ones on CPUs, Triton on NVIDIA's GPUs, plain torch on any other.

    steady: rows do not depend on their company (on a CPU they never do). without: some of bounds.LEFT_OUT, GPU only.
    cache: the folder that keeps what was found to be fastest, GPU only. pruned: are matrices with many zeros held
    without them ("packed"), with them ("dense"), or as the backend likes ("auto")?
    """
    if not has_kernels(device):
        if steady:
            raise UserError(
                f"--deterministic needs kernels of our own, and {device} has none: leave it out.", param="deterministic"
            )
        return ReferenceKernels(instead=True)
    if device.split(":")[0] == "cpu":
        try:
            native = importlib.import_module("tokenmill.kernels.cpu").CpuKernels
        except (ImportError, AttributeError):
            return ReferenceKernels()
        return native(pruned=pruned)
    try:
        triton = importlib.import_module("tokenmill.kernels.triton").TritonKernels
    except ImportError:
        return ReferenceKernels()
    return triton(device, steady=steady, without=without, cache=cache, pruned=pruned)
