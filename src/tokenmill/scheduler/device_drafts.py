"""What a DeviceDrafter does in a step. Owns: which rows it guesses behind, how many guesses are tried, and which tokens
it has not seen yet.

Integers only. Must not know: how it guesses. A drafter with K/V of its own has pages in the tables of the model. Two
numbers of a sequence (core/sequence.py: `followed`, `in_step`) tell what the drafter has seen of it. In a row that is
in step it lacks at most the newest two tokens, which `propose` itself takes in. Any other row is sent in `follows`
first. A drafter that cannot catch up (it reads the model's states of a step) is kept in step while no drafts are left
for a few steps; otherwise its rows, and all that find their prefixes, would get none any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.drafting import DraftControl
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import Sequence
from tokenmill.core.step import StepPlan
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.scheduler.roster import Limits

SELDOM = 4
"""Where the host makes the drafts, one in so many steps is timed of those that neither try any nor follow one that
does: there are many of them, and timing takes time."""


@dataclass(slots=True)
class DraftBudget:
    """What one step has left: drafts that may be tried, drafts that may be made, tokens that the drafter may follow.
    keeps_up: a drafter that cannot catch up sees the step's tokens, whether or not drafts are left."""

    tried: int
    made: int
    followed: int
    keeps_up: bool = False


@dataclass(frozen=True, slots=True)
class DraftGrant:
    """Positions [start, end) of a sequence; the last `guesses` are drafts. sample: tokens are sampled at the end.
    tried: how many drafts are computed; of a tree more than `guesses`."""

    start: int
    end: int
    guesses: int
    sample: bool
    tried: int


class Ahead:
    """The device drafts of all sequences of one engine."""

    def __init__(self, limits: Limits, tables: BlockTables, control: DraftControl) -> None:
        self.limits = limits
        self.tables = tables
        self.control = control
        self.before: tuple[int, float] | None = None
        self.saved, self.spent = 0.0, 0.0
        """Estimates, in seconds: steps that right drafts have made needless, and time that drafts have taken."""

    def begin(self, plan: StepPlan, running: int) -> DraftBudget:
        """Begin to plan a step in which about `running` rows run."""
        limits = self.limits
        plan.depth = min(limits.max_guesses, self.control.depth(running))
        keeps_up = limits.follows and not limits.catches_up and (plan.depth > 0 or self.control.resumes(running))
        return DraftBudget(limits.step_guesses, limits.step_guesses, limits.max_step_tokens, keeps_up)

    def committed(self, plan: StepPlan, now: float) -> None:
        """Report a step's duration to the control, if it follows a step of its kind and did nothing else."""
        if not self.limits.max_guesses:
            if not self.limits.max_drafts:
                return
            if plan.guesses or plan.id % SELDOM == 0 or plan.starts or (self.before is not None and self.before[0]):
                self._worked(plan, now)
            else:
                self.before = 0, now
            return
        before, self.before = self.before, None
        catches_up = bool(plan.follows and self.limits.catches_up)
        if plan.starts or catches_up or max(plan.counts) > 1 + plan.depth:
            return
        self.before = plan.depth, now
        if before is not None and before[0] == plan.depth and bool(plan.guesses) == bool(plan.depth):
            self.control.timed(len(plan.rows), plan.depth, now - before[1])

    def _worked(self, plan: StepPlan, now: float) -> None:
        """The same where the host makes all drafts: for a step that only decodes and follows another such step."""
        before, self.before = self.before, None
        rows = len(plan.rows)
        if plan.starts or plan.num_tokens != rows + sum(plan.guesses.values()):
            return
        self.before = len(plan.guesses), now
        if before is not None:
            self.control.worked(plan.num_tokens, rows, now - before[1])

    def credit(self, plan: StepPlan, deltas: list[TokenDelta]) -> None:
        """Record what drafts have saved each row of a step. Without drafts the row would have needed one more step per
        right draft, but every step would have been shorter."""
        gained = [delta for delta in deltas if delta.tokens] if plan.guesses else []
        if not gained:
            return
        plain, more = self.control.price(len(plan.rows), plan.depth, sum(map(plan.tried, plan.guesses)))
        if not plain:
            return
        for delta in gained:
            delta.saved = delta.accepted * plain - more
        self.saved += plain * sum(delta.accepted for delta in gained) / len(gained)
        self.spent += more

    def guesses(self, seq: Sequence, known: int, position: int, budget: DraftBudget) -> int:
        """How many of the drafts behind the row to try. None before the row was sampled, because none lie there yet;
        none if another sequence would lose blocks for them."""
        if not (seq.behind and seq.most_guesses) or known - position != 1 or seq.fresh or position < seq.num_prompt:
            return 0
        room = seq.group.max_len - known - 1
        if self.limits.levels and room > 0:
            room = self.limits.max_guesses  # `max_len` bounds what stands, not where nodes lie meanwhile
        most = max(0, min(seq.most_guesses, seq.behind, budget.tried, room))
        end = known + most
        return most if end <= seq.capacity or self.tables.has_room(seq, end) else 0

    def settle(self, seq: Sequence, grant: DraftGrant, plan: StepPlan, left: DraftBudget) -> None:
        """A grant is certain: plan what the drafter follows, and whether it leaves drafts behind the grant's sample."""
        left.tried -= grant.tried
        if not (seq.most_guesses or seq.told):
            return
        ready = not self.limits.follows or self._follow(seq, grant, plan, left)
        if ready and grant.sample and left.made > 0 and self._reaches(seq, grant.end, plan):
            plan.proposes.append(len(plan.rows))
            seq.behind, seq.in_step = plan.depth, self.limits.follows
            left.made -= plan.depth
            return
        if ready and left.keeps_up and grant.sample:
            if seq.in_step:
                plan.follows.append((seq.row, grant.start, grant.end - grant.start))
            seq.in_step = True
        elif seq.in_step:
            seq.in_step, seq.followed = False, self._seen(seq.computed)
        if grant.sample:
            seq.behind = 0

    def _follow(self, seq: Sequence, grant: DraftGrant, plan: StepPlan, left: DraftBudget) -> bool:
        """Show the drafter the tokens it has not seen; True: it will have seen all that are known before the sample."""
        if seq.in_step:
            if grant.end - grant.start == 1 + grant.guesses:
                return True
            seq.in_step, seq.followed = False, self._seen(grant.start)  # the host has added tokens
        if not plan.depth and not left.keeps_up and (grant.start >= seq.num_prompt or self.limits.anew):
            return False  # under load there are no drafts; prompts are still followed for those who will share them
        if self.limits.anew and seq.hoped:
            return False  # states cannot be overwritten: only certain tokens may be followed
        if seq.followed < (self.tables.first_followed(seq) if self.limits.catches_up else grant.start):
            return False  # this row can have no more drafts
        count = min(grant.end - seq.followed, left.followed)
        if count > 0:
            plan.follows.append((seq.row, seq.followed, count))
            seq.followed += count
            left.followed -= count
        return seq.followed >= grant.end

    def _seen(self, positions: int) -> int:
        """How many positions of a row still count as seen once the drafter is out of step with it."""
        return 0 if self.limits.anew else positions

    def _reaches(self, seq: Sequence, end: int, plan: StepPlan) -> bool:
        """Is there a token left to guess, and room for the drafter's own entries?"""
        longest = seq.group.max_len
        if not plan.depth or end + 2 > longest:
            return False
        want = end
        if self.limits.follows:
            want = end + plan.depth if self.limits.levels else min(end + plan.depth, longest)
        return want <= seq.capacity or (self.tables.has_room(seq, want) and self.tables.grow(seq, end, want, plan))
