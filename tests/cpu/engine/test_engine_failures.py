"""Steps that fail, processors that raise, processes that die, users who interrupt: every request ends, once."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, follow, greedy, open_llm, run

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import EngineDeadError, UserError
from tokenmill.engine.interfaces.prompts import make_request

PROMPTS = [[t % 250 + 3 for t in range(s, s + n)] for s, n in ((1, 20), (50, 3), (90, 45), (130, 11), (7, 30), (60, 9))]
PARAMS = [greedy(15, logprobs=1), SamplingParams(seed=1, max_tokens=12), greedy(20), greedy(5), greedy(9), greedy(30)]


@pytest.fixture(scope="module")
def wanted(tiny):
    with open_llm(tiny) as llm:
        return [exact(o) for o in run(llm, PROMPTS, PARAMS)]


def break_forward(llm, guilty):
    """Let the model raise when `guilty(tokens)`; -> the list of failures."""
    model = llm.engine.executor.runner.model
    forward, failures = model.forward, []

    def broken(tokens, ctx):
        if guilty(tokens.tolist()):
            failures.append(len(ctx.spans))
            raise RuntimeError("out of luck")
        return forward(tokens, ctx)

    model.forward = broken
    return failures


@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"depth": 2, "speculative_config": {"method": "ngram"}}])
@pytest.mark.parametrize("when", [{0}, {3}, {1, 2, 9}])
def test_a_step_that_fails_once_is_done_again(when, options, opened, wanted):
    llm = opened(**options)
    calls = iter(range(10**6))
    failures = break_forward(llm, lambda tokens: next(calls) in when)
    assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted
    assert len(failures) == len(when)
    check_nothing_left(llm.engine)


def test_the_log_says_why_once(opened, wanted, caplog):
    llm = opened()
    calls = iter(range(10**6))
    break_forward(llm, lambda tokens: next(calls) in {0, 3, 5})
    assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted
    assert [r.getMessage() for r in caplog.records if r.name == "tokenmill.engine"] == [
        "a step failed (RuntimeError: out of luck); its sequences are computed again, fewer at once"
    ]


def test_a_lone_step_that_fails_once_is_done_again(opened, wanted):
    llm = opened()
    calls = iter(range(10**6))
    break_forward(llm, lambda tokens: next(calls) in {0, 4})
    assert exact(run(llm, PROMPTS[:1], PARAMS[0])[0]) == wanted[0]


@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"long_prefill_token_threshold": 7, "num_blocks": 33}])
def test_only_the_guilty_sequence_ends(options, opened, wanted):
    llm = opened(**options)
    failures = break_forward(llm, lambda tokens: 1 in tokens)
    outputs = run(llm, [*PROMPTS[:3], [5, 6, 1, 9], *PROMPTS[3:]], [*PARAMS[:3], greedy(8), *PARAMS[3:]])
    bad = outputs.pop(3).outputs[0]
    assert bad.finish_reason == "error" and "out of luck" in bad.stop_reason and "cannot be computed" in bad.stop_reason
    assert [exact(o) for o in outputs] == wanted
    assert failures[-1] == 1, "it must have failed alone"
    check_nothing_left(llm.engine)


def test_two_guilty_ones_among_many(opened, tiny):
    prompts = [[t % 200 + 9 for t in range(i, i + 8)] for i in range(30)]
    want = [exact(o) for o in run(opened(max_num_seqs=32), prompts, greedy(12))]
    llm = opened(max_num_seqs=32)
    failures = break_forward(llm, lambda tokens: 1 in tokens or 2 in tokens)
    mixed = [*prompts[:20], [1, 50], *prompts[20:], [60, 2]]
    outputs = run(llm, mixed, greedy(12))
    assert [o.outputs[0].finish_reason for o in (outputs.pop(20), outputs.pop(30))] == ["error", "error"]
    assert [exact(o) for o in outputs] == want
    assert len(failures) < 60
    check_nothing_left(llm.engine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 2},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "ngram"}, "depth": 2},
    ],
)
def test_a_raising_processor_ends_its_request_only(options, opened, wanted):
    def raising(said, logits):
        if len(said) == 4:
            raise KeyError("my own mistake")
        return logits

    llm = opened(**options)
    params = [*PARAMS, greedy(9, logits_processors=[raising]), greedy(9, logits_processors=[lambda said, x: x[:3]])]
    outputs = run(llm, [*PROMPTS, [9, 8, 7], [9, 8, 7]], params)
    assert [exact(o) for o in outputs[:-2]] == wanted
    assert "my own mistake" in outputs[-2].outputs[0].stop_reason
    assert len(outputs[-2].outputs[0].token_ids) == 4
    assert "tensor of shape" in outputs[-1].outputs[0].stop_reason
    check_nothing_left(llm.engine)


def test_processors_see_every_step_and_decide(opened):
    """In plain decoding as in drafts: called once per token with all that was said, and obeyed."""
    drafts = {"speculative_config": {"method": "ngram"}}
    for options in ({}, {"depth": 2}, drafts, {**drafts, "depth": 2}):
        seen = []

        def only(prompt, said, logits):
            seen.append((prompt, said))  # noqa: B023
            out = logits - 1e9
            out[(3 * len(said) + len(prompt)) % 50 + 10] += 2e9
            return out

        llm = opened(**options)
        (output,) = run(llm, [[4, 4, 4]], greedy(40, logits_processors=[only]))
        assert output.outputs[0].token_ids == [(3 * i + 3) % 50 + 10 for i in range(40)]
        for n in range(40):
            assert ([4, 4, 4], output.outputs[0].token_ids[:n]) in seen


def test_an_interrupted_run_leaves_nothing_behind(opened, wanted):
    for depth, lazy in ((1, True), (2, True), (2, False)):  # not lazy: as on a GPU, where submitting computes
        llm = opened(depth=depth)
        llm.engine.executor.lazy = lazy
        model, calls = llm.engine.executor.runner.model, iter(range(10**6))
        forward = model.forward

        def interrupted(tokens, ctx):
            if next(calls) == 5:  # noqa: B023
                raise KeyboardInterrupt
            return forward(tokens, ctx)  # noqa: B023

        model.forward = interrupted
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS, PARAMS)
        check_nothing_left(llm.engine)
        assert [exact(o) for o in run(llm, PROMPTS, PARAMS)] == wanted


def test_a_dead_process_ends_the_run(opened):
    llm = opened(executor="process")
    for request in (make_request("a", None, [1, 2, 3], greedy(400)), make_request("b", None, [4], greedy(400))):
        llm.engine.add(request)
    for _ in range(5):
        llm.engine.step()
    for name in "ab":
        llm.engine.abort(name)
    pid = llm.engine.executor.process.pid
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    for _ in range(2):  # and the second call says so as well
        with pytest.raises(EngineDeadError, match="gone") as caught:
            run(llm, PROMPTS, PARAMS)
        assert caught.value.__context__ is None or not isinstance(caught.value.__context__, EngineDeadError)
    assert time.monotonic() - start < 60


async def test_a_dead_process_ends_every_stream(tiny):
    llm = AsyncLLM(str(tiny), executor="process", dtype="float32", kernels="reference", max_model_len=512)
    started = asyncio.Event()

    async def one(i):
        last = None
        async for output in llm.generate({"prompt_token_ids": [i + 3]}, greedy(500)):
            last = output
            started.set()
        return last

    tasks = [asyncio.create_task(one(i)) for i in range(5)]
    await started.wait()
    os.kill(llm.service.engine.executor.process.pid, signal.SIGKILL)
    for output in await asyncio.wait_for(asyncio.gather(*tasks), 120):
        assert output.finished and output.outputs[0].finish_reason == "error"
        assert "gone" in output.outputs[0].stop_reason
    with pytest.raises(EngineDeadError):
        async for _ in llm.generate({"prompt_token_ids": [1]}):
            pass
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(llm.service.call(lambda: 1), 120)
    llm.close()
    assert not llm.service.callers or all(c.left for c in llm.service.callers.values())


def test_a_request_id_in_use_is_refused(opened):
    llm = opened()
    request = make_request("a", None, [1, 2], greedy(3))
    follow(llm, [request], None)
    follow(llm, [request], None)  # free again


async def test_a_request_id_in_use_is_refused_in_streams(tiny):
    llm = AsyncLLM(str(tiny), dtype="float32", kernels="reference", max_model_len=512)
    first = llm.generate([3, 4], greedy(200), "same")
    await anext(first)
    with pytest.raises(UserError, match="in use"):
        await anext(llm.generate([3, 4], greedy(3), "same"))
    await first.aclose()
    llm.close()
