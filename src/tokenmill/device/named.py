"""Names of devices, before torch is imported. Owns: refusing names that are none, and GPUs of which a Linux machine
shows no sign. Must not know: torch (memory.py asks it), models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenmill.core.errors import ParameterError

DEV = Path("/dev")
_NODES = {
    "cuda": ("nvidia*", "dxg", "kfd", "nvhost*", "nvgpu*", "nvmap"),  # NVIDIA, WSL, AMD, Jetson
    "rocm": ("kfd", "dxg"),
    "hip": ("kfd", "dxg"),
    "xpu": ("dri/*", "dxg"),
    "mps": (),
}
"""Kind -> files that drivers of it make on Linux."""
_OTHERS = ("auto", "cpu", "mtia", "hpu", "maia", "xla", "npu", "vulkan", "privateuseone")
KNOWN = ("mps", "xpu")


def no_device(kind: str, why: str = "torch sees none") -> ParameterError:
    """The error for a kind of device that is not there."""
    name = "NVIDIA or AMD GPU" if kind == "cuda" else f"device of kind {kind}"
    return ParameterError(f"No {name} can be used here ({why}); use --device cpu.", param="device")


def unknown_device(name: str) -> ParameterError:
    """The error for a name that is none of a device."""
    known = f"cpu, cuda, cuda:N, {', '.join(KNOWN)} or auto"
    return ParameterError(f"Unknown device {name!r}: use {known}.", param="device")


def check_device(name: str) -> None:
    """Refuse at once what torch would refuse after seconds. Whatever it might still know passes."""
    kind, colon, index = name.partition(":")
    if colon and not index.isdigit():
        raise unknown_device(name)
    if kind not in _NODES and kind not in _OTHERS and not _brings_its_own():
        raise unknown_device(name)
    nodes = _NODES.get(kind)
    if nodes is not None and sys.platform == "linux" and not any(any(DEV.glob(node)) for node in nodes):
        raise no_device("cuda" if kind in ("rocm", "hip") else kind, "no driver of one is loaded")


def _brings_its_own() -> bool:
    """Is a package installed that adds a kind of device to torch?"""
    from importlib.metadata import entry_points  # many files are read

    return bool(entry_points(group="torch.backends"))
