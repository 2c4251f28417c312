"""Several ranks behind one engine: the bytes of one process in every mode, and what follows when a rank is lost.

TOKENMILL_RELIABILITY=1 adds four ranks, more formats, and many kills and stops."""

from __future__ import annotations

import os
import signal
import time

import pytest
from engines import check_nothing_left, exact, greedy, open_llm, run

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import EngineDeadError, ParameterError

pytest.importorskip("tokenmill.parallel.shared", reason="the native kernels were not built")
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
        counters = llm.engine.scheduler.counters
        assert counters.preemptions and counters.accepted and counters.cached_tokens
        check_nothing_left(llm.engine)


def test_two_ranks_give_the_bytes_of_one(tiny):
    compare(tiny, 2, dtype="bfloat16")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """A small Qwen3-MoE with a tokenizer."""
    from family_cases import CASES

    folder = tmp_path_factory.mktemp("mixture")
    CASES["qwen3-moe"].make(folder)
    return folder


@pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "fp8"])
def test_every_format_gives_the_bytes_of_one(form, ranks, tiny):
    narrow = form not in ("float32", "bfloat16")
    compare(tiny, ranks, dtype="float32" if narrow else form, quantization=form if narrow else None)


def lose(llm, rank: int, how: int) -> float:
    """Send a signal to a rank in the middle of its work; -> seconds until the engine said so."""
    params = [greedy(400) for _ in range(3)]
    for i, each in enumerate(params):
        from tokenmill.engine.prompts import make_request

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


def test_every_rank_does_what_it_is_told_behind_the_plans_before(tiny):
    """On a CPU plans run when they are waited for: what is told after one must not come before it on some rank."""
    from tokenmill.engine.prompts import make_request

    def operations() -> list[int]:
        said = llm.engine.executor.control_all({"what": "counters"})
        return [sum(op["calls"] for op in each["kernels"].values()) for each in said]

    with open_llm(tiny, tensor_parallel_size=2, kernels="auto", enable_lora=True) as llm:
        llm.engine.add(make_request("r", None, [3, 4, 5], greedy(3)))
        before = operations()
        assert llm.engine.submit()
        answers = llm.engine.executor.control_all({"what": "adapter", "op": "forget"})
        assert answers == [{}, {}] and len(llm.engine.flying) == 1
        assert all(new > old for new, old in zip(operations(), before, strict=True))
        while llm.engine.has_work:
            llm.engine.step()


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_rank_ends_its_engine(rank, how, tiny):
    with open_llm(tiny, tensor_parallel_size=2, kernels="auto", max_model_len=512) as llm:
        lose(llm, rank, how)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_ranks_than_there_is_to_share_out_start_no_process(name, monkeypatch):
    started = []
    monkeypatch.setattr("tokenmill.engine.build.start_ranks", started.append)
    with pytest.raises(ParameterError, match=rf"--{name.replace('_', '-')} 64: this model has only \d+ "):
        LLM(model="demo", **{name: 64})
    assert not started
