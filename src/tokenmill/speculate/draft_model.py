"""A smaller model as drafter. Owns: computing its K/V for the rows' tokens, and guessing token by token.

Its layers have pages of their own in the rows' block tables, so prefixes, forks and evictions need nothing more. It
computes prompts when the target does (`follow`). Before it guesses, it computes a row's newest two tokens: after
verification it can lack no more than these. The states of recurrent layers are kept apart (draft_states.py).
Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

import torch

from tokenmill.compute.drafting import Drafting, Seen
from tokenmill.compute.forward import Kernels
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import lay_out
from tokenmill.runner.drafter_rows import Side, side_of
from tokenmill.runner.replays import Replays
from tokenmill.runner.rows import Rows
from tokenmill.sampling.arrays import send
from tokenmill.speculate.choice import Choosing
from tokenmill.speculate.draft_states import DraftStates
from tokenmill.speculate.passes import Model, Passes

PROMPTS = (1, 2, 4, 8, 16, 32, 64, 256, 2400, 3000)
"""Lengths of prompts that are followed once while loading on a GPU, so that kernels are compiled."""


class DraftModel:
    """A DeviceDrafter with a model of its own."""

    follows = True
    levels = 0

    def __init__(self, made: Model, kernels: Kernels, most: int, *, record: bool) -> None:
        self.made = made
        self.kernels = kernels
        self.most = most
        self.catches_up = "anew" if made.model.spec.states else "on"
        # On a CPU, ids that must be clamped keep a pass from being a native tape.
        self.replays = Replays(kernels, record=record and (not kernels.records or made.known == made.words))
        self.rows: Rows
        self.side: Side
        self.choosing: Choosing
        self.passes: Passes
        self.states: DraftStates | None = None

    def bind(self, rows: Rows, pool: KVPool) -> None:
        """Take the rows and the pool, whose last layers are the drafter's."""
        self.rows, self.side = rows, side_of(rows, pool, self.made.model.spec.kv_specs)
        self.choosing = Choosing(self.kernels, rows, exact=rows.device.type == "cpu")
        if pool.drafter_states is not None:
            self.states = DraftStates(pool.drafter_states, rows.spare + 1, self.most)
        self.passes = Passes(self.made, self.kernels, self.side, self.choosing, self.replays, self.states)

    def warm(self) -> None:
        """Record the passes with the spare row, larger ones first, because smaller ones reuse their memory."""
        if self.choosing.exact:
            return
        self.side.computed[self.rows.spare] = 1
        plain = (False,) * len(self.side.groups)
        for rung in reversed(self.choosing.ladder):
            placed, _ = self.choosing.place([self.rows.spare] * rung)
            for wide in (True, False):
                for drawn in (False, True):
                    if self.states is not None:
                        self.states.place(placed.row_ids, 0 if wide else 1)
                    self.passes.guess_behind(placed, plain, wide=wide, drawn=drawn)
        for count in PROMPTS:
            if count <= self.rows.max_len:
                self.follow([(self.rows.spare, 0, count)])
        self.follow([(self.rows.spare, 0, 1), (self.rows.spare, 0, 2)])

    def follow(self, spans: list[tuple[int, int, int]], seen: Seen | None = None) -> None:
        """Compute known tokens, only for their K/V."""
        if not spans:
            return
        device = self.rows.device
        row_list, counts = [span[0] for span in spans], [span[2] for span in spans]
        packed = send(torch.tensor([row_list, counts, [span[1] for span in spans]], dtype=torch.int64), device)
        self.side.computed[packed[0]] = packed[2]
        shifted = self._shifted(row_list)
        kinds = [(self._entries(g, row_list), moved) for g, moved in zip(self.side.groups, shifted, strict=True)]
        size = sum(counts), max(counts)
        tokens, _, ctx = lay_out(self.side, self.side, self.kernels, packed[:2], size, kinds)
        if device.type == "cpu":
            ends = torch.tensor(counts).cumsum(0).tolist()
            ctx.spans = [(e - c, c, n) for e, c, n in zip(ends, counts, ctx.kv_len.tolist(), strict=True)]
        if self.states is not None:
            ctx = self.states.follow(spans, ctx)
        self.made.forward(tokens, ctx)

    def propose(self, step: Drafting) -> None:
        """Guess for each row: its newest two tokens give the first guess, each guess gives the next one."""
        side, shifted = self.side, self._shifted(step.row_list)
        placed, drawn = self.choosing.place(step.row_list)
        row_ids = placed.row_ids
        if not drawn and self.choosing.exact and self.states is None:
            self._begin_here(step.row_list)
            if self.passes.guess_all(placed, step.count, shifted):
                return
        length = self.rows.length[row_ids]
        newest = (length - 1).clamp_(min=1)
        side.length[row_ids] = length
        side.computed[row_ids] = newest
        self.passes.older.computed[row_ids] = newest - 1
        if self.states is not None:
            self.states.go_back(row_ids, length)
        real = slice(len(step.row_list))  # the spare row would move on once for each place of the rung that it fills
        for n in range(step.count):
            if self.states is not None:
                self.states.place(row_ids, n)
            ids = self.passes.guess_behind(placed, shifted, wide=n == 0, drawn=drawn)
            self.kernels.advance_(row_ids[real], ids[real], side.tokens, side.length, side.computed)

    def _begin_here(self, row_list: list[int]) -> None:
        """Put the first pass at each row's newest two tokens (host memory)."""
        known, length = self.rows.length.numpy(), self.side.length.numpy()
        computed, older = self.side.computed.numpy(), self.passes.older.computed.numpy()
        for row in row_list:
            length[row] = count = int(known[row])
            computed[row] = newest = max(1, count - 1)
            older[row] = newest - 1

    def forget_weights(self) -> None:
        """Drop what was made from the old weights; it is made again from the new ones."""
        self.replays.forget_weights()

    def _entries(self, group: int, row_list: list[int]) -> int:
        """Entries of the longest table of these rows. The spare row does not count: all of its entries may be read."""
        blocks = self.rows.blocks[group]
        if self.rows.spare in row_list:
            return self.rows.tables[group].shape[1]
        return max(len(blocks[row]) for row in row_list)

    def _shifted(self, row_list: list[int]) -> tuple[bool, ...]:
        """For each of its KV groups: have the tables lost their first entries, so that entry j is not block j of the
        text?"""
        return tuple(not self.rows.shifted[g].isdisjoint(row_list) for g in self.side.groups)
