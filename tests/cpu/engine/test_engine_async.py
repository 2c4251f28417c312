"""AsyncLLM: streams, leaving, aborting and closing at any moment."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run

from tokenmill import AsyncLLM, PoolingParams, SamplingParams
from tokenmill.core.errors import EngineDeadError, UserError


@pytest.fixture
async def engine(tiny):
    llm = AsyncLLM(str(tiny), dtype="float32", kernels="reference", max_model_len=512, max_num_seqs=6, num_blocks=70)
    yield llm
    llm.close()


async def until(condition):
    """Wait for something to become true, however long a busy machine takes."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def nothing_left(llm):
    """Soon nothing of any request is left."""
    service = llm.service
    await until(lambda: not service.callers and not service.deliveries.asked and not service.engine.has_work)
    await service.call(lambda: None)
    assert not service.callers and not service.deliveries.asked and not service.deliveries.stopped
    await service.call(lambda: check_nothing_left(service.engine))
    assert service.dead is None


async def collect(stream):
    outputs = [output async for output in stream]
    return outputs[-1], len(outputs)


async def test_streams_grow_and_equal_offline(engine, tiny):
    prompts = [[5, 6, 7], [9] * 40, [100, 3], [44]]
    params = [greedy(30, logprobs=1), SamplingParams(n=3, seed=2, max_tokens=9), greedy(6, prompt_logprobs=1),
              SamplingParams(seed=3, max_tokens=60, stop=["e", "a"])]  # fmt: skip
    with open_llm(tiny) as llm:
        wanted = [exact(o) for o in run(llm, prompts, params)]
    found = await asyncio.gather(*(collect(engine.generate(p, s)) for p, s in zip(prompts, params, strict=True)))
    assert [exact(o) for o, _ in found] == wanted
    assert found[0][1] == 30 and all(o.finished for o, _ in found)
    await nothing_left(engine)


async def test_what_a_stream_has_given_does_not_change(engine):
    outputs = [output async for output in engine.generate([5, 6, 7], greedy(12, logprobs=1))]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 12
    assert [len(output.outputs[0].logprobs) for output in outputs] == lengths
    assert [output.outputs[0].finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)


async def test_leaving_the_loop_aborts(engine):
    async for output in engine.generate([1, 2, 3], greedy(500)):
        if len(output.outputs[0].token_ids) >= 3:
            break
    await nothing_left(engine)
    steps = engine.service.engine.scheduler.counters.steps
    await asyncio.sleep(0.1)  # nothing may happen meanwhile
    assert engine.service.engine.scheduler.counters.steps == steps


async def test_abort_by_id_ends_the_stream(engine):
    last = None
    async for output in engine.generate([1, 2, 3], SamplingParams(n=2, max_tokens=500, ignore_eos=True), "me"):
        last = output
        if len(output.outputs[0].token_ids) == 4:
            await engine.abort("me")
    assert [o.finish_reason for o in last.outputs] == ["abort", "abort"] and last.finished
    await engine.abort("me")
    await engine.abort("never heard of")
    await nothing_left(engine)


async def test_a_cancelled_request_that_waits_leaves_the_queue(engine):
    busy = [asyncio.create_task(collect(engine.generate([i + 1], greedy(150)))) for i in range(6)]
    await until(lambda: len(engine.service.callers) == 6)
    waiting = [asyncio.create_task(collect(engine.generate([i + 1] * 3, greedy(10)))) for i in range(20)]
    await until(lambda: len(engine.service.callers) > 20 or busy[0].done())
    for task in waiting[:19]:
        task.cancel()
    output, _ = await waiting[19]
    assert len(output.outputs[0].token_ids) == 10
    assert all(len(o.outputs[0].token_ids) == 150 for o, _ in await asyncio.gather(*busy))
    await nothing_left(engine)


async def test_random_aborts_leave_nothing_behind(engine):
    rng = random.Random(2)
    ends = []

    async def one(i):
        prompt = [rng.randrange(259) for _ in range(rng.randint(1, 50))]
        kind, patience = rng.random(), rng.randint(0, 4)
        params = SamplingParams(
            max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 3]), stop=rng.choice([None, ["e"]]),
            use_beam_search=False, seed=i,
        )  # fmt: skip
        if rng.random() < 0.1:
            params = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=6)
        await asyncio.sleep(rng.random() * 3)
        count = 0
        async for output in engine.generate(prompt, params, f"r{i}"):
            count += 1
            if count > patience and kind < 0.4:
                break
            if count > patience and kind < 0.7:
                await engine.abort(f"r{i}")
            if output.finished:
                ends.extend(o.finish_reason for o in output.outputs)

    tasks = [asyncio.create_task(one(i)) for i in range(400)]
    for _ in range(40):
        await asyncio.sleep(0.05)
        rng.choice(tasks).cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 600)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    assert {"abort", "length"} <= set(ends) and "error" not in ends
    await nothing_left(engine)


async def test_close_while_running_ends_every_stream(tiny):
    llm = AsyncLLM(str(tiny), dtype="float32", kernels="reference", max_model_len=512)
    tasks = [asyncio.create_task(collect(llm.generate([i + 1], greedy(500)))) for i in range(4)]
    await until(lambda: len(llm.service.callers) == 4)
    await asyncio.to_thread(llm.close)
    for output, _ in await asyncio.wait_for(asyncio.gather(*tasks), 120):
        assert output.finished and output.outputs[0].finish_reason == "error"
        assert "closed" in output.outputs[0].stop_reason
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(llm.generate([1]))
    llm.close()


async def test_bad_requests_raise_and_cost_nothing(engine):
    for prompt, params in (("", None), ([], None), ([999], None), ("x", {"n": 1}), (7, None), ("x" * 9999, None)):
        with pytest.raises(UserError):
            await collect(engine.generate(prompt, params))
    with pytest.raises(UserError):
        await engine.embed("x", pooling="best")
    await nothing_left(engine)


async def test_embeddings_and_chat(engine, tiny):
    with open_llm(tiny) as llm:
        wanted = llm.embed(["The mill", "grinds"], use_tqdm=False, pooling="mean")
        answer = llm.chat([{"role": "user", "content": "hello"}], greedy(5), use_tqdm=False)[0]
    found = await asyncio.gather(*(engine.embed(p, pooling="mean") for p in ("The mill", "grinds")))
    assert [o.embedding for o in found] == [o.embedding for o in wanted]
    more = {"chat_template_content_format": "auto", "mm_processor_kwargs": None, "tools": None}
    output, _ = await collect(engine.chat([{"role": "user", "content": "hello"}], greedy(5), **more))
    assert exact(output) == exact(answer)
    await nothing_left(engine)


async def test_encode_gives_the_vector_of_embed(engine):
    vector = (await engine.embed([5, 6, 7])).outputs.embedding
    params = PoolingParams(dimensions=8, truncate_prompt_tokens=3)
    whole, short = [
        [output async for output in engine.encode(prompt, given, name)]
        for prompt, given, name in (([5, 6, 7], None, "one"), ([9, 5, 6, 7], params, "two"))
    ]
    assert [len(whole), whole[0].request_id, whole[0].finished] == [1, "one", True]
    assert whole[0].outputs.data.tolist() == pytest.approx(vector)
    length = sum(x * x for x in vector[:8]) ** 0.5
    assert short[0].prompt_token_ids == [5, 6, 7]
    assert short[0].outputs.data.tolist() == pytest.approx([x / length for x in vector[:8]])
    for bad, name in ((PoolingParams(task="classify"), "task"), ({"dimensions": 8}, "pooling_params")):
        with pytest.raises(UserError, match=name):
            await anext(engine.encode([5, 6, 7], bad))
    await nothing_left(engine)


async def test_the_prefix_cache_is_forgotten_while_requests_run(engine):
    """With reset_running_requests, they are computed again and say the same."""
    counters = engine.service.engine.scheduler.counters
    wanted = exact((await collect(engine.generate([9] * 40, greedy(200))))[0])
    for again in (False, True):
        stream = engine.generate([9] * 40, greedy(200))
        first = await anext(stream)
        assert not first.outputs[0].finished()
        assert await engine.reset_prefix_cache(reset_running_requests=again)
        last, _ = await collect(stream)
        assert exact(last) == wanted and last.outputs[0].finished()
        assert counters.preemptions == again
    with pytest.raises(UserError, match="reset_connector"):
        await engine.reset_prefix_cache(reset_connector=True)
    await nothing_left(engine)


async def test_several_requests_are_aborted_at_once(engine):
    streams = [engine.generate([5, 6], greedy(500), name) for name in "abc"]
    for stream in streams:
        await anext(stream)
    await engine.abort(["a", "c", "unknown"])
    found = [(await collect(streams[i]))[0].outputs[0].finish_reason for i in (0, 2)]
    await engine.abort("b")
    assert [*found, (await collect(streams[1]))[0].outputs[0].finish_reason] == ["abort"] * 3
    await nothing_left(engine)


async def test_what_vllm_has_beside_is_done_or_refused_by_name(tiny):
    llm = AsyncLLM(str(tiny), dtype="float32", kernels="reference", max_model_len=64, num_blocks=20)
    last, _ = await collect(llm.generate([5, 6], greedy(2), "a", trace_headers=None, data_parallel_rank=None))
    assert last.finished and llm.is_running and not llm.errored and not llm.is_stopped
    assert await llm.reset_mm_cache() is None
    for name, value in (("trace_headers", {"a": "b"}), ("data_parallel_rank", 0), ("colour", None)):
        with pytest.raises(UserError, match=name):
            await anext(llm.generate([5, 6], greedy(2), **{name: value}))
    for name, instead in (("pin_lora", "max_loras"), ("pause_generation", "sleep"), ("collective_rpc", "LLM has it")):
        with pytest.raises(AttributeError, match=f"AsyncLLM has no '{name}': .*{instead}"):
            getattr(llm, name)
    llm.close()
    assert llm.errored and llm.is_stopped and "closed" in str(llm.dead_error)
    with pytest.raises(EngineDeadError, match="closed"):
        await anext(llm.generate([5, 6], greedy(2)))
