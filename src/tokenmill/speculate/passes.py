"""One pass of a drafter's model. Owns: computing guesses from the rows' newest tokens, recorded where possible.

A pass computes each row's newest token, or its newest two (`wide`): a row that missed no step lacks no more than that.
A pass does not advance any row. Must not know: plans, how guesses are verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels
from tokenmill.compute.model import CausalLM
from tokenmill.runner.batch import apart, lay_out, single_tokens
from tokenmill.runner.drafter_rows import Side
from tokenmill.runner.replays import Replays
from tokenmill.speculate.choice import MOST_ROWS, Choosing, FilledRows
from tokenmill.speculate.draft_states import DraftStates


@dataclass(frozen=True, slots=True)
class Model:
    """A drafter's model. The target has no ids from `words` on; the drafter itself has none from `known` on."""

    model: CausalLM
    words: int

    @property
    def known(self) -> int:
        """Rows of its embedding."""
        return self.model.spec.vocab_size

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """As the model's."""
        if self.known < self.words:
            tokens = tokens.clamp(max=self.known - 1)
        return self.model.forward(tokens, ctx)

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Logits over the target's vocabulary."""
        logits = self.model.logits(hidden, ctx)
        return logits if self.known <= self.words else logits[:, : self.words].contiguous()


class Passes:
    """The passes of one model, whose rows are `side`; `older` is one position before it in each row."""

    def __init__(
        self,
        made: Model,
        kernels: Kernels,
        side: Side,
        choosing: Choosing,
        replays: Replays,
        states: DraftStates | None = None,
    ) -> None:
        """states: those of a model with recurrent layers; they are placed before each pass."""
        self.made = made
        self.states = states
        self.kernels = kernels
        self.side = side
        self.older = side.moved(torch.zeros_like(side.computed))
        self.choosing = choosing
        self.replays = replays

    def guess_behind(self, placed: FilledRows, shifted: tuple[bool, ...], *, wide: bool, drawn: bool) -> Tensor:
        """-> a guess for each placed row [rung]."""
        rung, exact = placed.row_ids.shape[0], self.choosing.exact
        chooses = not (drawn and exact)  # a native tape cannot hold such a choice

        def computing() -> Callable[[], Tensor]:
            lay = self._wide(placed, shifted) if wide else self._narrow(placed.row_ids, shifted)
            return lambda: self._compute(lay(), placed, wide=wide, drawn=drawn if chooses else None)

        # Two tokens of a row with recurrent states must follow each other, and native tapes have no such layout.
        if any(shifted) or (exact and (rung > MOST_ROWS or (wide and self.states is not None))):
            made = computing()()
        else:
            made = self.replays.make_or_replay((rung, wide, drawn), computing)
        if chooses:
            return made
        return self.choosing.choose(made, placed, self.side.computed[placed.row_ids], drawn=True)

    def guess_all(self, placed: FilledRows, count: int, shifted: tuple[bool, ...]) -> bool:
        """Make `count` guesses for each placed row as one recording and write them behind the row's tokens; False:
        nothing was computed, because such a recording cannot be made or rows draw their guesses."""
        rung, side = placed.row_ids.shape[0], self.side
        if not self.kernels.records or self.states is not None or any(shifted) or rung > MOST_ROWS:
            return False

        def computing() -> Callable[[], Tensor]:
            lays = [self._wide(placed, shifted), *[self._narrow(placed.row_ids, shifted) for _ in range(count - 1)]]

            def compute() -> Tensor:
                for n, lay in enumerate(lays):
                    ids = self._compute(lay(), placed, wide=n == 0, drawn=False)
                    self.kernels.advance_(placed.row_ids, ids, side.tokens, side.length, side.computed)
                return ids

            return compute

        self.replays.make_or_replay((rung, "all", count), computing)
        return True

    def _compute(
        self, laid: tuple[Tensor, ForwardContext], placed: FilledRows, *, wide: bool, drawn: bool | None
    ) -> Tensor:
        """Guesses, or logits where `drawn` is None."""
        tokens, ctx = laid
        hidden = self.made.forward(tokens, ctx)
        if wide:  # the newer of each row's two tokens
            hidden = hidden[placed.row_ids.shape[0] :] if ctx.max_query == 1 else hidden[1::2].contiguous()
        logits = self.made.logits(hidden, ctx)
        if drawn is None:
            return logits
        positions = self.side.computed[placed.row_ids] if drawn else placed.row_ids
        return self.choosing.choose(logits, placed, positions, drawn=drawn)

    def _narrow(self, row_ids: Tensor, shifted: tuple[bool, ...]) -> Callable[[], tuple[Tensor, ForwardContext]]:
        side = self.side
        starts = apart(side.computed[row_ids] + 1)

        def lay() -> tuple[Tensor, ForwardContext]:
            tokens, ctx = single_tokens(self.kernels, side, side, row_ids, starts, kinds=(shifted, ()))
            return tokens, ctx if self.states is None else self.states.seen(ctx, row_ids.shape[0], wide=False)

        return lay

    def _wide(self, placed: FilledRows, shifted: tuple[bool, ...]) -> Callable[[], tuple[Tensor, ForwardContext]]:
        """The newest two tokens of each row. On a CPU each is a sequence of its own that ends with it (as in
        runner/ragged.py): first all the older ones, then all the newest."""
        side, older, row_ids, count = self.side, self.older, placed.row_ids, placed.row_ids.shape[0]
        if self.choosing.exact and self.states is None and not any(shifted):
            starts = apart(older.computed[placed.twice] + placed.back + 1)
            return lambda: single_tokens(self.kernels, older, older, placed.twice, starts, placed.back)
        kinds = [(table.shape[1], any(shifted) and shifted[g]) for g, table in enumerate(side.tables)]

        def lay() -> tuple[Tensor, ForwardContext]:
            packed = torch.stack((row_ids, torch.full_like(row_ids, 2)))
            tokens, _, ctx = lay_out(older, older, self.kernels, packed, (2 * count, 2), kinds)
            if self.choosing.exact:
                ctx.spans = [(2 * i, 2, n) for i, n in enumerate(ctx.kv_len.tolist())]
            return tokens, ctx if self.states is None else self.states.seen(ctx, count, wide=True)

        return lay
