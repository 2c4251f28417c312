"""The rows that a drafter guesses for. Owns: where recorded work reads their numbers, and how a guess is chosen.

For a row that samples, the guess is what the row's own noise draws from the drafter's logits. The more alike the two
models are, the more often this is the target's choice. Must not know: where logits come from.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from tokenmill.compute.forward import DRAWN, Draws, Kernels
from tokenmill.runner.rows import Rows
from tokenmill.sampling import table as features
from tokenmill.sampling.arrays import send
from tokenmill.sampling.noise import noisy_, position_keys

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Rungs: the numbers of rows that work on a GPU is filled up to."""
MOST_ROWS = 32
"""Most rows of a native tape. With more, products take longer than the calls that a tape saves."""


class FilledRows:
    """Rows, filled up to a rung with the spare row: `row_ids` [rung]; the same two times over (`twice`), with `back` 0
    in the first half and 1 in the second; and `words` [rung] as Kernels.choose takes them."""

    def __init__(self, rung: int, spare: int, device: torch.device) -> None:
        self.row_ids = torch.full((rung,), spare, dtype=torch.int64, device=device)
        self.twice = self.row_ids.repeat(2)
        self.back = torch.arange(2, device=device).repeat_interleave(rung)
        self.words = torch.zeros(rung, dtype=torch.int32, device=device)
        self.filled: tuple[list[int], list[int]] = ([], [])


class Choosing:
    """Rows and choices of one drafter. exact: rows are not filled up to rungs (a CPU)."""

    def __init__(self, kernels: Kernels, rows: Rows, *, exact: bool) -> None:
        self.kernels = kernels
        self.rows = rows
        self.exact = exact
        self.ladder = [n for n in LADDER if n < rows.spare] + [rows.spare]
        self.placed: dict[int, FilledRows] = {}

    def place(self, row_list: list[int]) -> tuple[FilledRows, bool]:
        """Put these rows' numbers where recorded work reads them; -> (their places, does any of them sample?)."""
        rows, count = self.rows, len(row_list)
        rung = count if self.exact else self.ladder[bisect_left(self.ladder, count)]
        if rung not in self.placed:
            self.placed[rung] = FilledRows(rung, rows.spare, rows.device)
        placed, bits = self.placed[rung], rows.sampling.bits
        wanted = row_list + [rows.spare] * (rung - count)
        words = [DRAWN if bits[row] & features.SAMPLED else 0 for row in wanted]
        if placed.filled != (wanted, words):
            placed.filled = [], []  # what fails half-way is written again
            sent = send(torch.tensor([wanted, words], dtype=torch.int64), rows.device)
            placed.row_ids.copy_(sent[0])
            placed.twice.view(2, rung).copy_(sent[0])
            placed.words.copy_(sent[1])
            placed.filled = wanted, words
        return placed, any(words)

    def choose(
        self, logits: Tensor, placed: FilledRows, positions: Tensor, *, drawn: bool, words: Tensor | None = None
    ) -> Tensor:
        """logits [rung, V] behind the rows' tokens at positions [rung] -> a token each [rung]. words [V]: what each
        place of the logits means, if not itself."""
        if words is not None:
            ids = self._draw(logits, placed, positions, words) if drawn else self.kernels.greedy(logits)[0]
            return words[ids]
        if drawn:
            table = self.rows.sampling
            draws = Draws(placed.row_ids, positions, table.stream, table.num_prompt, table.inverse_temperature)
            found = self.kernels.choose(logits, placed.words, None, draws)
            return found[0] if found is not None else self._draw(logits, placed, positions)
        return self.kernels.greedy(logits)[0]

    def scores(
        self, logits: Tensor, row_ids: Tensor, positions: Tensor, sampled: Tensor | None, words: Tensor | None = None
    ) -> Tensor:
        """What `choose` takes the largest of, so that its next largest can be guessed, too [n, V] float32. sampled [n]:
        lines that are drawn; None: none is."""
        found = logits.float()
        if sampled is None:
            return found
        table = self.rows.sampling
        keys = position_keys(table.stream[row_ids], positions + 1 - table.num_prompt[row_ids])
        bases = table.bases[: found.shape[1]] if words is None else table.bases[words]
        noisy = noisy_(found * table.inverse_temperature[row_ids][:, None], keys, bases)
        return torch.where(sampled[:, None], noisy, found)

    def _draw(self, logits: Tensor, placed: FilledRows, positions: Tensor, words: Tensor | None = None) -> Tensor:
        """The same in plain torch."""
        table, ids = self.rows.sampling, placed.row_ids
        keys = position_keys(table.stream[ids], positions + 1 - table.num_prompt[ids])
        scores = logits.float() * table.inverse_temperature[ids][:, None]
        bases = table.bases[: scores.shape[1]] if words is None else table.bases[words]
        noisy = noisy_(scores.clone(), keys, bases)
        return torch.where(placed.words > 0, noisy.argmax(1), scores.argmax(1))
