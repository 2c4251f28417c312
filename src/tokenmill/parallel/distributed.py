"""Ranks that torch connects: by NCCL between GPUs, by gloo between processes on a CPU without native kernels. Owns: the
process group, and what layers ask of it.

Multicast stays off: whoever starts a rank gives it the environment for that (core/config.py: LINKS), before torch is
loaded. Must not know: layers, processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmill.core.config import LINKS, environment_with
from tokenmill.core.errors import EngineDeadError

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The older name, which newer torch warns of."""


class TorchGroup:
    """This process's rank; `meeting`: a file that no other group uses. exact: see core/model.py."""

    def __init__(self, meeting: str, rank: int, size: int, device: str, *, exact: bool = False) -> None:
        said = environment_with({})
        if any(said.get(name) != value for name, value in LINKS.items()):
            raise EngineDeadError("a rank must be started with multicast switched off")
        self.rank, self.size, self.exact = rank, size, exact
        self.calls = 0
        self.device = torch.device(device)
        store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
        on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            device_id=self.device if on_gpu else None,
        )

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks (+ residual); x is overwritten. In rank order where two ranks do not settle the order."""
        if self.exact and self.size > 2:
            parts = self._gather(x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            x = total.to(x.dtype)
        else:
            x = x.contiguous()
            self.calls += 1
            dist.all_reduce(x)
        return x.view(x.shape) if residual is None else residual + x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x side by side."""
        parts = self._gather(x)
        if x.shape.numel() == x.shape[dim]:  # one row: they lie side by side
            return parts.view(*x.shape[:dim], -1) if dim in (-1, x.ndim - 1) else torch.cat(list(parts), dim)
        return torch.cat(list(parts), dim)

    def _gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self.calls += 1
        _gather(out, x)
        return out.view(self.size, *x.shape)

    def agree(self, values: list[int]) -> list[int]:
        """The least of each."""
        said = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return [int(least) for least in said.tolist()]

    def begin(self, epoch: int) -> None:
        """Nothing: a rank that fails ends its engine, because what it has not enqueued cannot be made up for."""

    def fail(self) -> None:
        """Nothing: see `begin`."""

    def close(self) -> None:
        """Nothing waits: processes end, and their communicators with them."""
