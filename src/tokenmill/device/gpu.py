"""The GPU properties by which kernels are chosen. Owns: these as plain data, which can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """Its name, compute capability, processors, shared memory of a program, memory, what of it is free, L2 cache."""

    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    memory: int
    free: int
    cache: int = 50 << 20


def gpu_of(device: str) -> Gpu:
    """The properties of this NVIDIA GPU."""
    found: Any = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        total,
        free,
        found.L2_cache_size,
    )
