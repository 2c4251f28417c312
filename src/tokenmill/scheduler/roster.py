"""Which sequences there are. Owns: the waiting heap, the running list, rows, groups, and every sequence's way in and
out.

Must not know: plans and budgets (scheduler.py), what results mean (outcome.py). Every accepted request leaves through
exactly one terminal delta per output.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmill.core.constraint import Constraint
from tokenmill.core.drafting import HostDrafter
from tokenmill.core.policy import SchedulePolicy
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import FINISHED, RUNNING, WAITING, Sequence, SequenceGroup
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.scheduler.adapters import AdapterSlots

MOST_GONE = 32
"""How many sequences that have ended may stay in the heap of waiting ones."""


@dataclass(frozen=True, slots=True)
class OlderWays:
    """whole_prompts: never cut a prompt, whatever the budget says. closed_batches: let no request join a batch that has
    begun to answer."""

    whole_prompts: bool = False
    closed_batches: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of one engine. `max_chunk` bounds a prompt's share of one step (0: only the token budget does).

    max_drafts: drafts of a HostDrafter per sequence. max_guesses: drafts of a DeviceDrafter per sequence. levels: how
    deep its draft trees are (0: drafts are chains). step_guesses: drafts of all sequences in one step, whoever made
    them; sequences that rank first get them.
    max_adapters: adapters that lie on the devices at once.
    cohorts: the rows that sample are spread over so many plans, and none may be in two uncommitted ones (0: they may).
    follows: a DeviceDrafter keeps something for every position. catches_up: how it takes in the tokens of a row that it
    has missed (compute/drafting.py).
    older: what early engines did; kept so that the gain of later methods can be measured.
    """

    max_rows: int
    max_step_tokens: int
    max_chunk: int = 0
    max_drafts: int = 0
    max_guesses: int = 0
    levels: int = 0
    step_guesses: int = 0
    follows: bool = False
    catches_up: str = "on"
    cohorts: int = 0
    older: OlderWays = OlderWays()
    max_adapters: int = 0

    @property
    def anew(self) -> bool:
        """If a DeviceDrafter has missed tokens of a row, does it start again from the row's first token?"""
        return self.catches_up == "anew"

    @property
    def overlaps(self) -> bool:
        """May a row be in two uncommitted plans?"""
        return not self.cohorts


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    """Computed, each once for its request."""
    cached_tokens: int = 0
    recomputed: int = 0
    """Prompt tokens that were computed again: by a further sample, or after a preemption."""
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    steps: int = 0
    processed: int = 0
    """Tokens that waited for a logits processor (a Python function)."""

    def count_draft(self, tried: int, accepted: int, deepest: int) -> None:
        """Count one verified draft: `tried` tokens, of which at most `deepest` could be right. `accepted_at[i]` counts
        the drafts whose first i + 1 tokens were right."""
        self.drafts += 1
        self.drafted += tried
        self.accepted += accepted
        self.accepted_at += [0] * (deepest - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


class Roster:
    """All sequences of one engine, by where they are."""

    def __init__(self, limits: Limits, tables: BlockTables, policy: SchedulePolicy, drafter: HostDrafter) -> None:
        self.limits = limits
        self.tables = tables
        self.policy = policy
        self.drafter = drafter
        self.waiting: list[tuple[tuple, int, Sequence]] = []
        self.gone = 0
        """How many of the heap's sequences have ended while they waited, at most."""
        self.running: list[Sequence] = []
        self.groups: dict[str, SequenceGroup] = {}
        self.free_rows = list(range(limits.max_rows - 1, -1, -1))
        self.ended_rows: list[int] = []
        self.counters = Counters()
        self.adapters = AdapterSlots(limits.max_adapters)
        self.on_begin: Callable[[SequenceGroup], object] = lambda group: None
        """Called when a waiting sequence gets a row for the first time."""
        self.observe: Callable[[int, int], object] = lambda tried, accepted: None
        """Called with the number of a row's drafts that were tried and the number that were right."""
        self._next_seq = 0

    # ------------------------------------------------------------ in

    def new_sequence(self, group: SequenceGroup, tokens: list[int], constraint: Constraint | None) -> Sequence:
        request = group.request
        index = group.sequences[-1].index + 1 if group.sequences else 0
        most_guesses = self._most_guesses(group, constraint)
        told = self._told(group, constraint)
        seq = Sequence(
            id=self._next_seq,
            index=index,
            group=group,
            tokens=tokens,
            num_prompt=len(request.prompt_ids),
            seed=derive_seed(request.seed, index),
            constraint=constraint,
            needs_host=bool(group.search.width) or told or (self.limits.max_drafts > 0 and not most_guesses),
            most_guesses=most_guesses,
            told=told,
        )
        self._next_seq += 1
        group.sequences.append(seq)
        return seq

    def _most_guesses(self, group: SequenceGroup, constraint: Constraint | None) -> int:
        """How many device drafts a sequence may be granted: none if the host decides what may come next."""
        decides = group.search.width or constraint is not None or group.sampling.has_processors or group.embed
        if self.limits.levels and group.sampling.mirostat:
            return 0  # mirostat's state goes from line to line, and a tree's lines have no order
        return 0 if decides else self.limits.max_guesses

    def _told(self, group: SequenceGroup, constraint: Constraint | None) -> bool:
        """Are device drafts sent back to the host, which decides how many of them may stand?"""
        if not self.limits.max_guesses or self.limits.max_drafts or group.search.width or group.embed:
            return False
        return constraint is not None or group.sampling.has_processors

    def wait(self, seq: Sequence) -> None:
        seq.status = WAITING
        seq.rank = self.policy.rank(seq)
        heapq.heappush(self.waiting, (seq.rank, seq.id, seq))

    def resume(self, group: SequenceGroup) -> None:
        """Add a replayed request: each output continues after the tokens it has emitted; the prefix cache shares the
        prompt."""
        request = group.request
        group.spawned = True
        for index in range(group.num_outputs):
            said = request.emitted[index] if index < len(request.emitted) else []
            constraint = group.constraint.fork() if group.constraint is not None else None
            if constraint is not None and said:
                constraint.accept(said)
            seq = self.new_sequence(group, [*request.prompt_ids, *said], constraint)
            seq.mu = request.mus[index] if index < len(request.mus) else None
            if index in request.ended:
                self.finish(seq)
            else:
                self.wait(seq)

    def spawn(self, parent: Sequence) -> None:
        """Once the prompt is planned, add the request's other samples: they share it and recompute only its last
        token."""
        group = parent.group
        group.spawned = True
        for _ in range(group.search.spawn(group) - 1):
            constraint = group.constraint.fork() if group.constraint is not None else None
            child = self.new_sequence(group, parent.tokens[: parent.num_prompt], constraint)
            self.attach(parent, child, parent.num_prompt - 1)

    def attach(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Start a fork on shared blocks. It waits if no row is free, or if rows have states: states are not shared, so
        it starts behind the last one that was kept."""
        if not self.free_rows or not parent.tables or self.tables.stateful:
            self.wait(child)
            return
        child.computed = computed
        if not self.limits.anew:
            child.followed = min(computed, parent.computed if parent.in_step else parent.followed)
        self.tables.fork(parent, child, computed)
        self.adapters.hold(child.group.request.adapter)
        child.row, child.status = self.free_rows.pop(), RUNNING
        child.rank = self.policy.rank(child)
        insort(self.running, child, key=by_rank)

    # ------------------------------------------------------------ aside

    def preempt(self, seq: Sequence) -> None:
        """Take away a sequence's row and blocks; it waits and recomputes later (its cached blocks may still be
        found)."""
        self.running.remove(seq)
        self.counters.preemptions += 1
        seq.preemptions += 1
        seq.group.preemptions += 1
        self.give_back(seq)
        self.wait(seq)

    def preempt_all(self) -> None:
        """Preempt all sequences; those in flight, once their results have come."""
        for seq in list(self.running):
            if seq.inflight:
                seq.leaving = True
            else:
                self.preempt(seq)

    def give_back(self, seq: Sequence) -> None:
        self.tables.close(seq)
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            self.adapters.release(seq.group.request.adapter)
            if not seq.fresh:
                self.ended_rows.append(seq.row)
        seq.row = -1
        seq.computed = seq.ahead = seq.pending = 0
        seq.fresh, seq.leaving, seq.jumped, seq.appended = True, False, False, []
        seq.behind, seq.followed, seq.in_step, seq.drafts, seq.hoped = 0, 0, False, [], 0

    # ------------------------------------------------------------ out

    def end(self, seq: Sequence, reason: str, error: str | None = None) -> list[TokenDelta]:
        self.finish(seq)
        return [TokenDelta(seq.group.request.id, seq.index, [], None, reason, None, error)]

    def fail(self, seq: Sequence, error: str) -> list[TokenDelta]:
        """End a sequence that cannot go on. Its group ends with it if it has beams, or samples that wait for the
        prompt."""
        if seq.group.search.width or not seq.group.spawned:
            return self.end_group(seq.group, "error", error)
        return self.end(seq, "error", error)

    def end_index(self, group: SequenceGroup, index: int, reason: str) -> list[TokenDelta]:
        for seq in group.sequences:
            if seq.index == index and seq.status != FINISHED:
                return self.end(seq, reason)
        return []

    def end_group(self, group: SequenceGroup, reason: str, error: str | None = None) -> list[TokenDelta]:
        """End all sequences; returns one terminal delta for every output that has none yet."""
        for seq in group.sequences:
            if seq.status != FINISHED:
                self.finish(seq, ends_index=False)
        self.groups.pop(group.request.id, None)
        missing = [i for i in range(group.num_outputs) if i not in group.ended]
        return [TokenDelta(group.request.id, i, [], None, reason, None, error) for i in missing]

    def finish(self, seq: Sequence, *, ends_index: bool = True) -> None:
        """Give this sequence no more work; it keeps its blocks until its plans in flight are committed."""
        waited = seq.status == WAITING
        if seq.status == RUNNING:
            self.running.remove(seq)
        seq.status = FINISHED
        if waited:
            self._forget_waiting()
        self.drafter.forget(seq)
        if seq.row >= 0 and seq.inflight == 0:
            self.release(seq)
        group = seq.group
        if ends_index:
            group.ended.add(seq.index)
            if len(group.ended) == group.num_outputs:
                self.groups.pop(group.request.id, None)

    def _forget_waiting(self) -> None:
        """One more waiting sequence has ended. The heap is cleared of them once they are many: a full engine may not
        come to them for hours, and callers who give up may be without end."""
        self.gone += 1
        if self.gone > MOST_GONE and 2 * self.gone > len(self.waiting):
            self.waiting[:] = [entry for entry in self.waiting if entry[2].status == WAITING]
            heapq.heapify(self.waiting)
            self.gone = 0

    def release(self, seq: Sequence) -> None:
        if seq.node is not None and seq.computed > seq.published:
            new = self.tables.publish(seq, min(seq.computed, len(seq.tokens)))
            self.tables.cache.listener.published(new)
        self.give_back(seq)


def by_rank(seq: Sequence) -> tuple:
    """Sort key of the running list."""
    return seq.rank


def derive_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sample: index 0 keeps the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 64)
