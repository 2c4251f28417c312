"""Triton kernels for NVIDIA GPUs. Owns: the class that overrides the reference. Importing it needs triton."""

from __future__ import annotations

from tokenmill.kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
