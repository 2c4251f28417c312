"""Zeroed memory for caches. Owns: making it cost nothing until it is used.

Must not know: what lies in it.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def zeros(count: int, size: int, device: str) -> Tensor:
    """Zeroed bytes [count, size]. On a CPU the system provides memory when a page is first used, so an unfilled cache
    costs neither time nor memory."""
    if device != "cpu":
        return torch.zeros(count, size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(1, count * size), **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[: count * size].view(count, size)
