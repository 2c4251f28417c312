"""Random stories of several lives against the hash oracle: engines die and their requests are replayed, adapters come
and go, the prefix cache is emptied, single sequences fail, and prompts are scored or become vectors."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from tests.pure.scheduler.oracle import LAYOUTS, PICTURE, PLACEHOLDER, Moody, NoisyDrafter, ideal_beams
from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.core.sequence import FINISHED, SequenceGroup
from tokenmill.core.step import RowLogprobs, RowSampling, StepPlan, StepResult
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.kvcache.snapshots import Snapshots
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits, derive_seed
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import BeamSearch, Sampling
from tokenmill.server.backend import DeltaStream, Timeline
from tokenmill.server.engines.state import Open
from tokenmill.testing.hash_executor import HashExecutor, Row
from tokenmill.testing.hash_model import HashModel

FAULT = "The model's numbers are not finite."
MOST_SEQUENCES = 200
"""More than a request has in its life; each has a seed of its own."""


@dataclass
class Adapted:
    """A model with an adapter (0: none): whatever it sees is changed."""

    model: HashModel
    adapter: int
    generate = HashModel.generate

    @property
    def vocab(self) -> int:
        return self.model.vocab

    def views(self, tokens: list[int]) -> list[list[int]]:
        return self.model.views([token + (self.adapter << 50) for token in tokens])

    def token(self, views: list[list[int]], seed: int) -> int:
        return self.model.token(views, seed)

    def candidates(self, views: list[list[int]], width: int) -> list[tuple[int, float]]:
        return self.model.candidates(views, width)


@dataclass
class Device(HashExecutor):
    """Also knows adapters by slot, scores prompts, pools vectors, and fails single rows. wanted: the adapter of each
    seed, by number and by what it does. gone: adapters that must not be loaded any more. faults: how likely a row
    fails."""

    dice: random.Random = field(default_factory=random.Random)
    wanted: dict[int, tuple[int, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    slots: dict[int, int] = field(default_factory=dict)
    begins: list[int] = field(default_factory=list)
    faults: float = 0.0

    def _apply(self, plan: StepPlan) -> None:
        HashExecutor._apply(self, plan)
        for slot, adapter in plan.loads:
            assert adapter not in self.gone, "an adapter is loaded that was let go"
            self.slots[slot] = adapter
        for row_id in plan.rows:
            start = self.rows[row_id].start
            found = self.slots[start.adapter] if start.adapter else 0
            assert found == self.wanted[start.sampling.seed][0], "the row's slot holds another adapter"
        self.begins = [self.rows[row_id].computed for row_id in plan.rows]

    def _contents(self, row: Row, tokens: list[int]) -> list[int]:
        _, adapter = self.wanted[row.start.sampling.seed]
        return [token + (adapter << 50) for token in HashExecutor._contents(self, row, tokens)]

    def _run(self, plan: StepPlan) -> StepResult:
        result = HashExecutor._run(self, plan)
        for i, row_id in enumerate(plan.rows if result.failure is None else ()):
            row, begin = self.rows[row_id], self.begins[i]
            if row.start.sampling.num_prompt_logprobs >= 0:
                stop = min(begin + plan.counts[i], row.start.num_prompt - 1)
                scores = [RowLogprobs([row.tokens[at + 1]], [float(at)], 1) for at in range(begin, stop)]
                if scores:
                    result.prompt_logprobs[i] = scores
            if not plan.samples[i]:
                continue
            if self.dice.random() < self.faults:
                result.errors[i] = FAULT
                result.tokens[i] = []
                result.candidates.pop(i, None)
            elif row.start.pool is not None:
                result.pooled[i] = [float(result.tokens[i][0])]
                result.tokens[i] = []
        return result


@dataclass
class KnowingDrafter(NoisyDrafter):
    """Knows what the model sees of adapted rows."""

    wanted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def guess(self, known: list[int], seed: int, most: int) -> list[int]:
        adapted: Any = Adapted(self.model, self.wanted[seed][1])
        return NoisyDrafter(adapted, self.rng).guess([token % (1 << 50) for token in known], seed, most)


@dataclass
class Asked:
    """A request, what must come of it, and what has come. first_score: the first scored position."""

    group: SequenceGroup
    entry: Open
    wanted: list[list[int]]
    scored: list[int] = field(default_factory=list)
    first_score: int = 0
    vector: list[float] | None = None
    reasons: dict[int, str] = field(default_factory=dict)

    def take(self, delta: TokenDelta) -> None:
        """As the server notes it (server/engines/fleet.py)."""
        assert delta.index not in self.reasons, "a delta after the end"
        self.entry.say(delta)
        self.scored += [int(row.logprobs[0]) for row in delta.prompt_logprobs or ()]
        self.vector = delta.pooled or self.vector
        if delta.finish is not None:
            self.reasons[delta.index] = delta.finish
            self.entry.ended.add(delta.index)

    @property
    def open(self) -> bool:
        return len(self.reasons) < len(self.wanted)

    def check(self, *, may_fail: bool) -> None:
        for index, want in enumerate(self.wanted):
            reason, text = self.reasons[index], self.entry.emitted[index]
            if self.group.embed is not None and reason == "stop":
                assert self.vector == [float(want[0])] and not text
            elif reason in ("stop", "length"):
                assert text == want and (reason == "stop") == (want[-1] == 0), f"{text} != {want}"
            else:
                assert reason == "abort" or (may_fail and reason == "error"), reason
                assert text == want[: len(text)], f"{text} is no beginning of {want}"
        if self.group.sampling.num_prompt_logprobs >= 0:
            prompt = self.group.request.prompt_ids
            assert self.scored == sorted(set(self.scored)), "a position was scored twice"
            if any(self.entry.emitted) and self.reasons[0] != "error":  # (they come with the first output)
                assert self.scored == list(range(self.first_score, len(prompt) - 1)), "a position has no score"


class Lives:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.layouts, windows = dice.choice(LAYOUTS)
        self.block_size = dice.choice([1, 2, 4, 8])
        self.max_len = dice.randint(12, 50)
        self.model = HashModel(windows=windows, stop_every=dice.choice([5, 20, 1000]), stateful=dice.random() < 0.35)
        each = (-(-self.max_len // self.block_size) + 1) * len(self.layouts)
        pools = max(layout.pool for layout in self.layouts) + 1
        self.blocks = [each + dice.choice([0, 2, 10, 60]) for _ in range(pools)]
        self.numbers = [1, 2, 3]
        """The present number of each adapter."""
        self.count = 3
        self.leaving: set[int] = set()
        self.gone: set[int] = set()
        self.seeds: dict[int, tuple[int, int]] = {}
        self.asked: dict[str, Asked] = {}
        self.faults = dice.choice([0.0, 0.0, 0.01])
        self.fails = dice.random() < 0.3
        kind = dice.choice(["plain", "host", "device"])
        most = dice.randint(1, 4)
        self.follows = kind == "device" and dice.random() < 0.6
        self.limits = Limits(
            max_rows=dice.choice([1, 2, 4, 16]),
            max_step_tokens=dice.choice([1, 3, 8, 64]),
            max_chunk=dice.choice([0, 0, 2, 5]),
            max_drafts=most if kind == "host" else 0,
            max_guesses=most if kind == "device" else 0,
            step_guesses=dice.choice([1, 3, 64]),
            follows=self.follows,
            max_adapters=dice.choice([1, 2, 3]),
        )
        self.states = dice.choice([1, 8, 24]), dice.choice([1, 4, 12]), dice.choice([0, 1, 3, 12])
        self.policy, self.caches = dice.choice(["fcfs", "priority"]), dice.random() < 0.85
        self.arrivals = deque(self.make_request(number) for number in range(dice.randint(2, 12)))
        self.begin()

    def make_request(self, number: int) -> tuple[Asked, int]:
        """A request that is not adapted yet, and which adapter it wants (0: none)."""
        dice, model = self.dice, self.model
        stem = random.Random(dice.randrange(3))
        prompt = [stem.randrange(1, model.vocab) for _ in range(dice.randint(1, self.max_len - 3))]
        prompt += [dice.randrange(1, model.vocab) for _ in range(dice.randint(0, 2))]
        most = dice.randint(1, min(16, self.max_len - len(prompt)))
        adapter, seed, kind = dice.choice([0, 0, 1, 2, 3]), dice.randrange(1 << 30), dice.random()
        keys = [PICTURE + dice.randrange(3) if t % 3 == 0 else t for t in prompt] if dice.random() < 0.2 else None
        seen, adapted = keys or prompt, Adapted(model, adapter)
        model.contents.update({derive_seed(seed, index): seen for index in range(MOST_SEQUENCES)})
        request = Request(
            id=f"r{number}",
            prompt_ids=prompt if keys is None else [PLACEHOLDER if key >= PICTURE else key for key in keys],
            prompt_keys=keys,
            params=SamplingParams(),
            priority=dice.randint(0, 2),
            arrival=number,
            seed=seed,
            salt=dice.choice(["", "", "a"]),
        )
        group = SequenceGroup(request, Sampling(), RowSampling(end_ids=[0]), len(prompt) + most)
        group.reads_cache = dice.random() < 0.9
        first = 0
        if kind < 0.15:
            search = BeamSearch(dice.randint(2, 3), 1.0, False, frozenset({0}), most)
            wanted = ideal_beams(adapted, seen, fresh(search))
            group.search, group.num_outputs = search, search.beams
            group.sampling.num_candidates = search.width
        else:
            count = dice.randint(2, 3) if kind < 0.4 else 1
            wanted = [adapted.generate(seen, derive_seed(seed, index), most) for index in range(count)]
            group.num_outputs, request.params = count, SamplingParams(n=count)
            if 0.4 < kind < 0.5:
                group.embed, group.max_len = dice.choice(["last", "mean"]), len(prompt) + 1
                group.reads_cache = group.reads_cache and group.embed == "last"
            elif kind < 0.65:
                first = max(0, min(dice.choice([0, 0, 2, len(prompt)]), len(prompt)) - 1)
                group.scored, group.sampling.num_prompt_logprobs = first, 0
                request.params.prompt_logprobs = 0
                group.reads_cache = group.reads_cache and first > 0
        entry = Open(request, group.embed, NOBODY, Timeline(0.0), emitted=[[] for _ in wanted])
        return Asked(group, entry, wanted, first_score=first), adapter

    # ------------------------------------------------------------ lives

    def begin(self) -> None:
        """A new life: everything is empty, and open requests are replayed."""
        dice, limits = self.dice, self.limits
        snapshots = None
        if self.model.stateful:
            every, turn, slots = self.states
            snapshots = Snapshots(slots, self.block_size, every, turn)
        self.tables = BlockTables(
            self.layouts, self.blocks, self.block_size, prefix_cache=self.caches, snapshots=snapshots
        )
        self.tables.draft_window = self.layouts[0].window
        self.drafter = KnowingDrafter(self.model, dice, wanted=self.seeds)
        control = Moody(limits.max_guesses, dice) if dice.random() < 0.5 else None
        self.scheduler = Scheduler(limits, self.tables, make_policy(self.policy), self.drafter, control)
        self.device = Device(
            self.model,
            [layout.pool for layout in self.layouts],
            self.blocks,
            self.block_size,
            dice.choice([1, 2, 3]),
            dice=dice,
            wanted=self.seeds,
            gone=self.gone,
            faults=self.faults,
        )
        if limits.max_guesses:
            once = cache(lambda tokens, seed: self.drafter.guess(list(tokens), seed, limits.max_guesses))
            self.device.guess = lambda tokens, seed: once(tuple(tokens), seed)
        if self.follows:
            self.device.memory.follows = 0
        if self.fails:
            self.device.fail = {dice.randrange(1, 40) for _ in range(2)}
        self.flying: deque[Any] = deque()
        for asked in self.asked.values():
            if asked.open:
                asked.entry.deaths += 1
                self.replay(asked)

    def replay(self, asked: Asked) -> None:
        """As Admission makes a group of a replayed request."""
        old, request = asked.group, asked.entry.replayed()
        group = SequenceGroup(request, old.search, old.sampling, old.max_len, old.num_outputs, embed=old.embed)
        if isinstance(old.search, BeamSearch):
            group.search = fresh(old.search)
        scores = request.params.prompt_logprobs is not None
        group.sampling = msgspec.structs.replace(old.sampling, num_prompt_logprobs=0 if scores else -1)
        group.scored = asked.first_score if scores else 0
        group.reads_cache = old.reads_cache
        self.scheduler.add(group)

    def add(self, asked: Asked, adapter: int) -> None:
        request = asked.entry.request
        request.adapter = self.numbers[adapter - 1] if adapter else 0
        for index in range(MOST_SEQUENCES):
            self.seeds[derive_seed(request.seed, index)] = request.adapter, adapter
        self.asked[request.id] = asked
        self.scheduler.add(asked.group)

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.asked[delta.request_id].take(delta)

    def replace_adapter(self) -> None:
        place = self.dice.randrange(3)
        self.leaving.add(self.numbers[place])
        self.count += 1
        self.numbers[place] = self.count

    def let_go(self) -> None:
        """As engine/steps/adapters.py does it."""
        used = {group.request.adapter for group in self.scheduler.roster.groups.values()}
        used |= {seq.group.request.adapter for flight in self.scheduler.flying for seq in flight.seqs}
        for number in self.leaving - used:
            self.leaving.remove(number)
            self.scheduler.roster.adapters.drop(number)
            self.gone.add(number)

    def happen(self) -> None:
        """Something that no request asked for."""
        chance, dice = self.dice.random(), self.dice
        still = [asked for asked in self.asked.values() if asked.open]
        if chance < 0.004:
            self.begin()
        elif chance < 0.012:
            if chance < 0.008:
                self.scheduler.roster.preempt_all()
            self.tables.cache.clear()
        elif chance < 0.02:
            self.replace_adapter()
        elif chance < 0.024 and still:
            self.take(self.scheduler.abort(dice.choice(still).entry.request.id))
        elif chance < 0.03 and still:
            asked = dice.choice(still)
            said = [index for index, text in enumerate(asked.entry.emitted) if text]
            if said and not isinstance(asked.group.search, BeamSearch):  # its text holds a stop string
                self.take(self.scheduler.abort(asked.entry.request.id, dice.choice(said)))

    def tell(self) -> None:
        idle = 0
        for _ in range(60_000):
            if not self.arrivals and not self.scheduler.has_work:
                break
            while self.arrivals and self.dice.random() < 0.4:
                self.add(*self.arrivals.popleft())
            self.happen()
            self.let_go()
            plan = self.scheduler.plan()
            idle = 0 if plan or self.flying or not self.scheduler.has_work else idle + 1
            assert idle < 3, "livelock: there is work, and nothing is planned"
            if plan is not None:
                self.flying.append(self.device.submit(plan))
                if len(self.flying) < self.device.depth and self.dice.random() < 0.9:
                    continue
            if self.flying:
                self.take(self.scheduler.commit(self.flying.popleft().wait()))
        else:
            raise AssertionError("no end: livelock")
        self.check()

    def check(self) -> None:
        for asked in self.asked.values():
            asked.check(may_fail=self.faults > 0 or self.fails)
        roster, tables = self.scheduler.roster, self.tables
        assert not roster.running and len(roster.free_rows) == self.limits.max_rows
        assert not any(entry[2].status != FINISHED for entry in roster.waiting)
        assert not any(holding.rows for holding in roster.adapters.held.values()), "slots of adapters count rows"
        assert all(pool.held == pool.shared == 0 for pool in tables.pools), "blocks leaked"
        tables.cache.clear()
        assert all(len(pool.stack) == pool.num_blocks for pool in tables.pools), "blocks lost by the cache"
        assert sorted(tables.snapshots.free) == list(range(tables.snapshots.num_slots)), "slots lost"
        assert not tables.snapshots.readers and not tables.snapshots.coming


def fresh(search: BeamSearch) -> BeamSearch:
    """The same search, with nothing found yet."""
    return BeamSearch(
        search.beams, search.length_penalty, search.early_stopping, search.end_ids, search.max_new, search.min_new
    )


NOBODY = object.__new__(DeltaStream)
"""The stream of requests whose deltas nobody reads."""


def run_lives(seed: int) -> Scheduler:
    """One random story from its seed; raises AssertionError on any wrong text, double end, or anything that leaks."""
    lives = Lives(seed)
    lives.tell()
    return lives.scheduler
