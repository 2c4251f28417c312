"""Random schedules against the hash oracle: one function runs a whole random story and checks every text."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache

from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import NEVER, Sequence, SequenceGroup
from tokenmill.core.step import RowSampling
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.cache_events import MARK_BYTES, CacheEvents, next_mark, root_mark
from tokenmill.kvcache.snapshots import Snapshots
from tokenmill.scheduler.pace import ANY, waits
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits, OlderWays, derive_seed
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import BeamSearch, Sampling
from tokenmill.testing.hash_executor import HashExecutor
from tokenmill.testing.hash_model import HashModel
from tokenmill.testing.hash_ranks import HashRanks

LAYOUTS = [
    ([GroupLayout(0)], (0,)),
    ([GroupLayout(0, 5)], (5,)),
    ([GroupLayout(0), GroupLayout(0, 6)], (0, 6)),
    ([GroupLayout(0), GroupLayout(1, 3)], (0, 3)),
]


PLACEHOLDER, PICTURE = 1, 1 << 40
"""The token id of all pictures' parts, and the first of the keys that tell them apart."""


@dataclass
class NoisyDrafter:
    """Guesses right most of the time, so that acceptance, partial acceptance and rejection all happen."""

    model: HashModel
    rng: random.Random
    accepted: int = 0

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return self.guess(seq.keys, seq.seed, most)

    def guess(self, known: list[int], seed: int, most: int) -> list[int]:
        if self.rng.random() < 0.3:
            return []
        tokens, drafts = list(known), []
        for _ in range(self.rng.randint(1, most)):
            token = self.model.token(self.model.views(tokens), seed)
            token = token if self.rng.random() < 0.8 else (token + 1) % self.model.vocab
            tokens.append(token)
            drafts.append(token)
        return drafts

    def grow(self, known: list[int], seed: int, most: int, levels: int) -> tuple[list[int], list[int]]:
        """A tree: drafts, and what each goes on from. Right lines are long, and wrong nodes lie among their nodes."""
        drafts: list[int] = []
        parents: list[int] = []
        texts, depths, deepest = [list(known)], [0], 0
        for _ in range(self.rng.randint(most // 2, most) if self.rng.random() < 0.9 else 0):
            young = [n for n, depth in enumerate(depths) if depth < levels]
            parent = deepest if deepest in young and self.rng.random() < 0.6 else self.rng.choice(young)
            token = self.model.token(self.model.views(texts[parent]), seed)
            if right := self.rng.random() < 0.6:
                deepest = len(drafts) + 1 if parent == deepest else deepest
            drafts.append(token if right else (token + self.rng.randint(1, 2)) % self.model.vocab)
            parents.append(parent)
            texts.append([*texts[parent], drafts[-1]])
            depths.append(depths[parent] + 1)
        return drafts, parents

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed
        self.accepted += accepted

    def forget(self, seq: Sequence) -> None:
        pass


@dataclass(slots=True)
class Moody:
    """Wants other numbers of drafts all the time, and often none."""

    most: int
    dice: random.Random
    now: int = 0

    def depth(self, rows: int) -> int:
        if self.dice.random() < 0.2:
            self.now = self.dice.choice([0, self.most, self.dice.randint(0, self.most)])
        return self.now

    def observe(self, tried: int, accepted: int) -> None:
        assert 0 <= accepted <= tried <= self.most

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """Stories know no clock."""

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        """Neither do these."""


@dataclass(slots=True)
class Hasty:
    """Steps beside others' tokens have room for other numbers of prompt tokens all the time."""

    dice: random.Random

    def room(self, running: list[Sequence]) -> int:
        return self.dice.choice([1, 2, 5, ANY]) if any(waits(seq) for seq in running) else ANY


def ideal_beams(model: HashModel, prompt: list[int], search: BeamSearch) -> list[list[int]]:
    """Beam search on plain lists, with no engine in the way."""
    request = Request(id="x", prompt_ids=prompt, params=SamplingParams(), seed=0)
    group = SequenceGroup(request, search, RowSampling(), 10**6)
    beams = [Sequence(0, 0, group, list(prompt), len(prompt))]
    next_id = 1
    while beams:
        group.sequences = beams
        found = {s.id: model.candidates(model.views(s.tokens), search.width) for s in beams}
        after = []
        for seq, kids in search.advance(group, found):
            for token, score in kids:
                after.append(Sequence(next_id, 0, group, [*seq.tokens, token], len(prompt), score=score))
                next_id += 1
        beams = after
    return [h.tokens for h in search.done]


@dataclass
class Story:
    """One random run."""

    rng: random.Random
    texts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], str] = field(default_factory=dict)
    wanted: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    contents: dict[int, list[int]] = field(default_factory=dict)

    def take(self, deltas: list) -> None:
        for d in deltas:
            key = (d.request_id, d.index)
            assert key not in self.ends, f"{key} got a delta after its end"
            self.texts.setdefault(key, []).extend(d.tokens)
            if d.finish is not None:
                self.ends[key] = d.finish

    def check(self, allow_errors: bool) -> None:
        for name, count in self.outputs.items():
            for index in range(count):
                reason = self.ends[name, index]
                text, want = self.texts[name, index], self.wanted[name, index]
                if reason in ("stop", "length"):
                    assert text == want, f"{name}/{index}: {text} != {want}"
                    assert (reason == "stop") == (want[-1] == 0)
                else:
                    assert reason == "abort" or allow_errors, reason
                    assert text == want[: len(text)], f"{name}/{index} (aborted): {text} is no prefix of {want}"


def make_requests(
    rng: random.Random, model: HashModel, story: Story, max_len: int, *, branching: bool, beams_share: float = 0.2
) -> list:
    """Random requests with shared prefixes, some of them the next turn of an earlier one; their right answers go into
    the story."""
    stems = [[rng.randrange(1, model.vocab) for _ in range(rng.randint(1, max_len // 2))] for _ in range(3)]
    groups = []
    turns: list[list[int]] = []
    for i in range(rng.randint(1, 12)):
        stem = rng.choice(turns if turns and rng.random() < 0.4 else stems)
        prompt = stem[: rng.randint(1, len(stem))] if rng.random() < 0.3 else list(stem)
        prompt += [rng.randrange(1, model.vocab) for _ in range(rng.randint(0, 4))]
        most = rng.randint(1, max(1, min(20, max_len - len(prompt))))
        seed, name = rng.randrange(1 << 30), f"r{i}"
        kind = rng.random() if branching else 1.0
        salt = rng.choice(["", "", "a"])
        keys = None
        if rng.random() < 0.3:  # pictures: equal ids in a row, one of a few contents behind them
            keys = [PICTURE + rng.randrange(3) if t % 3 == 0 else t for t in prompt]
            story.contents |= {derive_seed(seed, index): keys for index in range(64)}
        request = Request(
            id=name,
            prompt_ids=prompt if keys is None else [PLACEHOLDER if k >= PICTURE else k for k in keys],
            prompt_keys=keys,
            params=SamplingParams(),
            priority=rng.randint(0, 2),
            arrival=i,
            seed=seed,
            salt=salt,
        )
        limit, prompt = len(prompt) + most, keys or prompt
        if kind < beams_share:
            beams = rng.randint(2, 3)
            make = lambda: BeamSearch(beams, 1.0, False, frozenset({0}), most)  # noqa: B023, E731
            sampling = RowSampling(end_ids=[0], num_candidates=make().width)
            group = SequenceGroup(request, make(), sampling, limit, num_outputs=beams)
            for index, tokens in enumerate(ideal_beams(model, prompt, make())):
                story.wanted[name, index] = tokens
            story.outputs[name] = beams
        else:
            n = rng.randint(2, 3) if kind < 0.5 else 1
            request.params = SamplingParams(n=n)
            group = SequenceGroup(request, Sampling(), RowSampling(end_ids=[0]), limit, num_outputs=n)
            for index in range(n):
                story.wanted[name, index] = model.generate(prompt, derive_seed(seed, index), most)
            story.outputs[name] = n
            if keys is None:  # a later request may go on where this one ends
                turns.append([*prompt, *story.wanted[name, 0]][: max_len - 6])
        group.reads_cache = rng.random() < 0.9
        groups.append(group)
    return groups


def least_blocks(layouts: list[GroupLayout], block_size: int, step_tokens: int, max_len: int) -> list[int]:
    """The fewest blocks per pool that hold a sequence of this length."""
    blocks = [1] * (max(lay.pool for lay in layouts) + 1)
    while BlockTables(layouts, blocks, block_size, step_tokens=step_tokens).max_length() < max_len:
        each = [
            BlockTables([GroupLayout(0, lay.window) for lay in layouts if lay.pool == pool], [count], block_size,
                        step_tokens=step_tokens).max_length()
            for pool, count in enumerate(blocks)
        ]  # fmt: skip
        blocks[each.index(min(each))] += 1
    return blocks


def check_kept(snapshots: Snapshots, device: HashExecutor) -> None:
    """What the cache believes to be kept is what the device kept."""
    for slot, node in [*snapshots.fresh.items(), *snapshots.proven.items()]:
        keys: list[int] = []
        while node.parent is not None:
            keys[:0] = [int(key) for key in node.key]
            node = node.parent
        assert device.memory.snapshots[slot] == (len(keys), device.model.state(keys)), (
            f"slot {slot} holds another state"
        )


def hear(held: set[bytes], tables: BlockTables) -> None:
    """Take in what the cache tells of its blocks."""
    published, gone = (
        {joined[at : at + MARK_BYTES] for at in range(0, len(joined), MARK_BYTES)}
        for joined in tables.cache.listener.take()
    )
    assert not published & gone
    held |= published
    held -= gone


def check_heard(held: set[bytes], tables: BlockTables) -> None:
    """All is committed: what was told is what lies there."""
    found: set[bytes] = set()
    stack = [(node, root_mark(salt)) for salt, node in tables.cache.roots.items()]
    while stack:
        node, mark = stack.pop()
        for key, child in node.children.items():
            below = next_mark(mark, key)
            stack.append((child, below))
            if all(block >= 0 for block in child.blocks):
                found.add(below)
    assert found <= held, "blocks lie there and were not told"
    assert tables.windowed or found == held, "blocks were told and do not lie there"


def check_all_free(scheduler: Scheduler, held: set[bytes]) -> None:
    """No request is left: every row, block and slot is free again, or the cache's, and what was told is so."""
    tables, snapshots = scheduler.tables, scheduler.tables.snapshots
    for pool in tables.pools:
        assert pool.held == 0, f"{pool.held} blocks leaked"
        assert pool.shared == 0, f"{pool.shared} blocks still count as shared"
    assert len(scheduler.roster.free_rows) == scheduler.limits.max_rows and not scheduler.roster.running
    hear(held, tables)
    check_heard(held, tables)
    tables.cache.clear()
    hear(held, tables)
    assert not held, "the cache is empty, and its blocks count as being there"
    assert sorted(snapshots.free) == list(range(snapshots.num_slots)) and not snapshots.readers, "slots lost"
    for pool in tables.pools:
        assert len(pool.stack) == pool.num_blocks, "blocks lost by the cache"


def run_story(
    seed: int,
    *,
    sabotage=None,
    failures: bool = True,
    device_drafts: bool = False,
    crowded_beams: bool = False,
    trees: bool = False,
    tight_windows: bool = False,
) -> Scheduler:
    """One random schedule from its seed; raises AssertionError on any wrong text, double end or leaked block.

    tight_windows: groups with windows get no more blocks than the longest sequence needs of them at one time.

    device_drafts: all drafts are the device's, and plans are in flight. crowded_beams: nearly all requests are beams,
    for fewer rows than they have together. trees: the device's drafts are trees, and rows have no states."""
    rng = random.Random(seed)
    layouts, windows = rng.choice(LAYOUTS)
    block_size = rng.choice([1, 2, 4, 8])
    max_len = rng.randint(12, 60)
    per_group = -(-max_len // block_size) + 1
    groups_per_pool = max(sum(1 for lay in layouts if lay.pool == p) for p in (0, 1))
    pools = max(lay.pool for lay in layouts) + 1
    blocks = [groups_per_pool * per_group + rng.choice([0, 2, 10, 60]) for _ in range(pools)]
    own = random.Random(~seed)
    step_tokens = own.choice([1, 3, 8])
    if tight_windows:
        layouts, windows = own.choice(LAYOUTS[1:])
        pools = max(lay.pool for lay in layouts) + 1
        blocks = least_blocks(layouts, block_size, step_tokens, max_len)
        blocks = [count + own.choice([0, 0, 1, 4]) for count in blocks]
    stateful = rng.random() < 0.4 and not trees
    device_drafts = device_drafts or trees
    model = HashModel(windows=windows, stop_every=rng.choice([5, 20, 1000]), stateful=stateful)
    depth = rng.choice([1, 1, 2, 3])
    overlaps = rng.random() < 0.7
    if device_drafts:
        depth, overlaps = rng.choice([2, 3]), True
    ranks = [
        HashExecutor(model, [lay.pool for lay in layouts], blocks, block_size, depth, overlaps)
        for _ in range(rng.choice([1, 1, 2]))
    ]
    if failures and rng.random() < 0.15:
        rng.choice(ranks).fail = {rng.randrange(1, 30) for _ in range(rng.randint(1, 3))}
    executor = HashRanks(ranks) if len(ranks) > 1 else ranks[0]
    drafting, guessing = rng.random() < 0.4, rng.random() < 0.4
    drafter = NoisyDrafter(model, rng)
    if device_drafts:
        drafting, guessing = False, True
    most_guesses = rng.randint(1, 4) if guessing else 0
    if guessing:
        once = cache(lambda tokens, seed: drafter.guess(list(tokens), seed, most_guesses))
        for rank in ranks:  # all of them guess alike
            rank.guess = lambda tokens, seed: once(tuple(tokens), seed)
    levels = rng.choice([1, 2, 3, 4, 5, 8]) if trees else 0
    if trees:
        most_guesses = rng.choice([1, 2, 4, 8, 12, 20])
        grown = cache(lambda tokens, seed: drafter.grow(list(tokens), seed, most_guesses, levels))
        for rank in ranks:
            rank.guess = lambda tokens, seed: grown(tuple(tokens), seed)
    follows = guessing and rng.random() < 0.6
    followed = own.randrange(len(windows))
    for rank in ranks if follows else ():
        rank.memory.follows = followed
    recalls = follows and random.Random(~seed).random() < 0.4 and not trees
    for rank in ranks:
        rank.memory.recalls = recalls
    limits = Limits(
        max_rows=rng.choice([1, 2, 3] if crowded_beams else [1, 2, 4, 16]),
        max_step_tokens=rng.choice([1, 3, 8, 64]),
        max_chunk=rng.choice([0, 0, 2, 5]),
        max_drafts=rng.randint(1, 4) if drafting else 0,
        max_guesses=most_guesses,
        levels=levels,
        step_guesses=rng.choice([1, 3, 64]),
        follows=follows,
        catches_up="anew" if recalls else "on",
        cohorts=0 if executor.overlaps else rng.choice([1, 2, 3]),
        older=OlderWays(rng.random() < 0.1, rng.random() < 0.1),
    )
    if tight_windows:
        limits = replace(
            limits, max_step_tokens=step_tokens, older=OlderWays(closed_batches=limits.older.closed_batches)
        )
    snapshots = None
    if stateful:
        every, turn = rng.choice([1, 8, 24, 1000]), rng.choice([1, 4, 12, 1000])
        snapshots = Snapshots(rng.choice([0, 1, 3, 12, 100]), block_size, every, turn)
    tables = BlockTables(
        layouts,
        blocks,
        block_size,
        prefix_cache=rng.random() < 0.85,
        snapshots=snapshots,
        step_tokens=step_tokens if tight_windows else NEVER,
    )
    tables.shares_followed, tables.draft_window = not recalls, windows[followed]
    tables.cache.listener = CacheEvents()
    held: set[bytes] = set()
    control = Moody(most_guesses, random.Random(rng.random())) if rng.random() < 0.5 else None
    scheduler = Scheduler(limits, tables, make_policy(rng.choice(["fcfs", "priority"])), drafter, control)
    dice = random.Random(seed + 1)
    if dice.random() < 0.5:
        scheduler.pace = Hasty(dice)
    if sabotage is not None:
        sabotage(scheduler)
    story = Story(rng)
    arrivals = deque(
        make_requests(rng, model, story, max_len, branching=True, beams_share=0.8 if crowded_beams else 0.2)
    )
    model.contents.update(story.contents)
    flying: deque = deque()
    rng_of_ears = random.Random(~seed)
    aborts, idle = rng.choice([0, 0, 1, 3]), 0  # few, because an abort ends a livelock
    for _ in range(60_000):
        if not arrivals and not scheduler.has_work:
            break
        while arrivals and rng.random() < 0.5:
            scheduler.add(arrivals.popleft())
        if aborts and rng.random() < 0.02 and story.outputs:
            aborts -= 1
            name = rng.choice(list(story.outputs))
            story.take(scheduler.abort(name))
        plan = scheduler.plan()
        idle = 0 if plan or flying or not scheduler.has_work else idle + 1
        assert idle < 3, "livelock: there is work, and nothing is planned"
        if plan is not None:
            seqs = scheduler.flying[-1].seqs
            assert all(s.computed + s.ahead < s.group.max_len for s in seqs), "granted what may lie behind the end"
            flying.append(executor.submit(plan))
            if len(flying) < executor.depth and rng.random() < 0.9:
                continue
        if flying:
            story.take(scheduler.commit(flying.popleft().wait()))
            if rng_of_ears.random() < 0.2:
                hear(held, tables)
            if snapshots is not None and rng.random() < 0.1 and not any(rank.fail for rank in ranks):
                check_kept(snapshots, ranks[-1])
    else:
        raise AssertionError("no end after 60,000 steps: livelock")
    story.check(allow_errors=any(rank.fail for rank in ranks))
    check_all_free(scheduler, held)
    return scheduler
