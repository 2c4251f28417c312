"""The hash oracle: random schedules give the right text every time, and seeded bugs are caught."""

from __future__ import annotations

import dataclasses
import os

import pytest

from tests.pure.scheduler.oracle import run_story
from tests.pure.scheduler.oracle_lives import run_lives
from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.core.sequence import Sequence, SequenceGroup
from tokenmill.core.step import RowSampling, StepPlan, StepResult
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.snapshots import Kept
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Flight, Scheduler
from tokenmill.scheduler.search import BeamSearch
from tokenmill.speculate.none import NoDrafter
from tokenmill.testing.hash_executor import HashExecutor, Tree
from tokenmill.testing.hash_model import HashModel

PARTS = 12 if os.environ.get("TOKENMILL_FAMILIES") else 2
STORIES = 200 * PARTS  # bench/oracle.py runs tens of thousands


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    size = STORIES // PARTS
    for seed in range(part * size, (part + 1) * size):
        run_story(seed)


def test_windows_hold_no_more_than_they_need() -> None:
    """Pools of exactly what the longest sequence needs of them at one time suffice, however long it is."""
    for seed in range(25):
        run_story(seed, tight_windows=True)
        run_story(seed, tight_windows=True, device_drafts=True)
        run_story(seed, tight_windows=True, trees=True)
        run_story(seed, tight_windows=True, crowded_beams=True)


def test_beams_of_many_requests_share_few_rows() -> None:
    """Siblings wait for one another, and rows for siblings: somebody always goes on."""
    for seed in range(STORIES // 5):
        run_story(seed, crowded_beams=True)


def test_deaths_adapters_and_an_emptied_cache() -> None:
    """Stories of several lives (oracle_lives.py)."""
    for seed in range(STORIES // 5):
        run_lives(seed)


def test_drafts_of_the_device_cost_no_plan_in_flight() -> None:
    """Rows with drafts are in two plans at a time, and the drafts of both are tried."""
    overlapped = accepted = 0

    def watch(scheduler: Scheduler) -> None:
        honest = scheduler._tell

        def telling(seq: Sequence, position: int, plan: StepPlan) -> None:
            nonlocal overlapped
            before = [f.plan.guesses.get(f.seqs.index(seq), 0) for f in scheduler.flying if seq in f.seqs]
            overlapped += any(before) and seq.pending > 1
            honest(seq, position, plan)

        scheduler._tell = telling  # type: ignore[method-assign]

    for seed in range(150):
        accepted += run_story(seed, sabotage=watch, device_drafts=True).counters.accepted
    assert overlapped > 500 and accepted > 500


def caught(
    sabotage, seeds: range = range(400), *, enough: int = 6, failures: bool = False, **kind: bool
) -> bool:  # fmt: skip
    """Is a seeded bug noticed in enough stories?"""
    for seed in seeds:
        try:
            run_story(seed, sabotage=sabotage, failures=failures, **kind)
        except (AssertionError, IndexError, KeyError):
            enough -= 1
            if not enough:
                return True
    return False


def test_stale_block_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        def forgetful(block: int) -> None:  # evicts a block, but the tree goes on naming it
            for pool in scheduler.tables.pools:
                if block in pool.idle:
                    del pool.idle[block], pool.cached[block]
                    pool.stack.append(block)

        for pool in scheduler.tables.pools:
            pool.on_evict = forgetful

    assert caught(sabotage)


def test_over_registered_prefix_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler.tables.publish

        def eager(seq: Sequence, upto: int) -> list[object]:
            most = min(len(seq.tokens), seq.capacity)
            return honest(seq, min(most, upto + scheduler.tables.block_size))

        scheduler.tables.publish = eager  # type: ignore[method-assign]

    assert caught(sabotage)


@pytest.mark.parametrize("device_drafts", [False, True])
def test_unchecked_draft_is_caught(device_drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._sample

    def gullible(self, row, drafts, count, sample, i, result: StepResult):  # type: ignore[no-untyped-def]
        if not drafts:
            return honest(self, row, drafts, count, sample, i, result)
        row.tokens += drafts
        row.computed = len(row.tokens)
        more = honest(self, row, [], 0, True, i, result)
        return drafts + more

    monkeypatch.setattr(HashExecutor, "_sample", gullible)
    assert caught(lambda scheduler: None, range(100), device_drafts=device_drafts)


def test_acceptance_of_one_draft_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._sample

    def generous(self, row, drafts, count, sample, i, result: StepResult):  # type: ignore[no-untyped-def]
        new = honest(self, row, drafts, count, sample, i, result)
        if 0 < len(new) <= len(drafts):  # the last one is not its draft
            row.tokens[-1] = new[-1] = drafts[len(new) - 1]
        return new

    monkeypatch.setattr(HashExecutor, "_sample", generous)
    assert caught(lambda scheduler: None, range(100), device_drafts=True)


def test_a_row_that_moves_on_by_one_token_less_than_it_says_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._sample

    def timid(self, row, drafts, count, sample, i, result: StepResult):  # type: ignore[no-untyped-def]
        new = honest(self, row, drafts, count, sample, i, result)
        if len(new) > 1:
            row.tokens.pop()
            row.computed -= 1
        return new

    monkeypatch.setattr(HashExecutor, "_sample", timid)
    assert caught(lambda scheduler: None, range(100), device_drafts=True)


def test_the_length_that_the_host_hopes_for_in_place_of_the_rows_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler._tell

        def knowing(seq: Sequence, position: int, plan: StepPlan) -> None:
            honest(seq, position, plan)
            if seq.pending:
                plan.jumps.append((seq.row, position))

        scheduler._tell = knowing  # type: ignore[method-assign]

    assert caught(sabotage, range(100), device_drafts=True)


def test_drafts_in_flight_without_blocks_are_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler.tables.grow

        def stingy(seq: Sequence, start: int, end: int, plan: StepPlan) -> bool:
            known = len(seq.tokens) + 1  # as if every draft in flight were wrong
            return honest(seq, start, max(start + 1, min(end, known)) if seq.pending else end, plan)

        scheduler.tables.grow = stingy  # type: ignore[method-assign]

    assert caught(sabotage, range(100), device_drafts=True)


def test_drafts_that_are_not_counted_as_in_flight_are_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler._grant

        def forgetful(seq: Sequence, budget: int, flight: Flight) -> int:
            before = len(flight.plan.rows)
            count = honest(seq, budget, flight)
            guesses = flight.plan.guesses.get(before, 0)
            seq.ahead, seq.pending = seq.ahead - guesses, seq.pending - guesses
            return count

        def take(plan: StepPlan, seqs: list[Sequence], result: StepResult) -> list[TokenDelta]:
            for i, seq in enumerate(seqs):
                seq.ahead += plan.guesses.get(i, 0)
                seq.pending += plan.guesses.get(i, 0)
            return honest_take(plan, seqs, result)

        honest_take = scheduler.outcome.take
        scheduler._grant = forgetful  # type: ignore[method-assign]
        scheduler.outcome.take = take  # type: ignore[method-assign]

    assert caught(sabotage, range(100), device_drafts=True)


def test_drafts_that_are_trees() -> None:
    """Of random shapes, in plans in flight, cut short, beside windows, prefixes, forks and failures."""
    accepted = moved = 0
    for seed in range(150):
        counters = run_story(seed, trees=True).counters
        accepted += counters.accepted
        moved += sum(counters.accepted_at[1:])
    assert accepted > 600 and moved > 100


def test_a_path_that_is_moved_one_place_too_far_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._move

    def hasty(self, row, root: int, path: list[int]) -> None:  # type: ignore[no-untyped-def]
        honest(self, row, root + (len(path) > 2), path[:-1])

    monkeypatch.setattr(HashExecutor, "_move", hasty)
    assert caught(lambda scheduler: None, range(100), trees=True)


def test_a_path_that_is_not_moved_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashExecutor, "_move", lambda self, row, root, path: None)
    assert caught(lambda scheduler: None, range(100), trees=True)


def test_a_cousin_in_place_of_an_ancestor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands at the same depth, so nothing but the text tells."""
    honest = Tree.line

    def cousins(self: Tree, node: int) -> list[int]:
        line, depths = honest(self, node), self.depths()
        for place in range(1, len(line) - 1):
            line[place] = max(j for j in range(line[place], node) if depths[j] == place)
        return line

    monkeypatch.setattr(Tree, "line", cousins)
    assert caught(lambda scheduler: None, range(200), enough=3, trees=True)


def test_a_tree_that_is_counted_as_so_many_tokens_in_a_row_is_caught() -> None:
    """All of its nodes hoped for: the host would be ahead of the end."""

    def sabotage(scheduler: Scheduler) -> None:
        scheduler.limits = dataclasses.replace(scheduler.limits, levels=0)

    assert caught(sabotage, range(100), trees=True)


def test_missing_copy_on_write_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        scheduler.tables._copy_on_write = lambda *args: None  # type: ignore[method-assign]

    assert caught(sabotage)


def test_token_ids_in_place_of_keys_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures have the same ids; what was computed for one must not serve the other."""
    monkeypatch.setattr(Sequence, "keys", property(lambda seq: seq.tokens))
    assert caught(lambda scheduler: None)


def test_a_prefix_taken_up_where_no_state_was_kept_is_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        honest = scheduler.tables.cache.usable
        scheduler.tables.cache.usable = lambda before, path, states=False: honest(before, path)  # type: ignore[method-assign]
        if scheduler.tables.stateful:
            scheduler.tables.snapshots.restore = lambda seq, node: None  # type: ignore[method-assign]

    assert caught(sabotage)


def test_states_of_a_failed_plan_that_are_found_later_are_caught() -> None:
    def sabotage(scheduler: Scheduler) -> None:
        if scheduler.tables.stateful:
            scheduler.tables.snapshots.failed = lambda kept: None  # type: ignore[method-assign]
            scheduler.tables.cache.retract = lambda nodes: None  # type: ignore[method-assign]

    assert caught(sabotage, range(1500), failures=True, enough=1)


def test_a_state_that_is_kept_where_the_host_hopes_to_be_is_caught() -> None:
    """How many drafts stood is known with the commit: a state beyond them is not there."""

    def sabotage(scheduler: Scheduler) -> None:
        if scheduler.tables.stateful:
            honest = scheduler.tables.snapshots.save

            def hopeful(seq: Sequence, position: int, end: int, plan: StepPlan) -> Kept | None:
                asked, before = seq.save_slot >= 0, len(plan.saves)
                kept = honest(seq, position, end, plan)
                if asked:
                    del plan.saves[before:]
                return kept

            scheduler.tables.snapshots.save = hopeful  # type: ignore[method-assign]

    assert caught(sabotage, range(200), device_drafts=True)


def test_states_behind_a_grant_alone_are_caught_where_drafts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = HashExecutor._recur

    def last_only(self, row, tokens: list[int], count: int, kept: int) -> None:  # type: ignore[no-untyped-def]
        honest(self, row, tokens, count, 1)

    monkeypatch.setattr(HashExecutor, "_recur", last_only)
    assert caught(lambda scheduler: None, range(100), device_drafts=True)


def test_states_restored_after_their_slots_were_written_again_are_caught() -> None:
    """A plan's saves come behind its restores, and a save is not found before the next plan."""

    def sabotage(scheduler: Scheduler) -> None:
        snapshots = scheduler.tables.snapshots
        if scheduler.tables.stateful:
            honest = snapshots.save

            def early(seq: Sequence, position: int, end: int, plan: StepPlan) -> Kept | None:
                kept = honest(seq, position, end, plan)
                if kept is not None:
                    snapshots.planned([kept])
                return None

            snapshots.save = early  # type: ignore[method-assign]

    assert caught(sabotage, enough=1)


def test_dropped_beams_are_not_kept() -> None:
    """A search over many steps holds as many sequences as it has beams, and still ends once per output."""
    beams, steps = 4, 120
    model = HashModel(stop_every=1 << 40)
    tables = BlockTables([GroupLayout(0)], [400], 4)
    scheduler = Scheduler(Limits(8, max_step_tokens=64), tables, make_policy("fcfs"), NoDrafter())
    search = BeamSearch(beams, 1.0, "never", frozenset(), steps)
    request = Request(id="r", prompt_ids=[1, 2, 3], params=SamplingParams(), seed=3)
    group = SequenceGroup(request, search, RowSampling(num_candidates=search.width), 3 + steps, num_outputs=beams)
    scheduler.add(group)
    executor, ends = HashExecutor(model, [0], [400], 4), []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        ends += [delta for delta in scheduler.commit(executor.submit(plan).wait()) if delta.finish]
        assert 1 <= len(group.sequences) <= beams
        assert len({seq.index for seq in group.sequences}) == len(group.sequences)
    assert [delta.index for delta in ends] == list(range(beams))
    assert all(len(delta.tokens) == steps for delta in ends) and not tables.pools[0].held


def test_beams_say_a_text_once() -> None:
    """Two end tokens behind the same tokens are one answer: the likelier one; others take the place."""
    search = BeamSearch(beams=2, end_ids=frozenset({1, 2}), max_new=8)
    request = Request(id="x", prompt_ids=[9], params=SamplingParams(), seed=0)
    group = SequenceGroup(request, search, RowSampling(), 10**6)
    group.sequences = [Sequence(0, 0, group, [9], 1)]
    (_, children), *_ = search.advance(group, {0: [(1, -0.1), (2, -0.2), (5, -3.0), (6, -4.0)]})
    assert [h.tokens for h in search.done] == [[1]] and [token for token, _ in children] == [5, 6]
    group.sequences = [Sequence(1, 0, group, [9, 5], 1, score=-3.0), Sequence(2, 0, group, [9, 6], 1, score=-4.0)]
    search.advance(group, {1: [(2, -0.1), (1, -0.2)], 2: [(1, -0.1), (2, -0.3)]})
    assert [h.tokens for h in search.done] == [[1], [5, 2]]


def test_beams_that_all_end_at_once_are_all_answers() -> None:
    """Where a grammar lets none go on, or no token is left, ends behind the best places fill those that are empty."""
    never = -1e31
    for most, first, second in (
        (8, [(1, -0.1), (2, -0.2), (5, never), (6, never)], [(1, -0.1), (2, -3.0), (5, never)]),
        (2, [(1, -0.1), (2, -0.2), (5, -9.0), (6, -9.5)], [(1, -0.1), (2, -3.0), (5, -9.0)]),
    ):
        search = BeamSearch(beams=2, end_ids=frozenset({1, 2}), max_new=most)
        request = Request(id="x", prompt_ids=[9], params=SamplingParams(), seed=0)
        group = SequenceGroup(request, search, RowSampling(), 10**6)
        group.sequences = [Sequence(1, 0, group, [9, 5], 1, score=-0.1), Sequence(2, 0, group, [9, 6], 1, score=-4.0)]
        search.advance(group, {1: first, 2: second})
        assert [h.tokens for h in search.done] == [[5, 1], [6, 1]]
