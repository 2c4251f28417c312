"""Decode steps of few rows as native tapes. Owns: which steps are recorded, and the inputs that a recording reads.

A forward pass of a small model is a few dozen native calls of microseconds each, and the way from Python to each costs
as much again. So a step that comes a second time is recorded while it runs (`_native.Tape`): afterwards its inputs are
copied to where the recording reads them, and all calls are made at once, in the same order on the same numbers.
A model that does anything but native operations in between (seen by watching torch) is never recorded.
Must not know: what a model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill import _native
from tokenmill.core.forward import ForwardContext, GroupPlan
from tokenmill.core.protocols import CausalLM

MOST_ROWS = 8
"""Above, products take longer than the calls."""
_LEAST_ENTRIES = 64
_MEMORY = frozenset({"aten::empty", "aten::empty_like"})


@dataclass(slots=True)
class _Recorded:
    """A tape, what it reads and leaves, and everything whose addresses are on it."""

    tape: Any
    tokens: Tensor
    ctx: ForwardContext
    hidden: Tensor
    keep: list[object]

    def fits(self, ctx: ForwardContext) -> bool:
        """The same pages, and tables with room for these."""
        mine = self.ctx
        return mine.kv is ctx.kv and all(
            a.tables.shape[1] >= b.tables.shape[1] for a, b in zip(mine.groups, ctx.groups, strict=True)
        )

    def replay(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """-> hidden states [S, hidden], fresh."""
        self.tokens.copy_(tokens)
        _fill(self.ctx, ctx)
        self.tape.replay()
        return self.hidden.clone()


class DecodeReplay:
    """Runs one model's forward passes, recorded where that is possible."""

    def __init__(self, model: CausalLM, bound: Callable[[], list[object]]) -> None:
        """bound: what the backend has bound to addresses so far."""
        self.model = model
        self.bound = bound
        self.seen: set[int] = set()
        self.made: dict[int, _Recorded] = {}
        self.possible = True

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T] -> final-norm hidden states [T, hidden]."""
        rows = tokens.shape[0]
        if not self.possible or rows > MOST_ROWS or not _plain(tokens, ctx):
            return self.model.forward(tokens, ctx)
        found = self.made.get(rows)
        if found is not None and found.fits(ctx):
            return found.replay(tokens, ctx)
        if rows not in self.seen:  # the first time, weights are packed and descriptors bound
            self.seen.add(rows)
            return self.model.forward(tokens, ctx)
        return self._record(tokens, ctx)

    def _record(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        mine, own = _inputs(ctx), tokens.clone()
        tape, watch = _native.Tape(), _Watch()
        tape.begin()
        try:
            with watch:
                hidden = self.model.forward(own, mine)
        finally:
            tape.end()
        self.possible = not watch.other and tape.size() > 0
        if self.possible:
            made = _Recorded(tape, own, mine, hidden, [*watch.kept, *self.bound()])
            self.made[tokens.shape[0]] = made
            return hidden.clone()
        return hidden


class _Watch(TorchDispatchMode):
    """Sees every operation of torch: keeps the memory that is taken, notes what computes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []
        self.other: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler is not in play here, and to keep it out would import it (a second, mid-service)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.kept.append(made)
        if func._schema.name not in _MEMORY and (func._schema.is_mutable or not _views(made, args)):
            self.other.add(func._schema.name)
        return made


def _views(made: Any, args: Any) -> bool:
    """Is the result another look at the first argument?"""
    if not isinstance(made, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return made.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


def _plain(tokens: Tensor, ctx: ForwardContext) -> bool:
    """One token a row, contiguous tables, and nothing that comes from outside the model."""
    return (
        ctx.max_query == 1
        and ctx.taps is None
        and ctx.adapters is None
        and ctx.embeds is None
        and tokens.dtype == torch.int64
        and all(plan.first is None for plan in ctx.groups)
    )


def _inputs(ctx: ForwardContext) -> ForwardContext:
    """A context of tensors that stay, with room for longer tables."""
    groups = []
    for plan in ctx.groups:
        rows, width = plan.tables.shape
        tables = torch.zeros(rows, max(2 * width, _LEAST_ENTRIES), dtype=torch.int32)
        groups.append(GroupPlan(tables, None, plan.entries.to(torch.int32, copy=True), plan.slots.clone()))
    made = ForwardContext(
        kernels=ctx.kernels,
        positions=ctx.positions.clone(),
        query_start=ctx.query_start.to(torch.int32, copy=True),
        kv_len=ctx.kv_len.to(torch.int32, copy=True),
        max_query=1,
        kv=ctx.kv,
        groups=groups,
        spans=ctx.spans,
        block_size=ctx.block_size,
    )
    _fill(made, ctx)
    return made


def _fill(mine: ForwardContext, ctx: ForwardContext) -> None:
    mine.positions.copy_(ctx.positions)
    mine.kv_len.copy_(ctx.kv_len)
    for to, plan in zip(mine.groups, ctx.groups, strict=True):
        to.tables[:, : plan.tables.shape[1]].copy_(plan.tables)
        to.entries.copy_(plan.entries)
        to.slots.copy_(plan.slots)
