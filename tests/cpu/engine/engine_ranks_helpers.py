"""What test_engine_ranks.py and other tests share."""

from __future__ import annotations

import os
import time

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run

from tokenmill import SamplingParams
from tokenmill.core.errors import EngineDeadError

pytest.importorskip("tokenmill.parallel.shared_memory", reason="the native kernels were not built")
FULL = os.environ.get("TOKENMILL_RELIABILITY") == "1"
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ROUGH = {"long_prefill_token_threshold": 7, "num_blocks": 14, "speculative_config": NGRAM}
"""Chunks, preemption, drafts; prompts that begin alike bring prefix hits."""


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    shared = [7, 8, 9, 10] * 6
    prompts = [[*shared, 3], [*shared, 5, 6], [1, 2], [40, 41, 42] * 9, [9]]
    params = [
        greedy(40, logprobs=3, prompt_logprobs=1),
        greedy(40, logprobs=3),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=2, n=2),
        greedy(40, repetition_penalty=1.2, logprobs=2),
        SamplingParams(temperature=0.7, seed=5, max_tokens=40, structured_outputs={"json": SCHEMA}),
    ]
    return prompts, params


def compare(folder, ranks: int, **options) -> None:
    """One process and several ranks, plain and roughly, with sleep in between."""
    prompts, params = requests()
    options = {"kernels": "auto", "max_model_len": 160, **options}
    with open_llm(folder, **{**options, "pipeline_parallel_size": 1}) as llm:
        wanted = [exact(output) for output in run(llm, prompts, params)]
    with open_llm(folder, tensor_parallel_size=ranks, enable_sleep_mode=True, **options, **ROUGH) as llm:
        for level in (1, 2, 1):
            assert [exact(output) for output in run(llm, prompts, params)] == wanted
            llm.sleep(level)
            llm.wake_up()
        for _ in range(2):  # the second time beginnings are in the cache
            assert [exact(output) for output in run(llm, prompts, params)] == wanted
        counters = llm.engine.scheduler.counters
        assert counters.preemptions and counters.accepted and counters.cached_tokens
        check_nothing_left(llm.engine)


def lose(llm, rank: int, how: int) -> float:
    """Send a signal to a rank in the middle of its work; -> seconds until the engine said so."""
    params = [greedy(400) for _ in range(3)]
    for i, each in enumerate(params):
        from tokenmill.engine.interfaces.prompts import make_request

        llm.engine.add(make_request(f"r{i}", None, [i + 1, 2], each))
    for _ in range(6):
        llm.engine.step()
    os.kill(llm.engine.executor.ranks[rank].process.pid, how)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"gone|hangs"):
        while True:
            llm.engine.step()
    assert all(each.process.poll() is not None for each in llm.engine.executor.ranks), "a rank was left behind"
    return time.monotonic() - began
