"""How much memory there is. Owns: the only questions about devices that the rest of the package asks.

This package is the only place that names cuda outside of Triton kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
from collections.abc import Callable

import torch

from tokenmill.core.errors import UserError


def pick_device(wanted: str) -> str:
    """`auto` becomes cuda where there is one; a device that is not there is a UserError."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = wanted.partition(":")
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise UserError(f"Unknown device {wanted!r}: use cpu, cuda, cuda:N or auto.", param="device")
    if not torch.cuda.is_available():
        raise UserError("No NVIDIA GPU can be used here (torch sees none); use --device cpu.", param="device")
    if index and not (index.isdigit() and int(index) < torch.cuda.device_count()):
        raise UserError(f"There is no device {wanted!r}: {torch.cuda.device_count()} GPUs are visible.", param="device")
    return wanted


def devices_like(device: str) -> list[str]:
    """All devices of this kind, this one first."""
    if not device.startswith("cuda"):
        return [device]
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    own = device if ":" in device else "cuda:0"
    return [own, *(name for name in names if name != own)]


def free_bytes(device: str) -> int:
    """Memory that could be taken now, without swapping; cgroup limits count."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_meminfo("MemAvailable"), _cgroup_free())


def total_bytes(device: str) -> int:
    """Size of the device's memory."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[1])
    return _meminfo("MemTotal")


def peak_bytes(device: str) -> int:
    """Most memory that this process has held: what getrusage says counts the process that started it, too."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_reserved(device))
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth_bytes(device: str, work: Callable[[], object]) -> int:
    """Memory that `work` needs at its peak beyond what is held before it, on a GPU."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def release(device: str) -> None:
    """Give memory that no tensor holds back to the device, or to the system: loading leaves holes in glibc's heap."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def describe(device: str) -> str:
    """The device in words."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"CPU, {torch.get_num_threads()} threads"


def _meminfo(name: str) -> int:
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30


def _cgroup_free() -> int:
    base = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (base / "memory.max").read_text().strip()
        return (1 << 62) if limit == "max" else max(0, int(limit) - int((base / "memory.current").read_text()))
    except (OSError, ValueError):
        return 1 << 62
