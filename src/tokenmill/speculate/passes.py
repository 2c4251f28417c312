"""One pass of a drafter's model. Owns: from rows to the token that it guesses for each, recorded where that can be.

A pass computes each row's next token, or its newest two (`wide`), which is all that a row in step can lack. It begins
at row numbers and ends at a choice: the most likely token, or where rows sample the one that the row's own noise would
draw, so that it is the target's choice the more often the more alike the two models are. Nothing in it moves a row on,
so that it may be run twice. Must not know: plans, how guesses are verified.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.forward import DRAWN, Draws, ForwardContext, Kernels
from tokenmill.core.model import CausalLM
from tokenmill.runner.batch import apart, lay_out, single_tokens
from tokenmill.runner.recorder import Best, Layout, Made, Recordings
from tokenmill.runner.rows import Rows
from tokenmill.runner.side import Side
from tokenmill.sampling import table as features
from tokenmill.sampling.arrays import send

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Row counts that passes on a GPU are filled up to."""
MOST_ROWS = 32
"""Of a native tape: above, products take longer than the way to them."""
ROOM = 32 << 20
"""Bytes that the temporary tensors of a native tape may take."""
Key = tuple[int, bool, bool]
"""Rows, wide, drawn."""


@dataclass(frozen=True, slots=True)
class Model:
    """A drafter's model and what it shares with the target's: ids from `words` on are no words of the target,
    and those from `known` on are none of its own."""

    model: CausalLM
    words: int

    @property
    def known(self) -> int:
        """Rows of its embedding."""
        return self.model.spec.vocab_size


class Passes(Layout[Key]):
    """Layout of passes. exact: of just so many rows (native tapes); else filled up with the spare row."""

    def __init__(self, made: Model, kernels: Kernels, rows: Rows, side: Side, *, exact: bool) -> None:
        self.made, self.model, self.kernels, self.rows, self.side, self.exact = (
            made, made.model, kernels, rows, side, exact,
        )  # fmt: skip
        self.older = side.moved(torch.zeros_like(side.computed))
        self.ladder = [n for n in LADDER if n < rows.spare] + [rows.spare]
        self.row_bytes = 2 * (6 * made.known + 60 * self.model.spec.hidden_size * len(self.model.spec.kv_specs))
        self.row_ids: dict[int, Tensor] = {}
        self.twice: dict[int, Tensor] = {}
        self.back: dict[int, Tensor] = {}
        self.words: dict[int, Tensor] = {}
        self.filled: dict[int, tuple[list[int], list[int]]] = {}
        self.shifted: tuple[bool, ...] = ()

    def key_of(self, row_list: list[int], *, wide: bool) -> Key:
        """What tells recordings apart, for these rows."""
        bits = self.rows.sampling.bits
        drawn = any(bits[row] & features.SAMPLED for row in row_list)
        count = len(row_list)
        return count if self.exact else self.ladder[bisect_left(self.ladder, count)], wide, drawn

    def place(self, key: Key, row_list: list[int]) -> Tensor:
        """Put the rows where passes of this key read them; -> their numbers, filled up."""
        rung, device, spare = key[0], self.rows.device, self.rows.spare
        bits = self.rows.sampling.bits
        wanted = row_list + [spare] * (rung - len(row_list))
        words = [DRAWN if bits[row] & features.SAMPLED else 0 for row in wanted] if key[2] else []
        if rung not in self.row_ids:
            self.row_ids[rung] = torch.full((rung,), spare, dtype=torch.int64, device=device)
            self.twice[rung] = self.row_ids[rung].repeat(2)
            self.back[rung] = torch.arange(2, device=device).repeat_interleave(rung)
            self.words[rung] = torch.zeros(rung, dtype=torch.int32, device=device)
        if self.filled.get(rung) != (wanted, words):
            self.filled[rung] = wanted, words
            sent = send(torch.tensor(wanted, dtype=torch.int64), device)
            self.row_ids[rung].copy_(sent)
            self.twice[rung].view(2, rung).copy_(sent)
            if words:
                self.words[rung].copy_(send(torch.tensor(words, dtype=torch.int32), device))
        return self.row_ids[rung]

    def computing(self, key: Key) -> Callable[[], Made]:
        """From row numbers to a choice, or to logits where a choice cannot be recorded."""
        row_ids = self.row_ids[key[0]]
        lay = self._wide(row_ids) if key[1] else self._narrow(row_ids)

        def compute() -> Made:
            tokens, ctx = lay()
            if self.made.known < self.made.words:
                tokens = tokens.clamp(max=self.made.known - 1)
            hidden = self.model.forward(tokens, ctx)
            if key[1]:
                count = row_ids.shape[0]
                hidden = hidden[count:] if self.exact else hidden[1::2].contiguous()
            made = Made(tokens, row_ids, hidden, ctx, self.model.logits(hidden, ctx))
            assert made.logits is not None
            if self.made.known > self.made.words:
                made.logits = made.logits[:, : self.made.words].contiguous()
            if not key[2]:
                made.best = self.kernels.greedy(made.logits)
            elif not self.exact:
                made.best = self.draw(key, made.logits)
            return made

        return compute

    def draw(self, key: Key, logits: Tensor) -> Best:
        """What the rows' noise draws from these logits."""
        row_ids, table = self.row_ids[key[0]], self.rows.sampling
        draws = Draws(row_ids, self.side.computed[row_ids], table.stream, table.num_prompt, table.inverse_temperature)
        return self.kernels.choose(logits, self.words[key[0]], None, draws) or self.kernels.greedy(logits)

    def _narrow(self, row_ids: Tensor) -> Callable[[], tuple[Tensor, ForwardContext]]:
        side, shifted = self.side, self.shifted
        starts = apart(side.computed[row_ids] + 1)
        return lambda: single_tokens(self.kernels, side, side, row_ids, starts, shifted=shifted)

    def _wide(self, row_ids: Tensor) -> Callable[[], tuple[Tensor, ForwardContext]]:
        """The newest two tokens of each row. On a CPU each is a sequence of its own that ends with it (as in
        runner/ragged.py): first all the older ones, then all the newest."""
        side, older, shifted, count = self.side, self.older, self.shifted, row_ids.shape[0]
        if self.exact and not any(shifted):
            twice, back = self.twice[count], self.back[count]
            starts = apart(older.computed[twice] + back + 1)

            def lay() -> tuple[Tensor, ForwardContext]:
                return single_tokens(self.kernels, older, older, twice, starts, back)

            return lay
        kinds = [(table.shape[1], any(shifted) and shifted[g]) for g, table in enumerate(side.tables)]

        def lay_both() -> tuple[Tensor, ForwardContext]:
            packed = torch.stack((row_ids, torch.full_like(row_ids, 2)))
            tokens, _, ctx = lay_out(older, older, self.kernels, packed, (2 * count, 2), kinds)
            if self.exact:
                ctx.spans = [(2 * i, 2, n) for i, n in enumerate(ctx.kv_len.tolist())]
            return tokens, ctx

        return lay_both

    def keeps(self, key: Key) -> bool:
        """Few rows whose tensors fit into the room."""
        return key[0] <= MOST_ROWS and key[0] * self.row_bytes <= ROOM

    def ahead(self) -> Iterator[Key]:
        """Every rung, the largest first."""
        for rung in reversed(self.ladder):
            for wide in (True, False):
                for drawn in (False, True):
                    self.place((rung, wide, drawn), [])
                    yield rung, wide, drawn

    def fill(self, key: Key, plan: object = None) -> None:
        """The spare row alone: passes of plans are placed by `place`."""
        self.place(key, [])


def run_pass(passes: Passes, recordings: Recordings[Key] | None, key: Key) -> Best:
    """Compute a pass, from a recording if there is one."""
    made = None
    if recordings is not None and recordings.possible and not any(passes.shifted):
        made = recordings.replay(key, passes)
    if made is None:
        made = passes.computing(key)()
    if made.best is not None:
        return made.best
    assert made.logits is not None
    return passes.draw(key, made.logits)
