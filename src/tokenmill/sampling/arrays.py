"""Host numbers on their way to the device. Owns: the copy that does not wait. Must not know: what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host list as a device tensor."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor to the device; through pinned memory, because a plain copy to a GPU would wait for it."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def send_columns(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The columns of these lines of whole numbers, on the device."""
    return send(torch.tensor(lines, dtype=torch.int64).t().contiguous(), device)
