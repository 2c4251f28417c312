"""Lookahead with windows: guesses from Jacobi iterations that run beside the text. No other model, no training.

A row's drafts are one tree. Its window holds a line of guesses for each of the next `window` places. The first guesses
of all lines form a chain behind the newest token; each line continues from its own first guess. In each step the model
says a token behind the end of each line. With it, the line is a run of `length` tokens that the model means: the run
goes into the row's pool, and the lines move on by one place. Beside the window, the tree holds candidates: runs of the
pool, and of the text itself, that begin with the newest token. Must not know: plans, verification.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.drafting import Drafting
from tokenmill.runner.drafts import Forgetful
from tokenmill.speculate.same_text import SameText
from tokenmill.speculate.shapes import Windows

PLACES = 1 << 10
"""Places of a row's pool. A hash of its first token puts a run into a place."""
READ = 32
"""Runs of the known text that are read per step; a prompt is read over several steps."""
BEHIND = 1 << 10
"""Only this many last tokens of a prompt are read."""
MIX = 40503


class RunPool:
    """The latest runs [rows, PLACES + 1, candidates, length], by row and first token; -1: none. Runs that are not kept
    are written to the last place, which is never read. `era`: the row's text that a run is of; others do not count."""

    def __init__(self, rows: int, shape: Windows, device: torch.device) -> None:
        self.most = shape.candidates
        self.runs = torch.full((rows, PLACES + 1, self.most, shape.length), -1, dtype=torch.int32, device=device)
        self.turn = torch.zeros((rows, PLACES + 1), dtype=torch.int64, device=device)
        self.era = torch.zeros(self.runs.shape[:3], dtype=torch.int32, device=device)
        self.now = torch.zeros(rows, dtype=torch.int32, device=device)

    def forget(self, row_ids: Tensor, gone: Tensor) -> None:
        """Empty the rows that are `gone` [S]."""
        self.now[row_ids] += gone

    def take(self, row_ids: Tensor, runs: Tensor, real: Tensor) -> None:
        """Keep runs [S, M, length], those that are real [S, M] and not there yet."""
        place, row = _place(runs[..., 0]), row_ids[:, None]
        now = self.now[row]
        there = ((self.runs[row, place] == runs[:, :, None]).all(-1) & (self.era[row, place] == now[..., None])).any(-1)
        earlier = torch.ones(runs.shape[1], runs.shape[1], dtype=torch.bool, device=runs.device).tril(-1)
        twice = ((runs[:, :, None] == runs[:, None]).all(-1) & real[:, None] & earlier).any(-1)
        fresh = real & ~there & ~twice
        before = ((place[:, :, None] == place[:, None]) & fresh[:, None] & earlier).sum(-1)
        kept = fresh & (before < self.most)
        target = torch.where(kept, place, PLACES)
        turn = (self.turn[row, target] + before) % self.most
        self.runs[row, target, turn] = runs.to(torch.int32)
        self.era[row, target, turn] = now.expand_as(turn)
        self.turn.index_put_((row.expand_as(target), target), kept.long(), accumulate=True)

    def behind(self, row_ids: Tensor, last: Tensor) -> Tensor:
        """[S, candidates, length - 1]: what came behind the tokens `last` [S], the latest first; where that is
        unknown, `last` again."""
        place = _place(last)
        latest = (self.turn[row_ids, place][:, None] - 1 - torch.arange(self.most, device=last.device)) % self.most
        at = row_ids[:, None], place[:, None], latest
        found = self.runs[at].long()
        known = (found[..., :1] == last[:, None, None]) & (self.era[at] == self.now[row_ids][:, None])[..., None]
        return torch.where(known, found[..., 1:], last[:, None, None])


class LookaheadWindows(Forgetful):
    """A DeviceDrafter that makes these trees."""

    def __init__(self, shape: Windows) -> None:
        self.shape = shape
        self.most = shape.nodes
        self.levels = shape.levels
        self.pool: RunPool
        self.parents: Tensor
        self.lines: Tensor
        self.text: SameText
        self.read: Tensor
        self.tried: Tensor

    def bind(self, rows: Any, pool: Any) -> None:
        """Make for each row: a pool, a window [length - 1, window], the text that they are of, how much of it has been
        read, and how many nodes were left behind it."""
        count, device = rows.tokens.shape[0], rows.device
        self.pool = RunPool(count, self.shape, device)
        self.parents = torch.tensor(self.shape.parents(), device=device)
        self.lines = torch.zeros((count, self.shape.length - 1, self.shape.window), dtype=torch.int64, device=device)
        self.read, self.tried = torch.zeros((2, count), dtype=torch.int64, device=device)
        self.text = SameText(count, device)

    def propose(self, step: Drafting) -> None:
        """Learn what was said, move the window on, and write candidates and window behind the text."""
        rows, row_ids = step.rows, step.row_ids
        known = rows.length[row_ids]
        said, count, kept = step.samples()
        same = self.text.goes_on(rows, row_ids, kept)
        self.pool.forget(row_ids, ~same)
        whole = same & (count == 1 + self.most) & (self.tried[row_ids] == self.most)
        self._read(rows.tokens, row_ids, known, same)
        ends = self._ends(said)
        lines = self.lines[row_ids]
        self.pool.take(row_ids, torch.cat((lines, ends[:, None]), 1).transpose(1, 2), whole[:, None].expand_as(ends))
        lines = self._moved(rows.tokens, row_ids, known, torch.cat((lines[:, 1:], ends[:, None]), 1), kept, whole)
        last = rows.tokens[row_ids, known - 1]
        drafts = torch.cat((self.pool.behind(row_ids, last.long()).flatten(1), lines.flatten(1)), 1)[:, : step.count]
        ahead = torch.arange(step.count, device=known.device)
        rows.tokens[row_ids[:, None], known[:, None] + ahead] = drafts.to(torch.int32)
        rows.parents[row_ids, : step.count] = self.parents[: step.count]
        self.lines[row_ids], self.tried[row_ids] = lines, step.count

    def _ends(self, said: Tensor) -> Tensor:
        """[S, window]: what was said behind the end of each line, if the whole tree was tried."""
        at = torch.arange(1 + self.most - self.shape.window, 1 + self.most, device=said.device)
        return said[:, at.clamp(max=said.shape[1] - 1)].long()

    def _read(self, tokens: Tensor, row_ids: Tensor, known: Tensor, same: Tensor) -> None:
        """Put the next unread runs of the text itself into the pool."""
        length = self.shape.length
        begun = torch.where(same, self.read[row_ids], (known - BEHIND).clamp(min=0))
        first = begun[:, None] + torch.arange(READ, device=known.device)
        at = first[..., None] + torch.arange(length, device=known.device)
        runs = tokens[row_ids[:, None, None], at.clamp(max=tokens.shape[1] - 1)].long()
        self.pool.take(row_ids, runs, first + length <= known[:, None])
        self.read[row_ids] = (begun + READ).minimum((known - length + 1).clamp(min=0)).maximum(begun)

    def _moved(
        self, tokens: Tensor, row_ids: Tensor, known: Tensor, lines: Tensor, kept: Tensor, whole: Tensor
    ) -> Tensor:
        """lines [S, length - 1, window], one place on already, moved on by the other tokens that became known; what is
        missing is taken from somewhere in the text."""
        levels, window = lines.shape[1:]
        at = torch.arange(window, device=known.device) + kept[:, None] - 1
        there = whole[:, None] & (at < window)
        moved = lines.gather(2, at.clamp(0, window - 1)[:, None].expand(-1, levels, -1))
        anywhere = torch.arange(levels * window, device=known.device) * 7919 + known[:, None] * MIX
        other = tokens[row_ids[:, None], anywhere % known[:, None]].long().view_as(moved)
        return torch.where(there[:, None], moved, other)


def _place(first: Tensor) -> Tensor:
    return first.clamp(min=0) * MIX % PLACES
