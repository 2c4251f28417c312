"""Constraints on the hash oracle: drafts, forced tokens, n, beams, preemption, the prefix cache change nothing."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from tests.pure.scheduler.oracle import NoisyDrafter
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, SequenceGroup
from tokenmill.core.step import LateInputs, RowSampling, StepPlan, StepResult
from tokenmill.engine.steps.engine import Engine
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits, derive_seed
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import BeamSearch, Sampling
from tokenmill.testing.hash_executor import HashExecutor, Row
from tokenmill.testing.hash_model import HashModel, mix

VOCAB = 50


class Rules:
    """What may follow depends on the last token and the place; often there is one choice only; token 0 ends."""

    def __init__(self, seed: int, said: list[int] | None = None) -> None:
        self.seed = seed
        self.said = said or []

    def allowed(self) -> list[int]:
        value = mix(hash((self.seed, len(self.said) % 7, self.said[-1] if self.said else -1)) & (1 << 64) - 1)
        if value % 3 == 0:
            return [1 + (value >> 8) % (VOCAB - 1)]
        chosen = {1 + (mix(value + i) % (VOCAB - 1)) for i in range(1 + (value >> 16) % 9)}
        return sorted(chosen | ({0} if value % 5 == 0 else set()))

    def mask(self) -> bytes:
        bits = bytearray((VOCAB + 7) // 8)
        for token in self.allowed():
            bits[token >> 3] |= 1 << (token & 7)
        return bytes(bits)

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert token in self.allowed(), "a token that is not allowed was said"
            self.said = [*self.said, token]

    def forced(self) -> list[int]:
        trial, found = self.fork(), []
        while len(found) < 6 and not trial.finished() and len(trial.allowed()) == 1 and trial.allowed() != [0]:
            found += trial.allowed()
            trial.accept(trial.allowed())
        return found

    def validate(self, tokens: list[int]) -> int:
        trial = self.fork()
        for count, token in enumerate(tokens):
            if trial.finished() or token not in trial.allowed():
                return count
            trial.accept([token])
        return len(tokens)

    def finished(self) -> bool:
        return bool(self.said) and self.said[-1] == 0

    def failure(self) -> str | None:
        return None

    def fork(self) -> Rules:
        return Rules(self.seed, self.said)


def choose(token: int, mask: bytes | None) -> int:
    """The first allowed token from here on."""
    while mask is not None and not mask[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % VOCAB
    return token


def masked(candidates: list[tuple[int, float]], mask: bytes | None, width: int) -> list[tuple[int, float]]:
    return [c for c in candidates if mask is None or mask[c[0] >> 3] >> (c[0] & 7) & 1][:width]


@dataclass(slots=True)
class LateTicket:
    """Runs when it is waited for: until then masks may come."""

    executor: MaskedExecutor
    plan: StepPlan

    def wait(self) -> StepResult:
        return self.executor.run(self.plan)


@dataclass(slots=True)
class MaskedExecutor(HashExecutor):
    """A hash executor whose sampling heeds masks."""

    masks: dict[int, dict[int, bytes]] = field(default_factory=dict)
    now: int = -1

    def submit(self, plan: StepPlan) -> LateTicket:
        return LateTicket(self, plan)

    def supply(self, plan_id: int, inputs: LateInputs) -> None:
        self.masks[plan_id] = dict(inputs.masks)

    def run(self, plan: StepPlan) -> StepResult:
        assert not plan.late or plan.id in self.masks, "masks were not supplied"
        self.now = plan.id
        return self._run(plan)

    def _sample(self, row: Row, drafts: list[int], count: int, sample: bool, i: int, result: StepResult) -> list[int]:
        end = row.computed + count
        if not sample:
            row.computed = end
            return []
        given = self.masks.get(self.now, {}).get(row.start.row)
        size = (VOCAB + 7) // 8
        lines = None if given is None else [given[k : k + size] for k in range(0, len(given), size)]
        assert lines is None or len(lines) == 1 + len(drafts)
        width = row.start.sampling.num_candidates
        if width:
            views = [self._read(row, g, end - 1) for g in range(len(self.pools))]
            result.candidates[i] = masked(self.model.candidates(views, VOCAB), lines and lines[0], width)
            row.computed = end
            return []
        new: list[int] = []
        for n in range(len(drafts) + 1):
            views = [self._read(row, g, end - len(drafts) - 1 + n) for g in range(len(self.pools))]
            new.append(choose(self.model.token(views, row.start.sampling.seed), lines and lines[n]))
            if n < len(drafts) and new[-1] != drafts[n]:
                break
        row.tokens += new
        row.computed = len(row.tokens) - 1
        return new


class ConstrainedDrafter(NoisyDrafter):
    """Guesses what the constraint would choose, most of the time."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        if seq.constraint is None:
            return super().propose(seq, most)
        tokens, drafts, rules = list(seq.tokens), [], seq.constraint.fork()
        for _ in range(self.rng.randint(0, most)):
            if rules.finished():
                break
            token = choose(self.model.token(self.model.views(tokens), seq.seed), rules.mask())
            if self.rng.random() < 0.2:
                token = (token + 1) % VOCAB
            drafts.append(token)
            tokens.append(token)
            if rules.validate([token]) != 1:
                break
            rules.accept([token])
        return drafts


def ideal(
    model: HashModel, prompt: list[int], seed: int, most: int, rules: Rules | None, ends: tuple[int, ...] = (0,)
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < most:
        token = choose(model.token(model.views(tokens), seed), rules and rules.mask())
        tokens.append(token)
        if rules is not None:
            rules.accept([token])
        if token in ends:
            break
    return tokens[len(prompt) :]


def ideal_beams(model: HashModel, prompt: list[int], search: BeamSearch, rules: Rules) -> list[list[int]]:
    request = Request(id="x", prompt_ids=prompt, params=SamplingParams(), seed=0)
    group = SequenceGroup(request, search, RowSampling(), 10**6)
    beams = [Sequence(0, 0, group, list(prompt), len(prompt), constraint=rules)]
    next_id = 1
    while beams:
        group.sequences = beams
        found = {
            s.id: masked(model.candidates(model.views(s.tokens), VOCAB), s.constraint.mask(), search.width)
            for s in beams
        }
        after = []
        for seq, kids in search.advance(group, found):
            for token, score in kids:
                fork = seq.constraint.fork()
                fork.accept([token])
                made = Sequence(next_id, 0, group, [*seq.tokens, token], len(prompt), score=score, constraint=fork)
                after.append(made)
                next_id += 1
        beams = after
    return [h.tokens for h in search.done]


def run_story(seed: int) -> Scheduler:
    rng = random.Random(seed)
    layouts = rng.choice([[GroupLayout(0)], [GroupLayout(0), GroupLayout(0, 6)]])
    windows = tuple(lay.window for lay in layouts)
    model = HashModel(windows=windows, vocab=VOCAB, stop_every=rng.choice([20, 1000]))
    block_size, max_len = rng.choice([1, 2, 4]), rng.randint(16, 60)
    blocks = [len(layouts) * (-(-max_len // block_size) + 1) + rng.choice([0, 3, 20, 80])]
    executor = MaskedExecutor(model, [0] * len(layouts), blocks, block_size, rng.choice([1, 2]), rng.random() < 0.7)
    drafter = ConstrainedDrafter(model, rng)
    executor.guess = lambda tokens, seed: drafter.guess(tokens, seed, 2)
    limits = Limits(
        max_rows=rng.choice([2, 4, 16]),
        max_step_tokens=rng.choice([1, 8, 64]),
        max_chunk=rng.choice([0, 3]),
        max_drafts=rng.choice([0, 0, 3]),
        max_guesses=rng.choice([0, 2]),
        step_guesses=8,
        cohorts=0 if executor.overlaps else 2,
    )
    tables = BlockTables(layouts, blocks, block_size, prefix_cache=rng.random() < 0.8)
    scheduler = Scheduler(limits, tables, make_policy(rng.choice(["fcfs", "priority"])), drafter)
    engine = Engine(scheduler, executor, None)  # type: ignore[arg-type]
    stem = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, max_len // 2))]
    wanted: dict[tuple[str, int], list[int]] = {}
    coming: deque[SequenceGroup] = deque()
    for i in range(rng.randint(1, 8)):
        prompt = stem + [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 3))]
        most, own, name = rng.randint(1, max_len - len(prompt)), rng.randrange(1 << 30), f"r{i}"
        rules = Rules(rng.randrange(99)) if rng.random() < 0.8 else None
        request = Request(
            id=name, prompt_ids=prompt, params=SamplingParams(), seed=own, priority=rng.randint(0, 2), arrival=i
        )
        beams = rng.random() < 0.25 and rules is not None and limits.max_rows >= 3
        count = rng.choice([1, 1, 3])
        request.params = SamplingParams(n=1 if beams else count)
        search = BeamSearch(2, 1.0, False, frozenset({0}), most) if beams else Sampling()
        stops = () if beams else random.Random(own).choice([(), (7, 8, 9)])  # stop_token_ids
        sampling = RowSampling(end_ids=[0, *stops], num_candidates=search.width)
        group = SequenceGroup(request, search, sampling, len(prompt) + most, num_outputs=2 if beams else count)
        group.constraint = None if rules is None else rules.fork()
        if beams:
            found = ideal_beams(model, prompt, BeamSearch(2, 1.0, False, frozenset({0}), most), rules)
            found += [[]] * (2 - len(found))  # a beam that nobody can say ends, too
            wanted |= {(name, k): tokens for k, tokens in enumerate(found)}
        else:
            for k in range(count):
                wanted[name, k] = ideal(model, prompt, derive_seed(own, k), most, rules and rules.fork(), (0, *stops))
        coming.append(group)
    texts: dict[tuple[str, int], list[int]] = {key: [] for key in wanted}
    ends = 0
    for _ in range(6000):
        if not coming and not engine.has_work:
            break
        while coming and rng.random() < 0.5:
            scheduler.add(coming.popleft())
        for delta in engine.step():
            texts[delta.request_id, delta.index] += delta.tokens
            ends += delta.finish is not None
    else:
        raise AssertionError("no end after 6000 steps")
    assert texts == wanted and ends == len(wanted)
    assert all(pool.held == 0 for pool in tables.pools)
    return scheduler


@pytest.mark.parametrize("part", range(6))
def test_constrained_texts_are_the_ideal_ones(part):
    preempted = accepted = 0
    for seed in range(part * 60, part * 60 + 60):
        counters = run_story(seed).counters
        preempted += counters.preemptions
        accepted += counters.accepted
    assert preempted and accepted


def run_twins(seed: int) -> None:
    """Equal requests follow each other closely: each finds what the one before has said while its own drafts fail."""
    rng = random.Random(seed)
    model = HashModel(windows=(0,), vocab=VOCAB, stop_every=1000)
    block_size = rng.choice([1, 2, 4])
    executor = MaskedExecutor(model, [0], [200], block_size)
    tables = BlockTables([GroupLayout(0)], [200], block_size)
    limits = Limits(max_rows=4, max_step_tokens=64, max_drafts=rng.choice([3, 6]), step_guesses=32)
    scheduler = Scheduler(limits, tables, make_policy("fcfs"), ConstrainedDrafter(model, rng))
    engine = Engine(scheduler, executor, None)  # type: ignore[arg-type]
    prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9))]
    own, rules = rng.randrange(1 << 30), Rules(rng.randrange(99))
    coming: deque[SequenceGroup] = deque()
    for i in range(3):
        request = Request(id=f"r{i}", prompt_ids=prompt, params=SamplingParams(), seed=own, arrival=i)
        group = SequenceGroup(request, Sampling(), RowSampling(end_ids=[0]), len(prompt) + 40)
        group.constraint = rules.fork()
        coming.append(group)
    texts: dict[str, list[int]] = {}
    while coming or engine.has_work:
        if coming and rng.random() < 0.3:
            scheduler.add(coming.popleft())
        for delta in engine.step():
            texts.setdefault(delta.request_id, []).extend(delta.tokens)
    wanted = ideal(model, prompt, own, 40, rules)
    assert texts == {f"r{i}": wanted for i in range(3)}


def test_blocks_of_drafts_that_failed_are_not_in_the_way_of_a_prefix():
    for seed in range(60):
        run_twins(seed)
