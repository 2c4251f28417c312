"""A request that comes with what it has said goes on exactly as an undisturbed run did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.running.build import Built, build_engine

PROMPT = list(range(40, 75))
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "three samples": {"temperature": 1.0, "n": 3},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "fewest tokens": {"temperature": 0.0, "min_tokens": 20, "stop_token_ids": list(range(0, 300, 3))},
    "prompt scores": {"temperature": 0.0, "prompt_logprobs": 1},
    "choice": {"temperature": 1.0, "structured_outputs": {"choice": ["the long first answer", "the long second one"]}},
}


@pytest.fixture(scope="module", params=["plain", "drafts"])
def built(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Built]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3} if request.param == "drafts" else None
    made = build_engine(
        make_config(
            {}, model=str(tiny), kv_cache_memory_bytes=8 << 20, speculative_config=drafts, max_num_batched_tokens=64
        )
    )
    yield made
    made.engine.close()


def run(built: Built, request: Request) -> tuple[dict[int, list[int]], dict[int, list[float]], dict[int, str]]:
    """Tokens, log-probabilities of the chosen ones, and how each output ended."""
    ids: dict[int, list[int]] = {}
    scores: dict[int, list[float]] = {}
    ends: dict[int, str] = {}
    built.engine.add(request)
    while built.engine.has_work:
        for delta in built.engine.step():
            ids.setdefault(delta.index, []).extend(delta.tokens)
            scores.setdefault(delta.index, []).extend(row.logprobs[0] for row in delta.logprobs or ())
            if delta.finish is not None:
                assert delta.index not in ends
                ends[delta.index] = delta.finish
    return ids, scores, ends


@pytest.mark.parametrize("name", CASES)
def test_replay_is_exact(built: Built, name: str) -> None:
    given = {"max_tokens": 30, "logprobs": None if name == "choice" else 1, **CASES[name]}
    params = SamplingParams(**given)
    fresh = Request(id="calm", prompt_ids=PROMPT, params=params, seed=11)
    ids, scores, ends = run(built, fresh)
    assert len(ids) == params.n
    for cut in (1, 2, 7, 16, 29):
        emitted = [ids[i][: min(cut + 3 * i, len(ids[i]))] for i in range(params.n)]
        ended = [i for i in range(params.n) if len(emitted[i]) == len(ids[i])]
        if len(ended) == params.n:
            continue
        built.engine.scheduler.tables.cache.clear()  # a new engine knows no prefix
        again = Request(id=f"cut {cut}", prompt_ids=PROMPT, params=params, seed=11, emitted=emitted, ended=ended)
        more, more_scores, more_ends = run(built, again)
        for i in range(params.n):
            if i in ended:
                assert i not in more_ends
                continue
            assert emitted[i] + more[i] == ids[i]
            assert more_scores[i] == scores[i][len(scores[i]) - len(more_scores[i]) :]
            assert more_ends[i] == ends[i]
    assert built.engine.scheduler.tables.usage() == 0


def test_replay_while_others_run_and_memory_is_short(tiny: Path) -> None:
    made = build_engine(make_config({}, model=str(tiny), num_gpu_blocks_override=20, max_model_len=128))
    params = SamplingParams(temperature=1.0, max_tokens=40)
    calm = {}
    for i in range(6):
        calm[i] = run(made, Request(id=f"calm{i}", prompt_ids=PROMPT[i:], params=params, seed=i))[0][0]
    for i in range(6):
        said, prompt = [calm[i][: 5 * i]], PROMPT[i:]
        made.engine.add(
            Request(id=f"again{i}", prompt_ids=prompt, params=params, seed=i, emitted=said, reached=len(prompt))
        )
    found = {f"again{i}": calm[i][: 5 * i] for i in range(6)}
    while made.engine.has_work:
        for delta in made.engine.step():
            found[delta.request_id] += delta.tokens
    assert [found[f"again{i}"] for i in range(6)] == [calm[i] for i in range(6)]
    counters = made.engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prompt_tokens + counters.cached_tokens == sum(len(PROMPT) - i for i in range(6)), "counted once"
    made.engine.close()
