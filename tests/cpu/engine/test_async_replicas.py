"""AsyncLLM over several engines: the answers of one, everybody has work, and what concerns all reaches all."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import greedy

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import EngineDeadError, UserError
from tokenmill.core.params import RequestOutputKind

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "max_model_len": 128}


async def answer(llm: AsyncLLM, i: int) -> list[int]:
    prompt = {"prompt_token_ids": [3 + i, 40, 60 + i]}
    async for output in llm.generate(prompt, greedy(12), f"r{i}"):
        found = list(output.outputs[0].token_ids)
    return found


async def _all(llm: AsyncLLM) -> list[list[int]]:
    return list(await asyncio.gather(*(answer(llm, i) for i in range(6))))


async def _ask_long(llm: AsyncLLM, name: str) -> int:
    """Which engine answers a prompt of three blocks."""
    prompt = {"prompt_token_ids": [*range(3, 51), 7]}
    async for _ in llm.generate(prompt, greedy(2), name):
        number = llm.owners[name]
    return number


async def _caches_are_known(llm: AsyncLLM) -> None:
    """What engines tell of their prefix caches draws requests, until they say that it is gone."""
    router = llm.router
    assert router is not None
    first = await _ask_long(llm, "a")
    router.loads[first].given += 100  # it was given more
    assert await _ask_long(llm, "b") == first
    assert len(router.loads[first].held) == 3 and not router.loads[1 - first].held and not router.loads[first].coming
    assert await llm.reset_prefix_cache()
    for i in range(300):  # an engine tells what it has dropped with what it says next, and a request hears it
        if not router.loads[first].held:
            break
        async for _ in llm.generate({"prompt_token_ids": [5, 6]}, greedy(1), f"short {i}"):
            pass
        await asyncio.sleep(0.01)
    assert not router.loads[first].held
    router.loads[first].given = router.loads[1 - first].given + 100
    assert await _ask_long(llm, "c") != first


async def _two_engines(tiny: Path) -> None:
    async with AsyncLLM(str(tiny), **OPTIONS) as one:
        wanted = await _all(one)
    async with AsyncLLM(str(tiny), data_parallel_size=2, enable_sleep_mode=True, **OPTIONS) as llm:
        assert await _all(llm) == wanted
        tokens = [service.engine.scheduler.counters.prompt_tokens for service in llm.services]
        assert len(tokens) == 2 and min(tokens) > 0, "both had work"
        await llm.sleep(1)
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert await llm.reset_prefix_cache()
        assert await _all(llm) == wanted
        await _caches_are_known(llm)
        stream = llm.generate({"prompt_token_ids": [5, 6]}, greedy(100), "gone")
        await anext(stream)
        await llm.abort("gone")
        last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort" and not llm.owners
        await llm.check_health()
        with pytest.raises(UserError, match="load it with one rank and one engine"):
            await llm.update_weights({"model.norm.weight": torch.ones(64)})
        await _one_cannot_sleep(llm)
        await _one_is_lost(llm)
        assert await _all(llm) == wanted, "the other engine answers"


async def _one_cannot_sleep(llm: AsyncLLM) -> None:
    def full(level: int) -> None:
        raise UserError("no space left")

    desk = llm.services[1].built.sleep
    honest, desk.sleep = desk.sleep, full  # type: ignore[method-assign, assignment]
    with pytest.raises(UserError, match="no space left"):
        await llm.sleep(1)
    assert not await llm.is_sleeping(), "all sleep, or none"
    desk.sleep = honest  # type: ignore[method-assign]


async def _one_is_lost(llm: AsyncLLM) -> None:
    """It had nothing to do, and is noticed all the same."""
    executor: Any = llm.services[0].engine.executor
    os.kill(executor.process.pid, signal.SIGKILL)
    for _ in range(6000):
        if llm.services[0].dead is not None:
            break
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match=r"gone \(rank 0: signal 9\)"):
        await llm.check_health()
    assert await llm.list_loras() == set()
    await llm.sleep(1)
    await llm.wake_up()


async def _others_go_on(tiny: Path) -> None:
    kinds = [{}, {"n": 2, "temperature": 1.0, "seed": 5}, {"logprobs": 2, "prompt_logprobs": 1}, {"stop": ["e", "zz"]}]

    async def ask(llm: AsyncLLM, i: int) -> list[Any]:
        prompt = {"prompt_token_ids": [3 + i, 40, 60 + i]}
        texts = ["", ""]
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 90, "ignore_eos": True, **kinds[i % 4]})
        params.output_kind = RequestOutputKind.DELTA
        async for news in llm.generate(prompt, params, f"r{i}"):
            for out in news.outputs:
                texts[out.index] += out.text
        last = [output async for output in llm.generate(prompt, greedy(60), f"again {i}")][-1]
        return [texts, last.outputs[0].token_ids, last.outputs[0].finish_reason]

    async with AsyncLLM(str(tiny), **OPTIONS) as one:
        wanted = await asyncio.gather(*(ask(one, i) for i in range(8)))
        vector = (await one.embed({"prompt_token_ids": [5, 6, 7]})).outputs.embedding
    async with AsyncLLM(str(tiny), data_parallel_size=3, **OPTIONS) as llm:
        for left in (2, 1):
            tasks = [asyncio.ensure_future(ask(llm, i)) for i in range(8)]
            while len(set(llm.owners.values())) <= left:  # all have work
                await asyncio.sleep(0)
            executor: Any = llm.services[left].engine.executor
            os.kill(executor.process.pid, signal.SIGKILL)
            beside = asyncio.ensure_future(llm.embed({"prompt_token_ids": [5, 6, 7]}))
            assert await asyncio.gather(*tasks) == wanted and len(llm.alive) == left
            assert (await beside).outputs.embedding == vector and not llm.owners
        tasks = [asyncio.ensure_future(ask(llm, i)) for i in range(2)]
        while len(llm.owners) < 2:
            await asyncio.sleep(0)
        last: Any = llm.services[0].engine.executor
        os.kill(last.process.pid, signal.SIGKILL)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, EngineDeadError), "no engine is left"


def test_others_continue_what_a_lost_engine_worked_on(tiny: Path) -> None:
    asyncio.run(_others_go_on(tiny))


def test_two_engines_give_the_answers_of_one(tiny: Path) -> None:
    asyncio.run(_two_engines(tiny))
