"""Running one layer over calibration sequences. Owns: its context, with pages for one batch. Must not know: methods."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, GroupPlan, Kernels, KVFormat, KVView, StepRows
from tokenmill.compute.model import CausalLM
from tokenmill.device.memory import free_bytes
from tokenmill.kvcache.pool import KVPool, make_layout
from tokenmill.kvcache.states import StatePool
from tokenmill.quantize.calibration_text import check_ids

BLOCK = 16
BATCH_TOKENS = 4096
_SHARE = 1 / 8
"""The part of a device's free memory that hidden states may take. (Two copies of them exist while a layer runs.)"""
EXACT = KVFormat("float32")
Note = Callable[[list[KVView]], None]


def forward_in_parts(
    model: CausalLM,
    x: Tensor,
    kernels: Kernels,
    device: torch.device,
    kv_format: KVFormat = EXACT,
    note: Note | None = None,
) -> Tensor:
    """x: tokens [N, L] for the first layer, or hidden states [N, L, hidden]. Returns hidden states [N, L, hidden], on
    the device if they take little of its memory. note: is called with the pages after each part."""
    made: list[Tensor] = []

    def take(start: int, states: Tensor) -> None:
        if not made:
            made.append(room(states, len(x), device))
        made[0][start : start + len(states)] = states

    forward_each(model, x, kernels, device, take, kv_format, note)
    return made[0]


def forward_each(
    model: CausalLM,
    x: Tensor,
    kernels: Kernels,
    device: torch.device,
    take: Callable[[int, Tensor], None],
    kv_format: KVFormat = EXACT,
    note: Note | None = None,
) -> None:
    """The same, but each part's hidden states [n, L, hidden] are given to `take`, with the number of their first
    sequence."""
    if not x.is_floating_point():
        check_ids(int(x.max()), model.spec.vocab_size)
    count, length = x.shape[:2]
    size = part_size(length)
    layout = make_layout(model.spec.kv_specs, BLOCK, kv_format)
    held = -(-length // BLOCK)
    states = StatePool(model.spec.states, size, 0, str(device), kernels.copy_rows_) if model.spec.states else None
    pool = KVPool(layout, [size * held] * len(layout.page_bytes), str(device), states)
    with torch.inference_mode():
        for start in range(0, count, size):
            part = x[start : start + size].to(device)
            context = _context(pool, kernels, part.shape[:2], device)
            take(start, model.forward(part.flatten(0, 1), context).view(*part.shape[:2], -1))
            if note is not None:
                note(pool.views)


def part_size(length: int) -> int:
    """So many sequences are run at once."""
    return max(1, BATCH_TOKENS // length)


def room(first: Tensor, count: int, device: torch.device) -> Tensor:
    """Where the hidden states of `count` sequences may lie; first: those of some. Copies to the host and back would
    take longer than many layers' work, so it is the device, unless they need much of its memory."""
    shape = (count, *first.shape[1:])
    near = device.type == "cpu" or math.prod(shape) * first.element_size() <= free_bytes(str(device)) * _SHARE
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=first.dtype, device=device if near else "cpu")


def logits(model: CausalLM, hidden: Tensor, kernels: Kernels, device: torch.device) -> Tensor:
    """[n, hidden] -> [n, vocab] in float32, on the device that computed them."""
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    context = ForwardContext(kernels, nothing, nothing, nothing, 1, [], [])
    with torch.inference_mode():
        return model.logits(hidden.to(device), context).float()


def _context(pool: KVPool, kernels: Kernels, shape: torch.Size, device: torch.device) -> ForwardContext:
    """A context for `count` whole sequences [count, length], each with blocks of its own."""
    count, length = shape
    held = -(-length // BLOCK)
    at = torch.arange(count, device=device)
    within = torch.arange(length, device=device)
    table = (at[:, None] * held + torch.arange(held, device=device)).to(torch.int32)
    slots = (at[:, None] * (held * BLOCK) + within).flatten()
    entries = torch.full((count,), held, dtype=torch.int32, device=device)
    plan = GroupPlan(table, None, entries, slots, reach=held * BLOCK * count)
    on_host = device.type == "cpu"
    return ForwardContext(
        kernels=kernels,
        positions=within.repeat(count),
        query_start=(torch.arange(count + 1, device=device) * length).to(torch.int32),
        kv_len=torch.full((count,), length, dtype=torch.int32, device=device),
        max_query=length,
        kv=pool.views,
        groups=[plan for _ in pool.layout.groups],
        rows=StepRows(at, at.repeat_interleave(length), pool.state_views),
        spans=[(i * length, length, length) for i in range(count)] if on_host else None,
        block_size=BLOCK,
    )
