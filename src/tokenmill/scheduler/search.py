"""How the sequences of one request branch. Owns: sampling (n, best_of) and beam search over candidates.

Must not know: rows, blocks, plans. `advance` turns candidates into children per sequence; the scheduler forks, drops
and appends accordingly. Beam search follows Transformers' definition, so that outputs can be compared. One case
differs: for models with several end tokens Transformers may give one text several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenmill.core.sequence import Sequence, SequenceGroup, Trail
from tokenmill.core.step import RowLogprobs

Children = list[tuple[int, float]]


class Sampling:
    """n independent samples of one prompt; nothing branches after the prompt."""

    width: int = 0

    def spawn(self, group: SequenceGroup) -> int:
        return group.request.params.num_sequences

    def advance(
        self, group: SequenceGroup, candidates: Mapping[int, list[tuple[int, float]]]
    ) -> list[tuple[Sequence, Children]]:
        return []


@dataclass(slots=True)
class Hypothesis:
    """A finished beam: its output tokens, its summed log-probability, its length-normalised score and its trail."""

    tokens: list[int]
    total: float
    score: float
    reason: str
    trail: Trail | None = None

    @property
    def logprobs(self) -> list[RowLogprobs] | None:
        """The logprobs of all positions in order, if they were asked for."""
        rows, at = [], self.trail
        while at is not None:
            at, row = at
            rows.append(row)
        return rows[::-1] or None


@dataclass(slots=True)
class BeamSearch:
    """`beams` most likely continuations, expanded together."""

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    end_ids: frozenset[int] = frozenset()
    max_new: int = 16
    min_new: int = 0
    done: list[Hypothesis] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Candidates per beam: enough that `beams` go on even if every end token is among them."""
        return max(2, 1 + len(self.end_ids)) * self.beams

    def spawn(self, group: SequenceGroup) -> int:
        return 1

    def advance(
        self, group: SequenceGroup, candidates: Mapping[int, list[tuple[int, float]]]
    ) -> list[tuple[Sequence, Children]]:
        live = sorted((s for s in group.sequences if s.id in candidates), key=lambda s: (-s.score, s.tokens))
        # A token that the constraint forbids has no likelihood.
        pool = [(s.score + lp, n, t) for n, s in enumerate(live) for t, lp in candidates[s.id] if lp > -1e30]
        pool.sort(key=lambda c: (-c[0], c[1], c[2]))
        length = live[0].num_output + 1
        children: list[Children] = [[] for _ in live]
        going, late = 0, []
        last = length >= self.max_new
        for place, (total, parent, token) in enumerate(pool[: self.width]):
            ended = token in self.end_ids and length > self.min_new
            if ended or last:
                end = (live[parent], token, total, length, "stop" if ended else "length")
                if place < self.beams:
                    self._finish(*end)
                else:
                    late.append(end)
            elif going < self.beams:
                children[parent].append((token, total))
                going += 1
        for end in late:  # they count where better ones do not fill their places: a constraint may let few beams go on
            if (len(self.done) if last else going) < self.beams:
                self._finish(*end)
        best = max((total for total, _, token in pool if token not in self.end_ids), default=float("-inf"))
        if last:
            return [(s, []) for s in live]
        if self._is_done(best, length):
            return [(s, []) for s in live]
        return list(zip(live, children, strict=True))

    def _finish(self, seq: Sequence, token: int, total: float, length: int, reason: str) -> None:
        score = total / length**self.length_penalty
        tokens = [*seq.tokens[seq.num_prompt :], token]
        if reason == "stop" and any(h.reason == "stop" and h.tokens[:-1] == tokens[:-1] for h in self.done):
            return  # the same text with another end token is reported once: likelier ones come first
        self.done.append(Hypothesis(tokens, total, score, reason, trail_of(seq, token)))
        self.done.sort(key=lambda h: -h.score)
        del self.done[self.beams :]

    def _is_done(self, best_total: float, length: int) -> bool:
        if len(self.done) < self.beams:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0:
            reach = best_total / self.max_new**self.length_penalty
        else:
            reach = best_total / length**self.length_penalty
        return self.done[-1].score >= reach


def trail_of(seq: Sequence, token: int) -> Trail | None:
    """The trail of a beam after `token` is appended."""
    for row in seq.group.branches.get(seq.id, ()):
        if row.ids[0] == token:
            return seq.trail, row
    return None
