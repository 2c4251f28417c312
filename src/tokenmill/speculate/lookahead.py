"""Lookahead: guesses from what the model itself said behind wrong guesses. No other model, no training.

Each step verifies a chain of guesses and gives a token behind each of them, also behind wrong ones. This is a Jacobi
iteration of the coming text. A pool per row keeps which token was said behind which two tokens. When the text comes to
two such tokens again, that token is the guess; where the pool has nothing, the iteration itself continues. If trees can
be verified, windows.py goes further. Must not know: plans, verification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.drafting import Drafting
from tokenmill.runner.drafts import Forgetful
from tokenmill.speculate.same_text import SameText

POOL = 1 << 12
"""Places of a row's pool. A hash puts each pair of tokens into a place, where the latest pair stays."""
MIX = 40503


class Lookahead(Forgetful):
    """A DeviceDrafter with a pool of token triples: two tokens, and the one that was said behind them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pool: Tensor
        self.text: SameText

    def bind(self, rows: Any, pool: Any) -> None:
        """Make a pool for each row, and a mark of the text that it belongs to."""
        count, device = rows.tokens.shape[0], rows.device
        self.pool = torch.full((count, POOL), -1, dtype=torch.int32, device=device)
        self.text = SameText(count, device)

    def propose(self, step: Drafting) -> None:
        """Learn what was said, then guess from pair to pair."""
        rows, row_ids = step.rows, step.row_ids
        known = rows.length[row_ids]
        said, count, kept = step.samples()
        earlier = known - kept
        begun = self.text.goes_on(rows, row_ids, kept)
        self.pool[row_ids] = torch.where(begun[:, None], self.pool[row_ids], -1)
        self._learn(rows.tokens, row_ids, earlier, said, count, kept)
        ahead = self._iterated(said, count, kept, step.count)
        before, last = (rows.tokens[row_ids, (known - n).clamp(min=0)].long() for n in (2, 1))
        for n in range(step.count):
            found = self.pool[row_ids, _place(before, last)].long()
            guess = torch.where(found >= 0, found, torch.where(ahead[:, n] >= 0, ahead[:, n], last))
            rows.tokens[row_ids, known + n] = guess.to(torch.int32)
            before, last = last, guess

    def _learn(self, tokens: Tensor, row_ids: Tensor, known: Tensor, said: Tensor, count: Tensor, kept: Tensor) -> None:
        """said [S, W]: what came behind the first `known` [S] tokens, and behind each of the guesses that follow them.
        The first wrong guess has been written over by what stands there; the later ones still lie in the row."""
        for n in range(said.shape[1]):
            before, last = (tokens[row_ids, (known + n - m).clamp(min=0)].long() for m in (2, 1))
            gone = (n >= kept) & (n < kept + 2)  # the pair holds the guess that was overwritten
            place = _place(before, last)
            old = self.pool[row_ids, place]
            self.pool[row_ids, place] = torch.where((n < count) & ~gone, said[:, n].to(torch.int32), old)

    @staticmethod
    def _iterated(said: Tensor, count: Tensor, kept: Tensor, wanted: int) -> Tensor:
        """[S, wanted]: what was said of the places behind those that stand, -1 where nothing was."""
        at = kept[:, None] + torch.arange(wanted, device=said.device)
        found = said.gather(1, at.clamp(max=said.shape[1] - 1))
        return torch.where(at < count[:, None], found, -1)


def _place(before: Tensor, last: Tensor) -> Tensor:
    """The pool's place of a pair of tokens [S]."""
    return (before * MIX + last) % POOL
