"""The native CPU backend. Owns: passing tensors to csrc's functions. Importing it raises ImportError if the native
module was not built (no compiler); the caller then uses plain torch.
"""

from tokenmill.kernels.cpu.kernels import CpuKernels

__all__ = ["CpuKernels"]
