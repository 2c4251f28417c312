"""plan() and commit(). Owns: which sequences compute how many tokens next, admission, preemption, what results mean.

Must not know: tensors, text, HTTP, wall-clock limits, or any optional feature by name: drafts come from a HostDrafter,
branching from a Search, masks from a Constraint, order from a SchedulePolicy, sharing from the prefix cache.

There are no phases: a grant lets `computed` catch up with the known tokens. Prefill chunks, decode, verification of
drafts, prefix hits and recomputation after preemption are the same arithmetic (see core/sequence.py for the picture).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

import msgspec

from tokenmill.core.protocols import HostDrafter, SchedulePolicy
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import FINISHED, RUNNING, WAITING, Sequence, SequenceGroup
from tokenmill.core.step import RowStart, StepPlan, StepResult
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.scheduler.search import BeamSearch


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of one engine. `max_chunk` bounds a prompt's share of one step (0: only the budget does)."""

    max_rows: int
    max_step_tokens: int
    max_chunk: int = 0
    max_drafts: int = 0
    chains: bool = True


@dataclass(slots=True)
class Flight:
    """A submitted plan with the sequences behind its grants and the cache nodes that it published."""

    plan: StepPlan
    seqs: list[Sequence] = field(default_factory=list)
    nodes: list[object] = field(default_factory=list)
    spawning: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


class Scheduler:
    """Integers in, integers out; not thread-safe: one loop owns it."""

    def __init__(self, limits: Limits, tables: BlockTables, policy: SchedulePolicy, drafter: HostDrafter) -> None:
        self.limits = limits
        self.tables = tables
        self.policy = policy
        self.drafter = drafter
        self.waiting: list[tuple[tuple, int, Sequence]] = []
        self.running: list[Sequence] = []
        self.flying: deque[Flight] = deque()
        self.groups: dict[str, SequenceGroup] = {}
        self.free_rows = list(range(limits.max_rows - 1, -1, -1))
        self.ended_rows: list[int] = []
        self.counters = Counters()
        self.epoch = 0
        self.careful = 0
        self._next_plan = 0
        self._next_seq = 0

    # ------------------------------------------------------------ requests

    def add(self, group: SequenceGroup) -> None:
        """Accept a request that has been checked to fit."""
        request = group.request
        assert request.id not in self.groups, f"request id {request.id} is in use"
        self.groups[request.id] = group
        seq = self._new_sequence(group, list(request.prompt_ids), group.constraint)
        self._wait(seq)

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> list[TokenDelta]:
        """End a request, or one of its sequences, now; unknown ids are ignored."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        return self._end_group(group, reason) if index is None else self._end_index(group, index, reason)

    @property
    def has_work(self) -> bool:
        """Anything accepted and not ended, or still in flight?"""
        return bool(self.groups or self.flying)

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute (or a commit must come first)."""
        if self.flying and self._commit_first():
            return None
        plan = StepPlan(id=self._next_plan, epoch=self.epoch)
        flight = Flight(plan)
        budget = self._decode(plan, flight)
        if budget > 0:
            self._admit(budget, flight)
        if not plan.rows:
            return None
        plan.ended, self.ended_rows = self.ended_rows, []
        self._next_plan += 1
        self.counters.steps += 1
        self.flying.append(flight)
        for seq in flight.spawning:
            self._spawn(seq)
        return plan

    def _decode(self, plan: StepPlan, flight: Flight) -> int:
        """Grant tokens to running sequences in rank order; -> budget left."""
        running, budget = self.running, self.limits.max_step_tokens
        if not self.policy.static:
            for seq in running:
                seq.rank = self.policy.rank(seq)
            running.sort(key=_rank)
        rows, counts, samples, seqs = plan.rows, plan.counts, plan.samples, flight.seqs
        plan_id, most = plan.id, self.careful or self.limits.max_rows
        plain = self.limits.max_drafts == 0
        i = 0
        while i < len(running) and budget > 0 and len(seqs) < most:
            seq = running[i]
            i += 1
            known = len(seq.tokens) + seq.pending
            position = seq.computed + seq.ahead
            if (
                position < seq.capacity
                and known - position == 1
                and known < seq.group.max_len
                and plain
                and seq.group.spawned
                and not (seq.fresh or seq.leaving or seq.needs_host or seq.appended or seq.constraint)
                and (not seq.inflight or self.limits.chains)
            ):  # the common case, spelled out: one more token of a row that the devices know, in a block it has
                rows.append(seq.row)
                counts.append(1)
                samples.append(True)
                seqs.append(seq)
                seq.ahead += 1
                seq.pending += 1
                seq.inflight += 1
                seq.last_plan = plan_id
                budget -= 1
            else:
                budget -= self._grant(seq, budget, flight)
        return budget

    def _commit_first(self) -> bool:
        """Rows that need the host wait for their commit; unless they are a small minority, so does the plan."""
        blocked = sum(1 for s in self.running if s.needs_host and s.inflight)
        return blocked * 4 > len(self.running)

    def _grant(self, seq: Sequence, budget: int, flight: Flight) -> int:
        """Give `seq` up to `budget` tokens of this step; -> tokens given (0: it must wait)."""
        plan, group = flight.plan, seq.group
        if seq.leaving or (seq.inflight and (seq.needs_host or (seq.pending and not self.limits.chains))):
            return 0
        known = len(seq.tokens) + seq.pending
        position = seq.computed + seq.ahead
        if known <= position or known >= group.max_len:
            return 0
        position += self._rematch(seq, position)
        drafts = self._drafts(seq) if known - position == 1 and not seq.pending else []
        count = self._chunk(position, known + len(drafts), budget)
        drafts = drafts[: max(0, position + count - known)]
        if not self._make_room(seq, position, position + count, flight):
            return 0
        self._tell(seq, position, plan)
        sample = position + count == known + len(drafts)
        if drafts:
            plan.drafts[len(plan.rows)] = drafts
        if seq.constraint is not None or group.sampling.has_processors:
            plan.late.append(seq.row)
        plan.rows.append(seq.row)
        plan.counts.append(count)
        plan.samples.append(sample)
        flight.seqs.append(seq)
        seq.ahead += count
        seq.inflight += 1
        seq.last_plan = plan.id
        if sample:
            seq.pending += 1 + len(drafts)
            if not group.spawned:
                flight.spawning.append(seq)
        if position < seq.num_prompt:
            self.counters.prompt_tokens += min(seq.num_prompt, position + count) - position
        flight.nodes += self.tables.publish(seq, min(len(seq.tokens), position + count))
        return count

    def _rematch(self, seq: Sequence, position: int) -> int:
        """Others may have computed this prompt's next blocks since the last grant: jump over them."""
        if seq.fresh or not seq.group.reads_cache or position + 1 >= len(seq.tokens):
            return 0
        gain = self.tables.match(seq, position, len(seq.tokens) - 1)
        if gain:
            seq.computed += gain
            seq.cached += gain
            self.counters.cached_tokens += gain
            seq.jumped = True
        return gain

    def _chunk(self, position: int, end: int, budget: int) -> int:
        want = end - position
        count = min(want, budget, self.limits.max_chunk or budget)
        if count < want:  # end on a block border, so that the next chunk can still jump over cached blocks
            over = (position + count) % self.tables.block_size
            if count > over:
                count -= over
        return count

    def _drafts(self, seq: Sequence) -> list[int]:
        most = min(self.limits.max_drafts, seq.group.max_len - len(seq.tokens) - 1)
        if most <= 0 or seq.group.search.width or seq.group.embed:
            return []
        drafts = self.drafter.propose(seq, most)[:most]
        if drafts and seq.constraint is not None:
            drafts = drafts[: seq.constraint.validate(drafts)]
        return drafts

    def _tell(self, seq: Sequence, position: int, plan: StepPlan) -> None:
        """Put into the plan what the devices must know of this row before they compute from `position`."""
        if seq.fresh:
            group = seq.group
            plan.starts.append(
                RowStart(
                    row=seq.row,
                    tokens=seq.tokens[:],
                    num_prompt=seq.num_prompt,
                    computed=position,
                    sampling=msgspec.structs.replace(group.sampling, seed=seq.seed),
                    adapter=group.request.adapter,
                    pool=group.embed,
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
        self.tables.edits(seq, plan)

    # ------------------------------------------------------------ room

    def _make_room(self, seq: Sequence, start: int, end: int, flight: Flight) -> bool:
        """Blocks for positions [start, end) of `seq`, preempting from the back of the rank order if need be."""
        while not self.tables.grow(seq, start, end, flight.plan):
            victim = self.running[-1]
            if victim is seq and (self.flying or victim.inflight):
                return False  # blocks in flight will come back
            if victim.last_plan == flight.plan.id or victim.leaving:
                return False
            if victim.inflight:
                victim.leaving = True
                return False
            assert victim is not seq or len(self.running) > 1, "admission let in a sequence that can never fit"
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, budget: int, flight: Flight) -> None:
        """Start waiting sequences in rank order while budget, rows and blocks last."""
        if not self.policy.static and self.waiting:
            self.waiting = [(self.policy.rank(s), s.id, s) for _, _, s in self.waiting]
            heapq.heapify(self.waiting)
        most = self.careful or self.limits.max_rows
        while budget > 0 and self.waiting and len(flight.seqs) < most:
            seq = self.waiting[0][2]
            if seq.status != WAITING:
                heapq.heappop(self.waiting)
                continue
            seq.rank = self.waiting[0][0]
            if not self._room_for(seq, flight):
                return
            heapq.heappop(self.waiting)
            seq.row, seq.status, seq.fresh = self.free_rows.pop(), RUNNING, True
            insort(self.running, seq, key=_rank)
            budget -= self._grant(seq, budget, flight)

    def _room_for(self, seq: Sequence, flight: Flight) -> bool:
        """Match the prefix cache and check rows and blocks; lower-ranked running sequences give way."""
        while True:
            if self.free_rows:
                self.tables.open(seq)
                hit = self.tables.match(seq, 0, len(seq.tokens) - 1) if seq.group.reads_cache else 0
                if self.tables.has_room(seq, self.policy.reserve(seq)):
                    seq.computed = seq.cached = hit
                    self.counters.cached_tokens += hit
                    return True
                self.tables.close(seq)
            victim = self.running[-1] if self.running else None
            if victim is None or victim.rank <= seq.rank or victim.last_plan == flight.plan.id:
                return False
            if victim.inflight:
                victim.leaving = True
                return False
            self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's row and blocks; it waits and recomputes later (cached blocks may still serve it)."""
        self.running.remove(seq)
        self.counters.preemptions += 1
        seq.preemptions += 1
        self._give_back(seq)
        self._wait(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.status = WAITING
        seq.rank = self.policy.rank(seq)
        heapq.heappush(self.waiting, (seq.rank, seq.id, seq))

    def _give_back(self, seq: Sequence) -> None:
        self.tables.close(seq)
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            if not seq.fresh:
                self.ended_rows.append(seq.row)
        seq.row = -1
        seq.computed = seq.ahead = seq.pending = 0
        seq.fresh, seq.leaving, seq.jumped, seq.appended = True, False, False, []

    # ------------------------------------------------------------ commit

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take in the oldest plan's result; -> what each sequence gained."""
        flight = self.flying.popleft()
        plan = flight.plan
        assert plan.id == result.plan_id, "results must come in plan order"
        if plan.epoch != self.epoch:
            return []  # went down with an earlier failure; its rows were sent again
        if result.failure is not None:
            return self._failed(flight, result.failure)
        self.careful = 0 if self.careful == 0 else min(self.careful * 2, self.limits.max_rows)
        deltas: list[TokenDelta] = []
        counts, samples, drafts = plan.counts, plan.samples, plan.drafts
        special = bool(result.errors or result.prompt_logprobs or result.candidates or result.pooled)
        for i, seq in enumerate(flight.seqs):
            seq.inflight -= 1
            seq.ahead -= counts[i]
            if seq.status == FINISHED:
                if seq.inflight == 0:
                    self._release(seq)
                continue
            new = result.tokens[i]
            seq.computed += counts[i]
            if samples[i]:
                tried = drafts.get(i) if drafts else None
                seq.pending -= 1 + (len(tried) if tried else 0)
            else:
                tried = None
            if special and self._special(seq, i, result, deltas):
                new = []
            if new:
                if tried is not None:
                    self._verified(seq, tried, new)
                deltas.append(self._extend(seq, new, result, i))
            elif self.tables.windowed and seq.status == RUNNING:
                self.tables.trim(seq)
            if seq.leaving and seq.inflight == 0 and seq.status == RUNNING:
                self._preempt(seq)
        if special:
            self._branch_groups(deltas)
        return deltas

    def _extend(self, seq: Sequence, new: list[int], result: StepResult, i: int) -> TokenDelta:
        """Append sampled tokens, look for the end; -> the delta."""
        group = seq.group
        finish: str | None = None
        stop: int | None = None
        for n, token in enumerate(new):
            seq.tokens.append(token)
            if token in group.sampling.end_ids:
                finish, stop = "stop", token
            elif len(seq.tokens) >= group.max_len:
                finish = "length"
            elif seq.constraint is not None and seq.constraint.finished():
                finish = "stop"
            if finish is not None:
                new = new[: n + 1]
                break
        self.counters.output_tokens += len(new)
        logprobs = result.logprobs.get(i) if result.logprobs else None
        cached = seq.cached if seq.num_output == len(new) else 0
        delta = TokenDelta(group.request.id, seq.index, new, logprobs and logprobs[: len(new)], finish, stop, None)
        delta.cached = cached
        if seq.constraint is not None and finish is None:
            self._constrain(seq, new, delta)
        if delta.finish is not None:
            self._finish(seq)
        elif self.tables.windowed:
            self.tables.trim(seq)
        return delta

    def _constrain(self, seq: Sequence, new: list[int], delta: TokenDelta) -> None:
        """Advance the constraint; append what it forces without a model step."""
        constraint, group = seq.constraint, seq.group
        assert constraint is not None
        constraint.accept(new)
        if constraint.finished():
            delta.finish = "stop"
            return
        forced = constraint.forced() if seq.inflight == 0 and delta.logprobs is None else []
        forced = forced[: group.max_len - len(seq.tokens) - 1]
        if forced:
            constraint.accept(forced)
            seq.tokens += forced
            seq.appended = seq.appended + forced
            delta.tokens = new + forced
            self.counters.output_tokens += len(forced)
            if constraint.finished():
                delta.finish = "stop"

    def _verified(self, seq: Sequence, tried: list[int], new: list[int]) -> None:
        accepted = len(new) - 1
        seq.computed -= len(tried) - accepted
        self.counters.drafted += len(tried)
        self.counters.accepted += accepted
        self.drafter.observe(seq, len(tried), accepted)

    def _special(self, seq: Sequence, i: int, result: StepResult, deltas: list[TokenDelta]) -> bool:
        """Rare parts of a result; True: nothing else is to be done for this sequence."""
        group = seq.group
        error = result.errors.get(i)
        if error is not None:
            self.tables.forget(seq)
            deltas += self._fail(seq, error)
            return True
        scores = result.prompt_logprobs.get(i)
        if scores and seq.index == 0:
            new = scores[len(scores) - max(0, seq.computed - group.scored) :] if seq.computed > group.scored else []
            group.scored = max(group.scored, seq.computed)
            if new:
                deltas.append(TokenDelta(group.request.id, 0, [], prompt_logprobs=new))
        if i in result.pooled:
            deltas.append(
                TokenDelta(group.request.id, 0, [], finish="stop", pooled=result.pooled[i], cached=seq.cached)
            )
            self._finish(seq)
            return True
        if i in result.candidates:
            group.candidates[seq.id] = result.candidates[i]
            return True
        return False

    def _failed(self, flight: Flight, reason: str) -> list[TokenDelta]:
        """A whole step failed: forget what it and the later plans would have written, send every row again.

        Retried with half as many sequences each time; a sequence that fails alone is the one to blame.
        """
        self.counters.failures += 1
        self.epoch += 1
        deltas: list[TokenDelta] = []
        blamed = flight.seqs[0] if len(flight.seqs) == 1 else None
        for record in [flight, *self.flying]:
            self.tables.cache.retract(record.nodes)
            for seq in record.seqs:
                seq.inflight = 0
                if seq.status == FINISHED and seq.row >= 0:
                    self._release(seq)
        if blamed is not None and blamed.status == RUNNING:
            deltas += self._fail(blamed, f"this sequence cannot be computed: {reason}")
        self.careful = max(1, len(flight.seqs) // 2)
        for seq in list(self.running):
            self._preempt(seq)
        self.ended_rows.clear()  # a new epoch ends every row
        return deltas

    # ------------------------------------------------------------ branching

    def _new_sequence(self, group: SequenceGroup, tokens: list[int], constraint: object) -> Sequence:
        request = group.request
        index = len(group.sequences)
        seq = Sequence(
            id=self._next_seq,
            index=index,
            group=group,
            tokens=tokens,
            num_prompt=len(request.prompt_ids),
            seed=derive_seed(request.seed, index),
            constraint=constraint,  # type: ignore[arg-type]
            needs_host=bool(group.search.width) or self.limits.max_drafts > 0,
        )
        self._next_seq += 1
        group.sequences.append(seq)
        return seq

    def _spawn(self, parent: Sequence) -> None:
        """The prompt is planned: its further samples share it and recompute only its last token."""
        group = parent.group
        group.spawned = True
        for _ in range(group.search.spawn(group) - 1):
            constraint = group.constraint.fork() if group.constraint is not None else None
            child = self._new_sequence(group, parent.tokens[: parent.num_prompt], constraint)
            self._attach(parent, child, parent.num_prompt - 1)

    def _attach(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Put a fork to work on shared blocks, or let it wait when no row is free."""
        if not self.free_rows or not parent.tables:
            self._wait(child)
            return
        child.computed, child.cached = computed, computed
        self.tables.fork(parent, child, computed)
        child.row, child.status = self.free_rows.pop(), RUNNING
        child.rank = self.policy.rank(child)
        insort(self.running, child, key=_rank)

    def _branch_groups(self, deltas: list[TokenDelta]) -> None:
        """Beams advance together, once every live beam of a group has its candidates."""
        for group in list(self.groups.values()):
            if not group.candidates:
                continue
            live = [s for s in group.sequences if s.status != FINISHED]
            if any(s.id not in group.candidates for s in live):
                continue
            candidates, group.candidates = group.candidates, {}
            children = group.search.advance(group, candidates)
            self._branch(group, children)
            if not any(kids for _, kids in children):
                deltas += self._end_beams(group)

    def _branch(self, group: SequenceGroup, children: list[tuple[Sequence, list[tuple[int, float]]]]) -> None:
        for seq, kids in children:  # dropped first: their rows and blocks serve the forks
            if not kids:
                self._finish(seq, ends_index=False)
        for seq, kids in children:
            for token, score in kids[1:]:
                child = self._new_sequence(group, [*seq.tokens, token], None)
                child.score = score
                self._attach(seq, child, seq.computed)
            if kids:
                token, seq.score = kids[0]
                seq.tokens.append(token)
                seq.appended = [*seq.appended, token]
                if self.tables.windowed and seq.tables:
                    self.tables.trim(seq)

    def _end_beams(self, group: SequenceGroup) -> list[TokenDelta]:
        search = group.search
        assert isinstance(search, BeamSearch)
        self.groups.pop(group.request.id, None)
        deltas = []
        for index, done in enumerate(search.done[: group.num_outputs]):
            self.counters.output_tokens += len(done.tokens)
            deltas.append(TokenDelta(group.request.id, index, done.tokens, None, done.reason, score=done.total))
        return deltas

    # ------------------------------------------------------------ ends

    def _end(self, seq: Sequence, reason: str, error: str | None = None) -> list[TokenDelta]:
        self._finish(seq)
        return [TokenDelta(seq.group.request.id, seq.index, [], None, reason, None, error)]

    def _fail(self, seq: Sequence, error: str) -> list[TokenDelta]:
        """One sequence cannot go on; beams stand or fall together."""
        if seq.group.search.width:
            return self._end_group(seq.group, "error", error)
        return self._end(seq, "error", error)

    def _end_index(self, group: SequenceGroup, index: int, reason: str) -> list[TokenDelta]:
        for seq in group.sequences:
            if seq.index == index and seq.status != FINISHED:
                return self._end(seq, reason)
        return []

    def _end_group(self, group: SequenceGroup, reason: str, error: str | None = None) -> list[TokenDelta]:
        """One terminal delta for every output that has none yet."""
        for seq in group.sequences:
            if seq.status != FINISHED:
                self._finish(seq, ends_index=False)
        self.groups.pop(group.request.id, None)
        missing = [i for i in range(group.num_outputs) if i not in group.ended]
        return [TokenDelta(group.request.id, i, [], None, reason, None, error) for i in missing]

    def _finish(self, seq: Sequence, *, ends_index: bool = True) -> None:
        """No more work for this sequence; its blocks stay until its plans in flight are committed."""
        if seq.status == RUNNING:
            self.running.remove(seq)
        seq.status = FINISHED
        self.drafter.forget(seq)
        if seq.row >= 0 and seq.inflight == 0:
            self._release(seq)
        group = seq.group
        if ends_index:
            group.ended.add(seq.index)
            if len(group.ended) == group.num_outputs:
                self.groups.pop(group.request.id, None)

    def _release(self, seq: Sequence) -> None:
        if seq.node is not None and seq.computed > seq.published:
            self.tables.publish(seq, min(seq.computed, len(seq.tokens)))
        self._give_back(seq)


def _rank(seq: Sequence) -> tuple:
    return seq.rank


def derive_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sample: index 0 keeps the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) % (1 << 64)
