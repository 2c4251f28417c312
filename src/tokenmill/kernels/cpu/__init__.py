"""The native CPU backend. Owns: the way from tensors to csrc's functions. Importing it fails with ImportError where
the native module was not built (no compiler); the caller then uses plain torch."""

from tokenmill.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
