"""Ranks that torch connects: by NCCL between GPUs, by gloo between processes on a CPU without native kernels. Owns: the
process groups, and what layers and stages ask of them.

Multicast stays off: whoever starts a rank gives it the environment for that (core/config.py: LINKS), before torch is
loaded. Must not know: layers, processes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmill.core.config import LINKS, environment_with
from tokenmill.core.errors import EngineDeadError
from tokenmill.parallel.group import AtOnce
from tokenmill.parallel.link import Link, PlannedLink
from tokenmill.parallel.stages import Place

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Falls back to the older name, which newer torch warns about."""
SLOTS = 2
"""How many steps' states a stage may be sending at one time."""


class World:
    """All ranks of an engine, connected. meeting: a file that no other engine uses. rank, size: within this rank's
    stage."""

    def __init__(self, meeting: str, place: Place, rank: int, size: int, device: str) -> None:
        said = environment_with({})
        if any(said.get(name) != value for name, value in LINKS.items()):
            raise EngineDeadError("a rank must be started with multicast switched off")
        self.place, self.rank, self.size = place, rank, size
        self.device = torch.device(device)
        self.count = size * place.stages
        store = dist.FileStore(meeting, self.count)  # type: ignore[attr-defined]
        self.on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            store=store,
            rank=place.stage * size + rank,
            world_size=self.count,
            device_id=self.device if self.on_gpu else None,
        )
        self.group: Any = dist.group.WORLD
        """The group of this stage's ranks."""
        if place.stages > 1 and size > 1:  # every rank must take part in making every group
            made = [dist.new_group([stage * size + each for each in range(size)]) for stage in range(place.stages)]
            self.group = made[place.stage]

    def link(self, inbox: Tensor) -> Link:
        """The link to the stages around this one. Each pair of ranks has a group, so that nothing waits for other
        traffic."""
        size, stage = self.size, self.place.stage
        pairs = {
            (before, rank): dist.new_group([before * size + rank, (before + 1) * size + rank])
            for before in range(self.place.stages - 1)
            for rank in range(size)
        }
        return TorchLink(pairs.get((stage - 1, self.rank)), pairs.get((stage, self.rank)), inbox)


class TorchLink(PlannedLink):
    """A link between devices. before, behind: the groups of two ranks. inbox [most tokens, hidden].

    Sending and receiving are enqueued like other device work: nothing here waits for it. Sent states lie in slots of
    their own, so that the next step need not wait until the stage behind has taken them."""

    def __init__(self, before: Any, behind: Any, inbox: Tensor) -> None:
        super().__init__(takes=before is not None, gives=behind is not None)
        self.before, self.behind, self.inbox = before, behind, inbox
        self.sent: deque[tuple[Any, Tensor]] = deque()
        if before is not None:  # a connection is made at its first use, by both ends at once
            dist.recv(inbox[:1], group=before, group_src=0)
        if behind is not None:
            dist.send(torch.zeros(1, inbox.shape[1], dtype=inbox.dtype, device=inbox.device), group=behind, group_dst=1)

    def _take(self) -> None:
        dist.recv(self.inbox[: self.tokens], group=self.before, group_src=0)

    def _give(self, x: Tensor | None) -> None:
        if x is None:  # the plan has failed: the stage behind must not wait for it
            x = torch.zeros(self.tokens, self.inbox.shape[1], dtype=self.inbox.dtype, device=self.inbox.device)
        assert x.dtype == self.inbox.dtype, "stages exchange the compute type"
        while len(self.sent) >= SLOTS:
            self.sent.popleft()[0].wait()
        slot = x.clone()
        self.sent.append((dist.isend(slot, group=self.behind, group_dst=1), slot))


class TorchGroup(AtOnce):
    """This process's rank among those of its stage. exact: see compute/model.py."""

    def __init__(self, world: World, *, exact: bool = False) -> None:
        self.rank, self.size, self.exact = world.rank, world.size, exact
        self.device, self.group = world.device, world.group

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks (+ residual); x is overwritten. In an exact group more than two ranks add up in rank
        order."""
        if self.exact and self.size > 2:
            parts = self._gather(x)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            x = total.to(x.dtype)
        else:
            x = x.contiguous()
            self.calls += 1
            dist.all_reduce(x, group=self.group)
        return x.view(x.shape) if residual is None else residual + x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x side by side."""
        parts = self._gather(x)
        if x.shape.numel() == x.shape[dim]:  # one row: the parts lie side by side already
            return parts.view(*x.shape[:dim], -1) if dim in (-1, x.ndim - 1) else torch.cat(list(parts), dim)
        return torch.cat(list(parts), dim)

    def _gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty((self.size * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        self.calls += 1
        _gather(out, x, group=self.group)
        return out.view(self.size, *x.shape)

    def agree(self, values: list[int]) -> list[int]:
        """The least value of each number."""
        said = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.group)
        return [int(least) for least in said.tolist()]
