"""A smaller model that guesses. Owns: keeping its K/V up with the rows, and guessing token by token.

Its layers have pages of their own in the rows' block tables, so that prefixes, forks and evictions need nothing else.
It takes in prompts as the target computes them (`follow`); where it guesses it first computes the newest two tokens,
which is all that verification can have left it without. Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

import torch

from tokenmill.core.drafting import Drafting
from tokenmill.core.forward import Kernels
from tokenmill.device.graphs import Recorder
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import lay_out
from tokenmill.runner.recorder import Graphs, Recordings, Tapes
from tokenmill.runner.rows import Rows
from tokenmill.runner.side import Side, side_of
from tokenmill.sampling.arrays import send
from tokenmill.speculate.passes import ROOM, Key, Model, Passes, run_pass


class DraftModel:
    """A DeviceDrafter with a model of its own."""

    follows = True

    def __init__(self, made: Model, kernels: Kernels, most: int, *, record: bool) -> None:
        self.made = made
        self.model = made.model
        self.kernels = kernels
        self.most = most
        self.record = record
        self.rows: Rows
        self.side: Side
        self.passes: Passes
        self.recordings: Recordings[Key] | None = None

    def bind(self, rows: Rows, pool: KVPool) -> None:
        """Its layers are the pool's last ones."""
        self.rows, self.side = rows, side_of(rows, pool, self.model.spec.kv_specs)
        on_cpu = rows.device.type == "cpu"
        self.passes = Passes(self.made, self.kernels, rows, self.side, exact=on_cpu)
        if not self.record:
            return
        if not self.kernels.records:
            self.recordings = Graphs(self.kernels, Recorder())
        elif self.made.known == self.made.words:  # else ids are cut, which is no native operation
            self.recordings = Tapes(self.kernels, ROOM)

    def warm(self) -> None:
        """Record the passes, with the row that is nobody's; it stays where it was."""
        spare = self.rows.spare
        self.side.computed[spare] = 1
        if self.recordings is not None:
            self.recordings.warm(self.passes)
        if self.rows.device.type != "cpu":
            self.follow([(spare, 0, 1)])

    def follow(self, spans: list[tuple[int, int, int]]) -> None:
        """Compute tokens for their K/V alone."""
        rows, device = self.rows, self.rows.device
        row_list, counts = [span[0] for span in spans], [span[2] for span in spans]
        packed = send(torch.tensor([row_list, counts, [span[1] for span in spans]], dtype=torch.int64), device)
        self.side.computed[packed[0]] = packed[2]
        self._look(row_list)
        blocks = [rows.blocks[g] for g in self.side.groups]
        known = [row for row in row_list if row != rows.spare]
        kinds = [
            (max((len(held[row]) for row in known), default=1), shifted)
            for held, shifted in zip(blocks, self.passes.shifted, strict=True)
        ]
        size = sum(counts), max(counts)
        tokens, _, ctx = lay_out(self.side, self.side, self.kernels, packed[:2], size, kinds)
        if device.type == "cpu":
            ends = torch.tensor(counts).cumsum(0).tolist()
            ctx.spans = [(e - c, c, n) for e, c, n in zip(ends, counts, ctx.kv_len.tolist(), strict=True)]
        if self.made.known < self.made.words:
            tokens = tokens.clamp(max=self.made.known - 1)
        self.model.forward(tokens, ctx)

    def propose(self, step: Drafting) -> None:
        """The newest two tokens of each row give the first guess, each guess gives the next one."""
        side, passes = self.side, self.passes
        self._look(step.row_list)
        row_ids = passes.place(passes.key_of(step.row_list, wide=True), step.row_list)
        length = self.rows.length[row_ids]
        side.length[row_ids] = length
        newest = (length - 1).clamp_(min=1)
        side.computed[row_ids] = newest
        passes.older.computed[row_ids] = newest - 1
        for n in range(step.count):
            ids, _, _ = run_pass(passes, self.recordings, passes.key_of(step.row_list, wide=n == 0))
            self.kernels.advance_(row_ids, ids, side.tokens, side.length, side.computed)

    def forget_weights(self) -> None:
        """Recordings name copies that kernels made of small tensors."""
        if self.recordings is not None:
            self.recordings.forget_weights()

    def _look(self, row_list: list[int]) -> None:
        """Which of its groups' tables do not begin at j * block size."""
        self.passes.shifted = tuple(not self.rows.shifted[g].isdisjoint(row_list) for g in self.side.groups)
