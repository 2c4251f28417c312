"""Per-sequence state on the device. Owns: every row's tokens, lengths and block tables, and applying plans to them.

Must not know: the scheduler, models, sampling arithmetic. Plans carry changes; rows hold their sum. The last sampled
token stays here, so the next plan may say "go on" before the host knows it. All changes of a plan travel in one buffer,
and nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenmill.core.step import RowStart, StepPlan, TableEdit
from tokenmill.kvcache.pool import CacheLayout
from tokenmill.sampling.arrays import send, to_device
from tokenmill.sampling.table import SamplingTable

FAR = 1 << 30
"""First position of an unused table entry: beyond every real position, so that a search never ends there."""


class Rows:
    """Device tensors by row: tokens [R + 1, L]; length and computed [R + 1]; for each KV group tables, first and held.

    parents [R + 1, room]: the parent of each draft behind the known tokens, if drafts are trees of up to `levels`
    (Kernels.accept_ has the encoding).
    `length` counts known tokens, without the drafts behind them (`room` keeps space for those at the end). `computed`
    counts tokens whose K/V is in the cache. held [R + 1] counts table entries; unused entries name the scratch block,
    so that a drafter which runs ahead overwrites no other row's block. adapters [R + 1] are slots of adapters (0:
    none). The last row is the spare row: it belongs to no sequence and fills up recorded steps.
    `blocks[g][row]` and `starts[g][row]` are the host's copy of the tables.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        layout: CacheLayout,
        vocab_size: int,
        device: str,
        scratch: list[int] | None = None,
        room: int = 0,
        levels: int = 0,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.spare = max_rows
        self.sampling = SamplingTable(max_rows + 1, vocab_size, device)
        count, width = max_rows + 1, -(-(max_len + room) // layout.block_size) + 1
        self.max_len = max_len
        self.tokens = torch.zeros(count, max_len + 1 + room, dtype=torch.int32, device=device)
        self.levels = levels
        self.parents = torch.zeros(count, room if levels else 0, dtype=torch.int64, device=device)
        self.length = torch.zeros(count, dtype=torch.int64, device=device)
        self.computed = torch.zeros(count, dtype=torch.int64, device=device)
        self.scratch = scratch or [0] * len(layout.groups)
        self.tables = [torch.full((count, width), block, dtype=torch.int32, device=device) for block in self.scratch]
        self.first = [torch.full((count, width), FAR, dtype=torch.int32, device=device) for _ in layout.groups]
        self.held = [torch.ones(count, dtype=torch.int32, device=device) for _ in layout.groups]
        for first in self.first:
            first[max_rows, 0] = 0
        self.blocks: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in layout.groups]
        self.starts: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in layout.groups]
        self.shifted: list[set[int]] = [set() for _ in layout.groups]
        self.whole = (False,) * len(layout.groups)
        windows = [0 < group.window < max_len for group in layout.groups]
        self.may_shift = tuple(moves and self.device.type != "cpu" for moves in windows)
        """By KV group: recorded steps treat all tables as shifted. Otherwise the first sequence that leaves its window
        would wait for new recordings. (Not so for prompts: whole tables tell where windows begin.)"""
        self.pretends = False
        """Report all tables of windows as shifted, so that kernels of such steps are compiled before they are
        needed."""
        self.pools: dict[int, str] = {}
        self.sums: dict[int, Tensor] = {}
        self.num_prompt = [0] * max_rows
        self.adapters = torch.zeros(count, dtype=torch.int32, device=device)
        self.slots = [0] * max_rows
        self.always_adapted = False
        """Steps without adapters run as steps with adapters."""
        self.epoch = 0

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's state changes, except block copies and grants."""
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            for row in range(len(self.num_prompt)):
                self._end(row)
        for row in plan.ended:
            self._end(row)
        if plan.starts or plan.edits or plan.jumps:
            self._write(plan)
        if plan.appended:
            self._append(plan.appended)

    def learn(self, chosen: dict[int, list[int]], drafts: dict[int, list[int]]) -> None:
        """Append tokens that another stage has chosen. These rows have computed all that they knew. drafts: what lies
        behind the new tokens from now on."""
        self._append(chosen)
        rows = to_device(list(chosen), torch.int64, self.device)
        self.computed[rows] = self.length[rows] - 1
        if drafts:
            self.write_drafts(list(drafts), list(drafts.values()))

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, length and computed: the tensors that operations advance."""
        return self.tokens, self.length, self.computed

    def contiguous(self, row_list: list[int]) -> bool:
        """Does entry j of all these rows' tables begin at j * block size?"""
        return not any(self.moved(row_list))

    def moved(self, row_list: list[int]) -> tuple[bool, ...]:
        """For each group: is some entry j of these rows' tables shifted (does it not begin at j * block size)?"""
        if self.pretends:
            return tuple(group.window > 0 for group in self.layout.groups)
        if not any(self.shifted):
            return self.whole
        return tuple(not shifted.isdisjoint(row_list) for shifted in self.shifted)

    def moved_or_may(self, row_list: list[int]) -> tuple[bool, ...]:
        """The same as recorded steps see it: tables that may ever be shifted count as shifted."""
        return tuple(may or moved for may, moved in zip(self.may_shift, self.moved(row_list), strict=True))

    def adapted(self, row_list: list[int]) -> bool:
        """Does any of these rows have an adapter?"""
        return self.always_adapted or any(self.slots[row] for row in row_list)

    def longest(self, row_list: list[int]) -> int:
        """An upper bound of these rows' token counts, the token about to be sampled included."""
        return max(self.starts[0][row][-1] for row in row_list) + self.layout.block_size + 1

    def write_drafts(self, rows: list[int], drafts: list[list[int]]) -> None:
        """Write unverified tokens behind the known ones."""
        row_ids, offsets, values = _flatten(rows, drafts, self.device)
        self.tokens[row_ids, self.length[row_ids] + offsets] = values

    def drafts_of(self, row_ids: Tensor, count: int) -> Tensor:
        """The drafts [n, count] behind these rows' known tokens; of a tree the likeliest chain, filled up with -1."""
        known = self.length[row_ids][:, None]
        if not self.levels:
            return self.tokens[row_ids[:, None], known + torch.arange(count, device=self.device)]
        chain = chain_of(self.parents[row_ids, :count], self.levels)
        return torch.where(chain < 0, -1, self.tokens[row_ids[:, None], known + chain.clamp(min=0)])

    def _append(self, appended: dict[int, list[int]]) -> None:
        if self.device.type == "cpu":  # one slice per row takes a fifth of the time of one scatter for all
            tokens, length = self.tokens.numpy(), self.length.numpy()
            for row, new in appended.items():
                start = int(length[row])
                tokens[row, start : start + len(new)] = new
                length[row] = start + len(new)
            return
        row_ids, offsets, values = _flatten(list(appended), list(appended.values()), self.device)
        self.tokens[row_ids, self.length[row_ids] + offsets] = values
        self.length.index_add_(0, row_ids, torch.ones_like(row_ids))

    def _end(self, row: int) -> None:
        if self.num_prompt[row]:
            self.num_prompt[row] = 0
            self.sampling.clear_row(row)
            self.pools.pop(row, None)
            self.sums.pop(row, None)

    def _write(self, plan: StepPlan) -> None:
        """Write starts, table edits and jumps, all at once."""
        writes = _Writes()
        computed = {start.row: start.computed for start in plan.starts} | dict(plan.jumps)
        # By group and row: the first entry to send, and how many entries the device may still hold.
        dirty: dict[tuple[int, int], tuple[int, int]] = {}
        for start in plan.starts:
            self._start(start, dirty)
            writes.put(self.tokens, start.row * self.tokens.shape[1], start.tokens)
            writes.put(self.length, start.row, [len(start.tokens)])
            if start.adapter != self.slots[start.row]:
                self.slots[start.row] = start.adapter
                writes.put(self.adapters, start.row, [start.adapter])
        for edit in plan.edits:
            self._edit(edit, dirty)
        for row, value in computed.items():
            writes.put(self.computed, row, [value])
        for (group, row), (low, before) in dirty.items():
            blocks, starts = self.blocks[group][row], self.starts[group][row]
            base = row * self.tables[group].shape[1] + low
            unused = before - len(starts)
            writes.put(self.tables[group], base, blocks[low:] + [self.scratch[group]] * unused)
            writes.put(self.first[group], base, starts[low:] + [FAR] * unused)
            writes.put(self.held[group], row, [len(blocks)])
        writes.send(self.device)

    def _start(self, start: RowStart, dirty: dict[tuple[int, int], tuple[int, int]]) -> None:
        row = start.row
        self.num_prompt[row] = start.num_prompt
        self.sampling.set_row(row, start.sampling, start.num_prompt, start.mu)
        if start.pool is not None:
            self.pools[row] = start.pool
        for group in range(len(self.tables)):
            dirty[group, row] = 0, len(self.blocks[group][row])
            self.blocks[group][row], self.starts[group][row] = [], []
            self.shifted[group].discard(row)

    def _edit(self, edit: TableEdit, dirty: dict[tuple[int, int], tuple[int, int]]) -> None:
        blocks, starts = self.blocks[edit.group][edit.row], self.starts[edit.group][edit.row]
        low, before = dirty.get((edit.group, edit.row), (len(blocks), len(blocks)))
        dirty[edit.group, edit.row] = min(low, 0 if edit.drop else edit.at), before
        del blocks[: edit.drop], starts[: edit.drop]
        blocks[edit.at :], starts[edit.at :] = edit.blocks, edit.first
        if edit.drop or (edit.at == 0 and edit.first and edit.first[0]):
            self.shifted[edit.group].add(edit.row)


def chain_of(parents: Tensor, levels: int) -> Tensor:
    """parents [n, N] -> the drafts [n, levels] reached by always going to the first child; -1: there is none."""
    at, found = parents.new_zeros(parents.shape[0]), []
    there = torch.ones_like(at, dtype=torch.bool)
    for _ in range(levels):
        child = parents == at[:, None]
        there = there & child.any(1)
        first = child.long().argmax(1)
        found.append(torch.where(there, first, -1))
        at = first + 1
    return torch.stack(found, 1)


class _Writes:
    """Collects runs of values to write to flat places of device tensors."""

    def __init__(self) -> None:
        self.runs: dict[int, tuple[Tensor, list[tuple[int, int]], list[int]]] = {}

    def put(self, target: Tensor, start: int, values: list[int]) -> None:
        """Write `values` from flat place `start` on; no place of a target may come twice."""
        _, places, flat = self.runs.setdefault(id(target), (target, [], []))
        places.append((start, len(values)))
        flat += values

    def send(self, device: torch.device) -> None:
        """Send everything: one copy to the device, then one scatter per target."""
        total = sum(len(flat) for _, _, flat in self.runs.values())
        packed = np.empty((2, total), dtype=np.int64)
        at = 0
        for _, places, flat in self.runs.values():
            packed[1, at : at + len(flat)] = flat
            for start, count in places:
                packed[0, at : at + count] = np.arange(start, start + count)
                at += count
        sent = send(torch.from_numpy(packed), device)
        at = 0
        for target, _, flat in self.runs.values():
            part = sent[:, at : at + len(flat)]
            target.view(-1).index_copy_(0, part[0], part[1].to(target.dtype))
            at += len(flat)


def _flatten(rows: list[int], lists: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each value, its place in its list, and the values, all on the device."""
    row_ids = [row for row, values in zip(rows, lists, strict=True) for _ in values]
    offsets = [i for values in lists for i in range(len(values))]
    flat = [v for values in lists for v in values]
    packed = send(torch.tensor([row_ids, offsets, flat], dtype=torch.int64), device)
    return packed[0], packed[1], packed[2].to(torch.int32)
