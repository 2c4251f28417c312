"""Per-sequence state on the device. Owns: every row's tokens, lengths and block tables, and applying plans to them.

Must not know: the scheduler, models, sampling arithmetic. A plan carries changes; rows hold what they add up to. The
last sampled token stays here, so that the next plan may say "go on" without the host knowing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.core.step import RowStart, StepPlan
from tokenmill.kvcache.pool import CacheLayout
from tokenmill.sampling.table import SamplingTable

FAR = 1 << 30
"""First position of an unused table entry: beyond every real one, so that a search never lands there."""


class Rows:
    """Device tensors by row: tokens [R, L]; length and computed [R]; per KV group tables and first [R, E].

    `length` counts known tokens (drafts excluded), `computed` those whose K/V is in the cache.
    """

    def __init__(self, max_rows: int, max_len: int, layout: CacheLayout, vocab_size: int, device: str) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.sampling = SamplingTable(max_rows, vocab_size, device)
        entries = -(-max_len // layout.block_size) + 1
        self.tokens = torch.zeros(max_rows, max_len + 1, dtype=torch.int32, device=device)
        self.length = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.computed = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.tables = [torch.zeros(max_rows, entries, dtype=torch.int32, device=device) for _ in layout.groups]
        self.first = [torch.full((max_rows, entries), FAR, dtype=torch.int32, device=device) for _ in layout.groups]
        self.entries = [[0] * max_rows for _ in layout.groups]
        self.shifted: list[set[int]] = [set() for _ in layout.groups]
        self.pools: dict[int, str] = {}
        self.sums: dict[int, Tensor] = {}
        self.num_prompt = [0] * max_rows
        self.epoch = 0

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan's state changes (block copies and grants excepted)."""
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            for row in range(len(self.num_prompt)):
                self._end(row)
        for row in plan.ended:
            self._end(row)
        for start in plan.starts:
            self._start(start)
        for edit in plan.edits:
            self._edit(edit.row, edit.group, edit.drop, edit.at, edit.blocks, edit.first)
        for row, computed in plan.jumps:
            self.computed[row] = computed
        if plan.appended:
            self._append(plan.appended)

    def write_drafts(self, rows: list[int], drafts: list[list[int]]) -> None:
        """Put unverified tokens behind the known ones."""
        row_ids, offsets, values = _flatten(rows, drafts, self.device)
        self.tokens[row_ids, self.length[row_ids] + offsets] = values

    def accept(self, row: int, tokens: list[int]) -> None:
        """Tokens that verification let stand, the corrected or extra one included."""
        self._append({row: tokens})
        self.computed[row] = self.length[row] - 1

    def _append(self, appended: dict[int, list[int]]) -> None:
        row_ids, offsets, values = _flatten(list(appended), list(appended.values()), self.device)
        self.tokens[row_ids, self.length[row_ids] + offsets] = values
        self.length.index_add_(0, row_ids, torch.ones_like(row_ids))

    def _end(self, row: int) -> None:
        if self.num_prompt[row]:
            self.num_prompt[row] = 0
            self.sampling.clear_row(row)
            self.pools.pop(row, None)
            self.sums.pop(row, None)

    def _start(self, start: RowStart) -> None:
        row, count = start.row, len(start.tokens)
        self.tokens[row, :count] = torch.tensor(start.tokens, dtype=torch.int32)
        self.length[row] = count
        self.computed[row] = start.computed
        self.num_prompt[row] = start.num_prompt
        self.sampling.set_row(row, start.sampling, start.num_prompt)
        if start.pool is not None:
            self.pools[row] = start.pool
        for group in range(len(self.tables)):
            self.entries[group][row] = 0
            self.shifted[group].discard(row)

    def _edit(self, row: int, group: int, drop: int, at: int, blocks: list[int], first: list[int]) -> None:
        table, starts = self.tables[group][row], self.first[group][row]
        held = self.entries[group][row]
        if drop:
            kept = held - drop
            table[:kept] = table[drop:held].clone()
            starts[:kept] = starts[drop:held].clone()
            held = kept
        end = at + len(blocks)
        table[at:end] = torch.tensor(blocks, dtype=torch.int32)
        starts[at:end] = torch.tensor(first, dtype=torch.int32)
        if end < held + drop:
            starts[end : held + drop] = FAR
        self.entries[group][row] = end
        if drop or (at == 0 and first and first[0]):
            self.shifted[group].add(row)


def _flatten(rows: list[int], lists: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each value, its place in its list, and the values, on the device."""
    row_ids = [row for row, values in zip(rows, lists, strict=True) for _ in values]
    offsets = [i for values in lists for i in range(len(values))]
    flat = [v for values in lists for v in values]
    packed = torch.tensor([row_ids, offsets, flat], dtype=torch.int64).to(device, non_blocking=True)
    return packed[0], packed[1], packed[2].to(torch.int32)
