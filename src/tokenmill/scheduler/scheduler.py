"""plan() and commit(). Owns: which sequences compute how many tokens next, admission, preemption, what results mean.

Must not know: tensors, text, HTTP, wall-clock limits, or any optional feature by name: drafts come from a HostDrafter
or lie on the device, branching from a Search, masks from a Constraint, order from a SchedulePolicy, sharing from the
prefix cache.

There are no phases: a grant lets `computed` catch up with the known tokens. Prefill chunks, decode, verification of
drafts, prefix hits and recomputation after preemption are the same arithmetic (see core/sequence.py for the picture).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

import msgspec

from tokenmill.core.drafting import AllOfThem, DraftControl, HostDrafter
from tokenmill.core.policy import SchedulePolicy
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import FINISHED, RUNNING, WAITING, Sequence, SequenceGroup
from tokenmill.core.step import RowStart, StepPlan, StepResult
from tokenmill.kvcache.allocation import BlockTables, Looking
from tokenmill.scheduler.device_drafts import Ahead, DraftGrant
from tokenmill.scheduler.flight import Flight
from tokenmill.scheduler.outcome import Outcome
from tokenmill.scheduler.pace import Pace
from tokenmill.scheduler.roster import Limits, Roster, by_rank

LOOKED = 1 << 18
"""Tokens of waiting sequences that one plan looks up to see whether a running row will keep their state."""


class Scheduler:
    """Integers in, integers out. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        limits: Limits,
        tables: BlockTables,
        policy: SchedulePolicy,
        drafter: HostDrafter,
        control: DraftControl | None = None,
    ) -> None:
        """control: decides how many drafts a DeviceDrafter makes (default: as many as the limits allow)."""
        self.limits = limits
        self.tables = tables
        self.policy = policy
        self.roster = Roster(limits, tables, policy, drafter)
        self.ahead = Ahead(limits, tables, control or AllOfThem(limits.max_guesses))
        self.roster.observe = self.ahead.control.observe
        self.outcome = Outcome(self.roster)
        self.pace = Pace()
        self.counters = self.roster.counters
        self.flying: deque[Flight] = deque()
        self.epoch = 0
        self.careful = 0
        self.suspect = -1
        self._next_plan = 0

    # ------------------------------------------------------------ requests

    def add(self, group: SequenceGroup) -> None:
        """Accept a request; admission has checked that it fits."""
        request = group.request
        assert request.id not in self.roster.groups, f"request id {request.id} is in use"
        self.roster.groups[request.id] = group
        if (any(request.emitted) or request.ended) and not group.search.width:
            self.roster.resume(group)
            return
        seq = self.roster.new_sequence(group, list(request.prompt_ids), group.constraint)
        self.roster.wait(seq)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> list[TokenDelta]:
        """End a request, or one of its sequences, now; unknown ids are ignored."""
        group = self.roster.groups.get(request_id)
        if group is None:
            return []
        return self.roster.end_group(group, reason) if index is None else self.roster.end_index(group, index, reason)

    @property
    def has_work(self) -> bool:
        """Is any request open, or any plan in flight?"""
        return bool(self.roster.groups or self.flying)

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute (or a commit must come first)."""
        if self.flying and self.limits.overlaps and self._commit_first():
            return None
        plan = StepPlan(id=self._next_plan, epoch=self.epoch)
        running = self.roster.running
        flight = Flight(plan, self.ahead.begin(plan, len(running)), self.pace.room(running))
        budget = self._grant_running(plan, flight)
        if budget > 0:
            self._admit(budget, flight)
        if not plan.rows:
            return None
        plan.ended, self.roster.ended_rows = self.roster.ended_rows, []
        plan.loads, self.roster.adapters.pending = self.roster.adapters.pending, []
        self._next_plan += 1
        self.counters.steps += 1
        self.flying.append(flight)
        self.tables.snapshots.planned(flight.kept)
        for seq in flight.spawning:
            self.roster.spawn(seq)
        return plan

    def _grant_running(self, plan: StepPlan, flight: Flight) -> int:
        """Grant tokens to running sequences in rank order; returns the budget that is left."""
        running, budget = self.roster.running, self.limits.max_step_tokens
        if not self.policy.static:
            for seq in running:
                seq.rank = self.policy.rank(seq)
            running.sort(key=by_rank)
        rows, counts, samples, seqs = plan.rows, plan.counts, plan.samples, flight.seqs
        plan_id, most = plan.id, self.careful or self.limits.max_rows
        plain, left, depth = self.limits.max_guesses == 0, flight.left, plan.depth
        overlaps = self.limits.overlaps
        share, sampling = -(-len(running) // max(1, self.limits.cohorts)), 0
        for seq in running:  # only sequences behind `seq` can be preempted meanwhile
            if budget <= 0 or len(seqs) >= most:
                break
            group = seq.group
            known = len(seq.tokens) + seq.pending
            position = seq.computed + seq.ahead
            if sampling >= share and known - position == 1:
                continue  # it samples in the next plan; prompts still get tokens in this one
            if (
                position < seq.capacity
                and position + 1 < seq.save_at
                and known - position == 1
                and known < group.max_len
                and (plain or not (seq.behind or seq.in_step or (depth and left.made > 0 and seq.most_guesses)))
                and group.spawned
                and not (seq.fresh or seq.leaving or seq.appended)
                and not group.sampling.has_processors
                and (overlaps or not seq.inflight)
                and (not seq.needs_host or self._finds_no_drafts(seq, flight))
            ):  # fast path: one more token for a row that the devices know, in a block that it already has
                if seq.constraint is not None:
                    plan.late.append(seq.row)
                rows.append(seq.row)
                counts.append(1)
                samples.append(True)
                seqs.append(seq)
                seq.ahead += 1
                seq.pending += 1
                seq.inflight += 1
                seq.last_plan = plan_id
                budget -= 1
                sampling += 1
            elif granted := self._grant(seq, budget, flight):
                budget -= granted
                sampling += samples[-1]
        return budget

    def _commit_first(self) -> bool:
        """Must the commit come before the next plan? Rows that need the host wait for it; if they are few, others go
        on."""
        blocked = sum(1 for s in self.roster.running if s.needs_host and s.inflight)
        return blocked * 4 > len(self.roster.running)

    def _grant(self, seq: Sequence, budget: int, flight: Flight) -> int:
        """Grant `seq` up to `budget` tokens of this step; returns how many it got (0: it must wait)."""
        plan, group = flight.plan, seq.group
        if seq.leaving or (seq.inflight and (seq.needs_host or (seq.pending and not self.limits.overlaps))):
            return 0
        known = len(seq.tokens) + seq.pending
        position = seq.computed + seq.ahead
        if known <= position or known >= group.max_len:
            return 0
        position += self._rematch(seq, position)
        if known - position > 1 and (budget := min(budget, flight.prompt_room)) <= 0:
            return 0
        drafts, flight.drafts = flight.drafts, []
        if not drafts and known - position == 1 and not seq.pending:
            drafts = self._drafts(seq, flight.left.tried)
        if drafts and known + len(drafts) > seq.capacity and not self.tables.has_room(seq, known + len(drafts)):
            drafts = drafts[: max(0, seq.capacity - known)]  # no other sequence loses blocks for mere guesses
        guesses = len(drafts) or self.ahead.guesses(seq, known, position, flight.left)
        count = self._chunk(position, known + guesses, budget)
        if position < seq.save_at < min(known, position + count):
            count = seq.save_at - position  # only the state at the end of a grant can be kept
        guesses = min(guesses, max(0, position + count - known))
        if not self._make_room(seq, position, position + count, flight):
            return 0
        sample = position + count == known + guesses
        end, hoped = position + count, guesses
        if guesses and self.limits.levels and not drafts:  # a tree: every node takes a position, few may stand
            hoped = min(guesses, self.limits.levels, group.max_len - known - 1)
            end -= guesses - hoped
        self.ahead.settle(seq, DraftGrant(position, end, hoped, sample, guesses), plan, flight.left)
        self._tell(seq, position, plan)
        if guesses:
            plan.guesses[len(plan.rows)] = hoped
            if drafts:
                plan.drafts[len(plan.rows)] = drafts[:guesses]
            elif self.limits.levels:
                plan.nodes[len(plan.rows)] = guesses
        if seq.constraint is not None or group.sampling.has_processors:
            plan.late.append(seq.row)
        flight.nodes += self.tables.publish(seq, min(len(seq.tokens), end))
        if end >= seq.save_at and (kept := self.tables.snapshots.save(seq, position, end, plan)) is not None:
            flight.kept.append(kept)
        plan.rows.append(seq.row)
        plan.counts.append(count)
        plan.samples.append(sample)
        flight.seqs.append(seq)
        flight.prompt_room -= count if known - position > 1 else 0
        seq.ahead += end - position
        seq.inflight += 1
        seq.last_plan = plan.id
        if sample:
            seq.pending += 1 + hoped
            seq.hoped += hoped
            if not group.spawned:
                flight.spawning.append(seq)
        if position < seq.num_prompt:
            new = seq.reach(position, position + count)
            self.counters.prompt_tokens += new
            self.counters.recomputed += min(seq.num_prompt, position + count) - position - new
        return count

    def _rematch(self, seq: Sequence, position: int) -> int:
        """Skip blocks of this prompt that other sequences have computed since its last grant; returns the tokens
        skipped."""
        most = seq.group.matchable(len(seq.tokens))
        if seq.fresh or not seq.group.reads_cache or position >= most:
            return 0
        gain = self.tables.match(seq, position, most)
        if gain:
            seq.computed += gain
            self._note_hit(seq, position, gain)
            seq.jumped = True
        return gain

    def _note_hit(self, seq: Sequence, position: int, gain: int) -> None:
        """Count tokens of a prompt that were found. What a request finds of its own (other samples do, and a sequence
        that was preempted) is not told of as cached."""
        found = seq.reach(position, position + gain)
        self.counters.cached_tokens += found
        seq.group.cached += found

    def _chunk(self, position: int, end: int, budget: int) -> int:
        want = end - position
        if self.limits.older.whole_prompts:
            return want
        count = min(want, budget, self.limits.max_chunk or budget)
        if count < want:  # end on a block border, so that the next chunk can still skip cached blocks
            over = (position + count) % self.tables.block_size
            if count > over:
                count -= over
        return count

    def _finds_no_drafts(self, seq: Sequence, flight: Flight) -> bool:
        """Does this sequence need the host for drafts only, and has the host none now? If it has some, the grant that
        follows takes them from `flight`."""
        if seq.inflight or seq.told or seq.group.search.width:
            return False
        if len(seq.tokens) < seq.guess_from:
            return True
        flight.drafts = self._drafts(seq, flight.left.tried)
        return not flight.drafts

    def _drafts(self, seq: Sequence, left: int) -> list[int]:
        """The drafts that the host knows, at most `left`: a HostDrafter's, or those that a DeviceDrafter sent back."""
        room = seq.group.max_len - len(seq.tokens) - 1
        most = min(len(seq.drafts) if seq.told else self.limits.max_drafts, room, left)
        if most <= 0 or seq.most_guesses or seq.group.search.width or seq.group.embed:
            return []
        drafts = seq.drafts[:most] if seq.told else self.roster.drafter.propose(seq, most)[:most]
        if drafts and seq.constraint is not None:
            drafts = drafts[: seq.constraint.validate(drafts)]
        return drafts

    def _tell(self, seq: Sequence, position: int, plan: StepPlan) -> None:
        """Put into the plan what the devices must know about this row before they compute from `position`."""
        if seq.fresh:
            group = seq.group
            plan.starts.append(
                RowStart(
                    row=seq.row,
                    tokens=seq.tokens[:],
                    num_prompt=seq.num_prompt,
                    computed=position,
                    sampling=msgspec.structs.replace(group.sampling, seed=seq.seed),
                    adapter=self.roster.adapters.slot_of(group.request.adapter),
                    pool=group.embed,
                    mu=seq.mu,
                )
            )
            seq.fresh = False
        else:
            if seq.jumped:
                plan.jumps.append((seq.row, position))
            if seq.appended:
                plan.appended[seq.row] = seq.appended
        seq.jumped = False
        seq.appended = []
        if seq.restore >= 0:
            self.tables.snapshots.tell(seq, plan)
        self.tables.edits(seq, plan)

    # ------------------------------------------------------------ room

    def _make_room(self, seq: Sequence, start: int, end: int, flight: Flight) -> bool:
        """Get blocks for positions [start, end) of `seq`; if there are too few, preempt sequences that rank last."""
        while not self.tables.grow(seq, start, end, flight.plan):
            victim = self.roster.running[-1]
            if victim is seq and (self.flying or victim.inflight):
                return False  # plans in flight will give blocks back
            if victim.last_plan == flight.plan.id or victim.leaving:
                return False
            if victim.inflight:
                victim.leaving = True
                return False
            assert victim is not seq or len(self.roster.running) > 1, "admission let in a sequence that can never fit"
            self.roster.preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, budget: int, flight: Flight) -> None:
        """Start waiting sequences. If batches are closed, one that has begun only takes sequences of its own
        requests."""
        begun = (len(s.tokens) + s.pending > s.num_prompt for s in self.roster.running)
        if self.limits.older.closed_batches and any(begun):
            others = [entry for entry in self.roster.waiting if not entry[2].group.spawned]
            if len(others) == len(self.roster.waiting):
                return
            self.roster.waiting = [entry for entry in self.roster.waiting if entry[2].group.spawned]
            heapq.heapify(self.roster.waiting)
            self._start(budget, flight)
            self.roster.waiting += others
            heapq.heapify(self.roster.waiting)
        else:
            self._start(budget, flight)

    def _start(self, budget: int, flight: Flight) -> None:
        """Start waiting sequences in rank order while budget, rows and blocks last."""
        if not self.policy.static and self.roster.waiting:
            self.roster.waiting = [(self.policy.rank(s), s.id, s) for _, _, s in self.roster.waiting]
            heapq.heapify(self.roster.waiting)
        waiting, adapters = self.roster.waiting, self.roster.adapters
        aside: list[tuple[tuple, int, Sequence]] = []
        full: set[int] = set()
        looking = Looking(LOOKED)
        if adapters.draining:
            adapters.still_wait({s.group.request.adapter for _, _, s in waiting})
        while min(budget, flight.prompt_room) > 0 and waiting and not 0 < self.careful <= len(flight.seqs):
            rank, _, seq = waiting[0]
            if seq.status == WAITING and not self._may_get_row(rank, flight):
                break
            entry = heapq.heappop(waiting)
            if seq.status != WAITING:
                continue
            seq.rank = rank
            if self._lets_others_pass(seq, full, looking):
                aside.append(entry)
                continue
            if looking.left < 0 or not self._room_for(seq, flight):
                aside.append(entry)
                break
            seq.row, seq.status, seq.fresh = self.roster.free_rows.pop(), RUNNING, True
            adapters.take(seq.group.request.adapter)
            insort(self.roster.running, seq, key=by_rank)
            if not seq.preemptions:
                self.roster.on_begin(seq.group)
            budget -= self._grant(seq, budget, flight)
        if aside:
            waiting += aside
            heapq.heapify(waiting)

    def _lets_others_pass(self, seq: Sequence, full: set[int], looking: Looking) -> bool:
        """Does a waiting sequence wait for something that those behind it may not need? full: adapters that have been
        found to have no slot."""
        if seq.id in seq.group.candidates:  # it has its candidates: the other beams must catch up first
            return True
        adapter = seq.group.request.adapter
        if adapter:
            begun = seq.group.spawned and _begun(seq.group)
            if (adapter in full and not begun) or not self.roster.adapters.has_room(adapter, begun=begun):
                full.add(adapter)
                return True
        return self.tables.comes(seq, looking)  # a running row will soon provide what it would compute itself

    def _may_get_row(self, rank: tuple, flight: Flight) -> bool:
        """Is a row free for a waiting sequence of this rank, or held by one that would have to give way?"""
        if self.roster.free_rows:
            return True
        victim = self.roster.running[-1] if self.roster.running else None
        return victim is not None and (victim.rank > rank or self._stalled(flight))

    def _stalled(self, flight: Flight) -> bool:
        """Does nothing make progress? Then only beams run whose siblings still wait, and any sequence may preempt
        them."""
        return not (flight.seqs or self.flying)

    def _room_for(self, seq: Sequence, flight: Flight) -> bool:
        """Match the prefix cache and check for a row and blocks; running sequences that rank lower are preempted."""
        while True:
            if self.roster.free_rows and (self._stalled(flight) or not self.tables.is_full(seq)):
                self.tables.open(seq)
                most = seq.group.matchable(len(seq.tokens)) if seq.group.reads_cache else 0
                hit = self.tables.match(seq, 0, most) if most else 0
                if self.tables.has_room(seq, self.policy.reserve(seq)):
                    seq.computed = hit
                    self._note_hit(seq, 0, hit)
                    return True
                self.tables.turn_away(seq, self.policy.reserve(seq))
            victim = self.roster.running[-1] if self.roster.running else None
            if victim is None or (victim.rank <= seq.rank and not self._stalled(flight)):
                return False
            if victim.inflight:  # (or in this plan): it is preempted once that is committed
                victim.leaving = True
                return False
            self.roster.preempt(victim)

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Apply the oldest plan's result; returns what each sequence gained."""
        flight = self.flying.popleft()
        assert flight.plan.id == result.plan_id, "results must come in plan order"
        if flight.plan.epoch != self.epoch:
            return []  # it failed with an earlier plan; its rows were sent again
        if result.failure is not None:
            return self._failed(flight, result.failure)
        if self.careful:
            self._trust(flight, result)
        self.tables.cache.listener.published(flight.nodes)
        return self.outcome.take(flight.plan, flight.seqs, result)

    def _trust(self, flight: Flight, result: StepResult) -> None:
        """A step went well after a failure: allow more sequences at once, if each one in this step gained a token.

        (A failure costs every row its unfinished block. Without this rule two failures could undo all work between
        them.)
        """
        if all(flight.plan.samples):
            self.careful = min(self.careful * 2, self.limits.max_rows)
        for seq, tokens in zip(flight.seqs, result.tokens, strict=True):
            if tokens and seq.id == self.suspect:
                self.suspect = -1

    def _failed(self, flight: Flight, reason: str) -> list[TokenDelta]:
        """A whole step failed: forget what it and the later plans would have written, and send every row again.

        Each retry has half as many sequences. A sequence that fails alone, twice, is the one to blame.
        """
        self.counters.failures += 1
        self.epoch += 1
        deltas: list[TokenDelta] = []
        alone = flight.seqs[0] if len(flight.seqs) == 1 else None
        blamed = alone if alone is not None and alone.id == self.suspect else None
        self.suspect = alone.id if alone is not None else self.suspect
        if self.limits.follows:
            self.tables.cache.unfollow()
        for record in [flight, *self.flying]:
            self.tables.cache.retract(record.nodes)
            self.tables.snapshots.failed(record.kept)
            for seq in record.seqs:
                seq.inflight = 0
                if seq.status == FINISHED and seq.row >= 0:
                    self.roster.release(seq)
        if blamed is not None and blamed.status == RUNNING:
            deltas += self.roster.fail(blamed, f"this sequence cannot be computed: {reason}")
        self.careful = max(1, len(flight.seqs) // 2)
        for seq in list(self.roster.running):
            self.roster.preempt(seq)
        self.roster.ended_rows.clear()  # a new epoch ends every row
        self.roster.adapters.forget()  # loads of the failed plans may not have happened
        return deltas


def _begun(group: SequenceGroup) -> bool:
    """Is any sequence of this request running?"""
    return any(seq.status == RUNNING for seq in group.sequences)
