"""GPUs that are not there, by generation, for the stand-in of device/standin.py. Owns: what each of them is."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tokenmill.device import standin
from tokenmill.device.gpu import Gpu
from tokenmill.device.standin import Kernel, Standin

__all__ = ["DEVICES", "Kernel", "Standin", "installed"]


def installed(*, device: Gpu, number: float | None = None) -> AbstractContextManager[Standin]:
    """The stand-in, with the runner's reading of results stood in for, too: every draft is wrong."""
    import tokenmill.runner.runner as runner
    from tokenmill.runner.verdict import Verdict

    Verdict.read = lambda self, told: {i: [0] for i in self.grants}  # type: ignore[method-assign]
    return standin.installed(device=device, readers=[(runner, "Readback")], number=number)


def _gpu(name: str, capability: tuple[int, int], processors: int, shared_kib: int, memory_gib: int) -> Gpu:
    return Gpu(name, capability, processors, shared_kib << 10, memory_gib << 30, (memory_gib - 1) << 30)


DEVICES = {
    "sm_80": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 80),
    "sm_89": _gpu("NVIDIA L40S", (8, 9), 142, 99, 46),
    "sm_90": _gpu("NVIDIA H200", (9, 0), 132, 227, 140),
    "sm_100": _gpu("NVIDIA B200", (10, 0), 148, 227, 180),
}
