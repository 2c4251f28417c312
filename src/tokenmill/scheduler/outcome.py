"""What a step's results mean. Owns: taking tokens, verdicts on drafts, logprobs, candidates and errors into sequences.

Must not know: budgets, admission, devices. The scheduler calls `take` for each committed plan.
"""

from __future__ import annotations

from tokenmill.core.constraint import Constraint
from tokenmill.core.errors import OWN_FAULT, TOO_FEW
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import FINISHED, RUNNING, Sequence, SequenceGroup
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.scheduler.roster import Roster
from tokenmill.scheduler.search import BeamSearch, trail_of


class Outcome:
    """Applies results to the sequences of one roster."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.tables = roster.tables
        self.counters = roster.counters

    def take(self, plan: StepPlan, seqs: list[Sequence], result: StepResult) -> list[TokenDelta]:
        """Commit one plan's result; `seqs` are the sequences of its grants. Returns what each sequence gained."""
        deltas: list[TokenDelta] = []
        guesses, nodes, windowed = plan.guesses, plan.nodes, self.tables.windowed
        special = bool(result.errors or result.prompt_logprobs or result.candidates or result.pooled)
        grants = zip(seqs, plan.counts, plan.samples, result.tokens, strict=True)
        for i, (seq, reach, sampled, new) in enumerate(grants):
            seq.inflight -= 1
            if nodes and i in nodes:
                reach += guesses[i] - nodes[i]
            seq.ahead -= reach
            if seq.status == FINISHED:
                if seq.inflight == 0:
                    self.roster.release(seq)
                continue
            if seq.told:
                seq.drafts = result.drafts.get(i, [])
            seq.computed += reach
            tried = 0
            if sampled:
                seq.pending -= 1
                if guesses:
                    tried = guesses.get(i, 0)
                    seq.pending -= tried
                    seq.hoped -= tried
            if special and self._special(seq, i, result, deltas):
                new = []
            if new:
                if tried:
                    self._verified(seq, tried, len(new) - 1, by_host=i in plan.drafts)
                delta = self._extend(seq, new, result, i)
                if tried:  # drafts behind the end of the text are no part of it
                    delta.drafted, delta.accepted = plan.tried(i), min(len(new) - 1, len(delta.tokens))
                    self.counters.count_draft(delta.drafted, delta.accepted, tried)
                deltas.append(delta)
            elif windowed and seq.status == RUNNING:
                self.tables.trim(seq)
            if seq.computed >= seq.save_at and seq.status == RUNNING:
                self._confirm(seq)
            if seq.leaving and seq.inflight == 0 and seq.status == RUNNING:
                self.roster.preempt(seq)
        if special:
            self._branch_groups(deltas)
        return deltas

    def _extend(self, seq: Sequence, new: list[int], result: StepResult, i: int) -> TokenDelta:
        """Append sampled tokens and check whether the sequence ends; returns the delta."""
        group, constraint = seq.group, seq.constraint
        finish: str | None = None
        stop: int | None = None
        for n, token in enumerate(new):
            seq.tokens.append(token)
            if constraint is not None:
                constraint.accept([token])
            if token in group.sampling.end_ids:
                finish, stop = "stop", token
            elif constraint is not None and constraint.finished():
                finish = "stop"
            elif len(seq.tokens) >= group.max_len:
                finish = "length"
            if finish is not None:
                new = new[: n + 1]
                break
        self.counters.output_tokens += len(new)
        logprobs = result.logprobs.get(i) if result.logprobs else None
        delta = TokenDelta(group.request.id, seq.index, new, logprobs and logprobs[: len(new)], finish, stop, None)
        if group.cached and seq.num_output == len(new):
            delta.cached = group.cached
        if result.mus:
            seq.mu = delta.mu = result.mus.get(i, seq.mu)
        if constraint is not None and finish is None:
            self._force(seq, constraint, delta)
        if delta.finish is not None:
            self.roster.finish(seq)
        elif self.tables.windowed:
            self.tables.trim(seq)
        return delta

    def _force(self, seq: Sequence, constraint: Constraint, delta: TokenDelta) -> None:
        """Append the tokens that the constraint forces, without a model step. A token that ends the text is sampled
        all the same: sampling knows what that means."""
        group, ends = seq.group, seq.group.sampling.end_ids
        if seq.inflight or delta.logprobs is not None or group.sampling.forbids:
            return
        forced = constraint.forced()
        forced = forced[: group.max_len - len(seq.tokens) - 1]
        forced = forced[: next((n for n, token in enumerate(forced) if token in ends), len(forced))]
        if forced:
            constraint.accept(forced)
            seq.drafts = []
            seq.tokens += forced
            seq.appended = seq.appended + forced
            delta.tokens = delta.tokens + forced
            self.counters.output_tokens += len(forced)
            if constraint.finished():
                delta.finish = "stop"

    def _verified(self, seq: Sequence, tried: int, accepted: int, *, by_host: bool) -> None:
        seq.computed -= tried - accepted
        seq.followed = min(seq.followed, seq.computed + seq.ahead)  # plans in flight had counted on all drafts
        if by_host and not seq.told:
            self.roster.drafter.observe(seq, tried, accepted)
        else:
            self.roster.observe(tried, accepted)

    def _confirm(self, seq: Sequence) -> None:
        """Attach the state that was kept on the way: its tokens are known now."""
        new = self.tables.publish(seq, min(len(seq.tokens), seq.computed))
        self.tables.cache.listener.published(new)
        self.tables.snapshots.confirm(seq)

    def _special(self, seq: Sequence, i: int, result: StepResult, deltas: list[TokenDelta]) -> bool:
        """Handle the rare parts of a result; True: there is nothing else to do for this sequence."""
        group = seq.group
        scores = result.prompt_logprobs.get(i)
        scored = min(seq.computed, seq.num_prompt - 1)  # the last prompt token predicts no prompt token
        if scores and seq.index == 0 and scored > group.scored:
            new = scores[len(scores) - (scored - group.scored) :]  # scores of recomputed tokens were reported before
            group.scored = scored
            deltas.append(TokenDelta(group.request.id, 0, [], prompt_logprobs=new))
        error = result.errors.get(i)
        if error is not None:
            if seq.constraint is not None:
                error = seq.constraint.failure() or error  # says why its mask was empty
            if group.search.width and error.startswith(OWN_FAULT):  # the other beams go on
                group.dead_end = error
                group.candidates[seq.id] = []
                return True
            self.tables.forget(seq)
            deltas += self.roster.fail(seq, error)
            return True
        if i in result.pooled:
            deltas.append(
                TokenDelta(group.request.id, 0, [], finish="stop", pooled=result.pooled[i], cached=group.cached)
            )
            self.roster.finish(seq)
            return True
        if i in result.candidates:
            group.candidates[seq.id] = result.candidates[i]
            group.branches[seq.id] = result.branches.get(i, [])
            return True
        return False

    def _branch_groups(self, deltas: list[TokenDelta]) -> None:
        """Advance the beams of a group together, once every live one has its candidates."""
        for group in list(self.roster.groups.values()):
            if not group.candidates:
                continue
            live = [s for s in group.sequences if s.status != FINISHED]
            if any(s.id not in group.candidates for s in live):
                continue
            candidates, group.candidates = group.candidates, {}
            children = group.search.advance(group, candidates)
            self._branch(group, children)
            group.branches.clear()
            if not any(kids for _, kids in children):
                deltas += self._end_beams(group)

    def _branch(self, group: SequenceGroup, children: list[tuple[Sequence, list[tuple[int, float]]]]) -> None:
        for seq, kids in children:  # end dropped beams first: the forks can use their rows and blocks
            if not kids:
                self.roster.finish(seq, ends_index=False)
        for seq, kids in children:
            for token, score in kids[1:]:
                constraint = seq.constraint.fork() if seq.constraint is not None else None
                if constraint is not None:
                    constraint.accept([token])
                child = self.roster.new_sequence(group, [*seq.tokens, token], constraint)
                child.score, child.trail = score, trail_of(seq, token)
                self.roster.attach(seq, child, seq.computed)
            if kids:
                token, seq.score = kids[0]
                seq.trail = trail_of(seq, token)
                if seq.constraint is not None:
                    seq.constraint.accept([token])
                seq.tokens.append(token)
                seq.appended = [*seq.appended, token]
                if self.tables.windowed and seq.tables:
                    self.tables.trim(seq)
        # A long search drops thousands of beams, each with all of its tokens; one sequence always stays.
        group.sequences = [s for s in group.sequences if s.status != FINISHED] or group.sequences[:1]

    def _end_beams(self, group: SequenceGroup) -> list[TokenDelta]:
        search = group.search
        assert isinstance(search, BeamSearch)
        self.roster.groups.pop(group.request.id, None)
        deltas = []
        for index, done in enumerate(search.done[: group.num_outputs]):
            self.counters.output_tokens += len(done.tokens)
            delta = TokenDelta(group.request.id, index, done.tokens, done.logprobs, done.reason, cached=group.cached)
            delta.score = done.total
            deltas.append(delta)
        if missing := group.num_outputs - len(deltas):
            error = group.dead_end if not deltas and group.dead_end else _too_few(len(deltas), group.num_outputs)
            first = len(deltas)
            deltas += [TokenDelta(group.request.id, first + n, [], None, "error", None, error) for n in range(missing)]
        return deltas


def _too_few(found: int, wanted: int) -> str:
    least = f"ask for n = {found} at most" if found else "ask for something else"
    return f"{TOO_FEW}{found} of {wanted} beams can be said; {least}."
