"""Which devices there are, and how much memory each has. Owns: the only questions about devices that the rest of the
package asks.

Devices have torch's names: the CPU, NVIDIA's and AMD's GPUs (both cuda), Apple's mps, Intel's xpu. Besides Triton
kernels, only this package asks torch.cuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from tokenmill.core.errors import UserError
from tokenmill.device.named import no_device, unknown_device

KNOWN = ("cuda", "mps", "xpu")
"""Kinds that `others` looks for; any that torch has a module for can be asked for by name."""


def pick_device(wanted: str) -> str:
    """The device of this name. `auto` becomes cuda if there is one; a device that does not exist is a UserError."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = wanted.partition(":")
    if kind == "cpu":
        return "cpu"
    if kind in ("rocm", "hip") and torch.version.hip is not None:
        kind = "cuda"
    module = _module(kind)
    if module is None:
        raise unknown_device(wanted)
    if not _there(module):
        raise no_device(kind)
    if colon and not (index.isdigit() and int(index) < module.device_count()):
        many = f"{module.device_count()} of this kind are visible"
        raise UserError(f"There is no device {wanted!r}: {many}.", param="device")
    return kind + colon + index


def use(device: str) -> None:
    """Send this thread's work to that device from here on, if there are several of its kind."""
    module = _module(device)
    if ":" in device and hasattr(module, "set_device"):
        module.set_device(int(device.partition(":")[2]))


def place(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which a thread's work goes to that device; behind it the thread has the one it had.
    Without a number: the device that this thread has now. A thread begins with the first one, whoever made it."""
    module = _module(device)
    if module is None or module.device_count() < 2 or not hasattr(module, "device"):
        return contextlib.nullcontext
    number = device.partition(":")[2]
    return functools.partial(module.device, int(number) if number else module.current_device())


def records(device: str) -> bool:
    """Can steps be recorded on it, whatever the kernels?"""
    return device.startswith("cuda") and torch.version.hip is None


def others() -> list[str]:
    """Devices that torch sees and `auto` does not take."""
    picked = pick_device("auto")
    found = [kind for kind in KNOWN if (module := _module(kind)) is not None and _there(module)]
    return [kind for kind in found if kind != picked]


def devices_like(device: str) -> list[str]:
    """All devices of this kind, this one first."""
    kind = device.partition(":")[0]
    module = _module(kind)
    if module is None:
        return [device]
    names = [f"{kind}:{i}" for i in range(module.device_count())]
    own = device if ":" in device else f"{kind}:0"
    return [own, *(name for name in names if name != own)]


def free_bytes(device: str) -> int:
    """Memory that could be allocated now without swapping, within cgroup limits."""
    return _memory(device)[0]


def total_bytes(device: str) -> int:
    """Size of the device's memory."""
    return _memory(device)[1]


def peak_bytes(device: str) -> int:
    """Most memory that this process has held. (getrusage would count the process that started it, too.)"""
    if counts_memory(device):
        return int(_module(device).max_memory_reserved(device))
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def counts_memory(device: str) -> bool:
    """Does the device report the most memory that tensors took?"""
    module = _module(device)
    names = ("mem_get_info", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "synchronize")
    return module is not None and all(hasattr(module, name) for name in names)


def holes_bytes(device: str) -> int:
    """Memory that lies between tensors, where larger ones do not fit, on a device that counts. Behind `release`."""
    module = _module(device)
    return int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def growth_bytes(device: str, work: Callable[[], object]) -> int:
    """Memory that `work` needs at its peak beyond what is held before it, on a device that counts."""
    module = _module(device)
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    work()
    module.synchronize(device)
    return int(module.max_memory_allocated(device)) - before


def release(device: str) -> None:
    """Give memory that no tensor uses back to the device or the system: loading leaves holes in glibc's heap."""
    module = _module(device)
    if module is not None:
        getattr(module, "empty_cache", bool)()
        return
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def describe(device: str) -> str:
    """The device in words."""
    module = _module(device)
    if module is not None:
        named = getattr(module, "get_device_name", None)
        return device if named is None else str(named(device))
    return f"CPU, {torch.get_num_threads()} threads"


def uuid_of(device: str) -> str:
    """The id by which NVIDIA's tools know a GPU; empty for other devices."""
    if not records(device):
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else ""


def _module(device: str) -> Any:
    """torch's module for this kind of device; None: there is none (as for the CPU)."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return None
    try:
        module = torch.get_device_module(torch.device(kind))
    except (RuntimeError, AttributeError):
        return None
    return module if hasattr(module, "device_count") else None


def _there(module: Any) -> bool:
    return bool(module.is_available()) if hasattr(module, "is_available") else module.device_count() > 0


def _memory(device: str) -> tuple[int, int]:
    """(free bytes, all bytes)."""
    module = _module(device)
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        return int(free), int(total)
    free = min(_meminfo("MemAvailable"), _cgroup_free(), _addresses_left())
    total = _meminfo("MemTotal")
    if hasattr(module, "recommended_max_memory"):  # Apple's: a part of the host's memory
        total = int(module.recommended_max_memory())
        free = min(free, total - int(module.driver_allocated_memory()))
    return free, total


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


def _addresses_left() -> int:
    """Bytes of addresses that this process may still take (ulimit -v)."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most == resource.RLIM_INFINITY:
            return 1 << 62
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        return max(0, most - pages * resource.getpagesize())
    except (ImportError, OSError, ValueError):
        return 1 << 62
