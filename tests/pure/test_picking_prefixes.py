"""Four engines behind one picker, with real schedulers and caches: they hit as often as one does, and work alike."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest

from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.running.picking import EnginePicker, asked_of
from tokenmill.engine.steps.admission import Admission
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.cache_events import MARK_BYTES, CacheEvents, prompt_marks
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.speculate.none import NoDrafter

BLOCK, CHUNK = 16, 512


class Part:
    """One engine whose every step takes as long as another's: a token for whoever samples."""

    def __init__(self, blocks: int) -> None:
        self.tables = BlockTables([GroupLayout(0)], [blocks], BLOCK)
        self.tables.cache.listener = CacheEvents()
        limits = Limits(max_rows=64, max_step_tokens=CHUNK)
        self.scheduler = Scheduler(limits, self.tables, make_policy("fcfs"), NoDrafter())
        self.admission = Admission(vocab_size=1000, max_model_len=4096, max_rows=64, max_waiting=1000)

    def add(self, request: Request) -> None:
        self.scheduler.add(self.admission.check(request, len(self.scheduler.roster.groups)))

    def step(self, failure: str | None = None) -> list[TokenDelta]:
        plan: StepPlan | None = self.scheduler.plan()
        if plan is None:
            return []
        tokens = [[1] if sample else [] for sample in plan.samples]
        return self.scheduler.commit(StepResult(plan_id=plan.id, tokens=tokens, failure=failure))

    @property
    def work(self) -> int:
        """Tokens computed."""
        counters = self.scheduler.counters
        return counters.prompt_tokens + counters.output_tokens


@dataclass
class Figures:
    hit_rate: float
    work: list[int]
    requests: list[int]


def _request(name: str, ids: list[int], params: SamplingParams) -> Request:
    return make_request(name, None, ids, params, context=4096)


def workload(seed: int, groups: int = 16, shared: int = 256, count: int = 200) -> list[Request]:
    """Requests whose prompts begin with one of a few texts, in any order."""
    rng = random.Random(seed)
    texts = [[rng.randrange(1000) for _ in range(shared)] for _ in range(groups)]
    found = []
    for i in range(count):
        own = [rng.randrange(1000) for _ in range(rng.randint(16, 96))]
        params = SamplingParams(max_tokens=rng.randint(8, 48), ignore_eos=True, temperature=0)
        found.append(_request(f"q{i}", [*texts[rng.randrange(groups)], *own], params))
    return found


def run(requests: list[Request], engines: int, most_open: int, blocks: int = 4000) -> Figures:
    """As a server does it: so many are open at a time."""
    picker, parts = EnginePicker(BLOCK), [Part(blocks) for _ in range(engines)]
    waiting, owners = deque(requests), dict[str, int]()
    counted = [0] * engines
    while waiting or owners:
        while waiting and len(owners) < most_open:
            request = waiting.popleft()
            number = owners[request.id] = picker.pick_engine(range(engines), asked_of(request))
            counted[number] += 1
            parts[number].add(request)
        for number, part in enumerate(parts):
            deltas = part.step()
            picker.cached(number, *part.tables.cache.listener.take())
            for delta in deltas:
                picker.computed(number, delta.request_id, 1, 0)
                picker.said(number, delta.request_id, len(delta.tokens))
                if delta.finish is not None:
                    picker.done(number, delta.request_id)
                    del owners[delta.request_id]
    total = sum(len(request.prompt_ids) for request in requests)
    hits = total - sum(part.scheduler.counters.prompt_tokens for part in parts)
    for number, part in enumerate(parts):  # what was told is what lies there
        load = picker._load(number)
        assert not load.open and not load.coming and load.cost == 0
        assert len(load.held) == len(part.tables.pools[0].cached)
    return Figures(hits / total, [part.work for part in parts], counted)


def compare(seed: int, most_open: int) -> tuple[float, float]:
    """Points of the hit rate that four engines lose, and how far the busiest or idlest of them is from even."""
    requests = workload(seed)
    one, four = run(requests, 1, most_open), run(requests, 4, most_open)
    even = sum(four.work) / 4
    return one.hit_rate - four.hit_rate, max(abs(work / even - 1) for work in four.work)


@pytest.mark.parametrize("most_open", [16, 32, 64])
def test_four_engines_hit_nearly_as_often_as_one_and_work_alike(most_open: int) -> None:
    """In the mean over workloads: a single one may have more of one text than of others."""
    lost, uneven = zip(*(compare(seed, most_open) for seed in range(1, 5)), strict=True)
    assert sum(lost) / len(lost) < 0.02 and sum(uneven) / len(uneven) < 0.1
    assert max(lost) < 0.03 and max(uneven) < 0.15


def test_a_cache_that_is_too_small_is_known_to_be() -> None:
    """Of 16 texts four engines with room for five each keep a share each; one engine with room for five keeps few."""
    requests = workload(3)
    one, four = run(requests, 1, 8, blocks=220), run(requests, 4, 8, blocks=220)
    assert four.hit_rate > one.hit_rate + 0.1


def test_only_what_is_committed_is_told() -> None:
    """Not what is planned, and not what a failed step would have written; what is evicted is taken back."""
    part = Part(24)
    (request,) = workload(1, count=1)
    part.add(request)
    listener = part.tables.cache.listener
    plan = part.scheduler.plan()
    assert plan is not None and listener.take() == (b"", b""), "nothing has been computed"
    part.scheduler.commit(StepResult(plan_id=plan.id, tokens=[[]], failure="lost"))
    assert listener.take() == (b"", b""), "it never was"
    while part.scheduler.has_work:
        part.step()
    published, gone = listener.take()
    assert published.startswith(marks := b"".join(prompt_marks(request.prompt_ids, "", BLOCK, 4096))) and not gone
    part.add(workload(2, count=1)[0])
    while part.scheduler.has_work:
        part.step()
    published, gone = listener.take()
    assert published and gone and not set(cut(published)) & set(cut(gone)) and set(cut(gone)) & set(cut(marks))


def cut(joined: bytes) -> list[bytes]:
    return [joined[at : at + MARK_BYTES] for at in range(0, len(joined), MARK_BYTES)]
