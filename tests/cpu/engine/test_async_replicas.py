"""AsyncLLM over several engines: the answers of one, everybody has work, and what concerns all reaches all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.engine.engines import greedy
from tests.cpu.lora.making import write_adapter

from tokenmill import AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from tokenmill.core.errors import BusyError, EngineDeadError, UserError
from tokenmill.core.params import RequestOutputKind
from tokenmill.engine.running.service import Service

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
    picker = llm.picker
    assert picker is not None
    first = await _ask_long(llm, "a")
    picker.loads[first].given += 100  # it was given more
    assert await _ask_long(llm, "b") == first
    assert len(picker.loads[first].held) == 3 and not picker.loads[1 - first].held and not picker.loads[first].coming
    assert await llm.reset_prefix_cache()
    for i in range(300):  # an engine tells what it has dropped with what it says next, and a request hears it
        if not picker.loads[first].held:
            break
        async for _ in llm.generate({"prompt_token_ids": [5, 6]}, greedy(1), f"short {i}"):
            pass
        await asyncio.sleep(0.01)
    assert not picker.loads[first].held
    picker.loads[first].given = picker.loads[1 - first].given + 100
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
        assert await _all(llm) == wanted


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
    """It had nothing to do, and is noticed all the same. It is loaded again once the others are awake."""
    await llm.sleep(1)
    lost = llm.services[0]
    _kill(lost)
    while lost.dead is None:
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match=r"gone \(rank 0: signal 9\)"):
        await llm.check_health()
    assert await llm.list_loras() == set()
    assert llm.services[0] is lost and llm.crew.successors.missing == {0}, "others have its memory now"
    await llm.wake_up()
    while llm.services[0] is lost:
        await asyncio.sleep(0.01)
    await llm.check_health()
    for dying in ([0], [0, 1]):
        await llm.sleep(1)
        lost = [llm.services[number] for number in dying]
        for service in lost:
            _kill(service)
        while len(lost) > 1 and any(service.dead is None for service in lost):
            await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await answer(llm, 0)
        assert await llm.is_sleeping()
        await llm.wake_up()  # also if the death is noticed now
        assert not await llm.is_sleeping()
        await answer(llm, 0)
        while any(service in llm.services for service in lost):
            await asyncio.sleep(0.01)
        await llm.check_health()


def _kill(service: Service) -> None:
    executor: Any = service.engine.executor
    with contextlib.suppress(ProcessLookupError):  # it is dead already, and not yet known to be
        os.kill(executor.process.pid, signal.SIGKILL)


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
        for dying in ([2], [1]):
            tasks = [asyncio.ensure_future(ask(llm, i)) for i in range(8)]
            while len(set(llm.owners.values())) < 3:  # all have work
                await asyncio.sleep(0)
            lost = [llm.services[number] for number in dying]
            for service in lost:
                _kill(service)
            beside = asyncio.ensure_future(llm.embed({"prompt_token_ids": [5, 6, 7]}))
            assert await asyncio.gather(*tasks) == wanted, dying
            assert (await beside).outputs.embedding == vector and not llm.owners
            while any(service in llm.services for service in lost):
                await asyncio.sleep(0.01)
            await llm.check_health()
        lost = list(llm.services)
        for service in lost:
            _kill(service)
        while any(service.dead is None for service in lost):
            await asyncio.sleep(0)
        gone = asyncio.ensure_future(anext(llm.generate({"prompt_token_ids": [5, 6]}, greedy(5), "gone")))
        while "gone" not in llm.waiting:
            await asyncio.sleep(0)
        await llm.abort("gone")
        assert (await gone).outputs[0].finish_reason == "abort" and llm.crew.must_wait
        assert await asyncio.gather(*(ask(llm, i) for i in range(8))) == wanted, "they wait for an engine"
        while any(service in llm.services for service in lost):
            await asyncio.sleep(0.01)
        llm.crew.successors.deaths.most = 0  # none comes any more
        for service in llm.services:
            _kill(service)
        while any(service.dead is None for service in llm.services):
            await asyncio.sleep(0)
        for found in await asyncio.gather(*(ask(llm, i) for i in range(2)), return_exceptions=True):
            assert isinstance(found, EngineDeadError) and "giving up" in str(found), "no engine is left"
        with pytest.raises(EngineDeadError, match="giving up"):
            await llm.check_health()


async def _one_dies_while_all_are_told(llm: AsyncLLM) -> None:
    """What it would have forgotten is gone with it."""
    for tell, answer in ((llm.reset_prefix_cache, True), (lambda: llm.remove_lora(5), False), (llm.list_loras, set())):
        while llm.crew.successors.coming or any(service.dead is not None for service in llm.services):
            await asyncio.sleep(0.01)
        first, second = llm.services
        honest = first.call

        async def call(asked: Any, honest: Any = honest, second: Service = second) -> Any:
            _kill(second)
            while second.dead is None:
                await asyncio.sleep(0)
            return await honest(asked)

        first.call = call  # type: ignore[method-assign]
        assert await tell() == answer
        first.call = honest  # type: ignore[method-assign]


async def _all_die_at_once(tiny: Path) -> None:
    """Some requests are given to an engine that is dead, too, but not yet known to be. Later one kills engines."""

    async def kill_with(llm: AsyncLLM, name: str) -> None:
        while True:
            number = llm.owners.get(name)
            service = None if number is None else llm.services[number]
            if service is not None and service.dead is None and name in service.callers:  # it is to be blamed
                _kill(service)
            await asyncio.sleep(0.001)

    async def ask(llm: AsyncLLM, name: str, tokens: int = 60) -> RequestOutput:
        prompt = {"prompt_token_ids": [3 + len(name), 40]}
        return [output async for output in llm.generate(prompt, greedy(tokens), name)][-1]

    names = ["x" * i for i in range(1, 9)]
    async with AsyncLLM(str(tiny), **OPTIONS) as one:
        wanted = [(await ask(one, name)).outputs[0].token_ids for name in names]
    async with AsyncLLM(str(tiny), data_parallel_size=2, **OPTIONS) as llm:
        tasks = [asyncio.ensure_future(ask(llm, name)) for name in names]
        while len(set(llm.owners.values())) < 2:
            await asyncio.sleep(0)
        for service in list(llm.services):
            _kill(service)
        assert [each.outputs[0].token_ids for each in await asyncio.gather(*tasks)] == wanted
        llm.crew.successors.deaths.times.clear()
        for killer in ("killer 1", "killer 2"):  # each explains its deaths, so that these do not add up
            killing = asyncio.ensure_future(kill_with(llm, killer))
            guilty = asyncio.ensure_future(ask(llm, killer, 100))
            tasks = [asyncio.ensure_future(ask(llm, name)) for name in names]
            assert [each.outputs[0].token_ids for each in await asyncio.gather(*tasks)] == wanted
            last = (await guilty).outputs[0]
            assert last.finish_reason == "error" and "died repeatedly" in str(last.stop_reason)
            killing.cancel()
            assert not llm.crew.successors.deaths.times
        assert not llm.owners and not llm.waiting and not llm.trials.suspects and llm.trials.engine < 0
        await _one_dies_while_all_are_told(llm)


def test_requests_outlive_all_engines_at_once(tiny: Path) -> None:
    asyncio.run(_all_die_at_once(tiny))


async def _adapters_are_taken_over(tiny: Path, folder: Path) -> None:
    """Also their numbers, which callers have."""
    ask, prompt = LoRARequest("one", 7, str(folder)), {"prompt_token_ids": [3, 4, 5]}
    gone = LoRARequest("gone", 3, str(folder))

    async def answer(lora: LoRARequest | None) -> list[int]:
        outputs = [output async for output in llm.generate(prompt, greedy(8), lora_request=lora)]
        return list(outputs[-1].outputs[0].token_ids)

    async with AsyncLLM(str(tiny), data_parallel_size=2, enable_lora=True, **OPTIONS) as llm:
        wanted, plain = await answer(ask), await answer(None)
        await llm.add_lora(gone)
        assert await llm.remove_lora(3) and wanted != plain
        for number in (0, 1):
            lost = llm.services[number]
            _kill(lost)
            assert await answer(ask) == wanted and await answer(None) == plain
            while llm.services[number] is lost:
                await asyncio.sleep(0.01)
            found = await llm.services[number].call(llm.services[number].built.adapters.list_given)
            assert found == {7}
        assert await asyncio.gather(*(answer(ask) for _ in range(6))) == [wanted] * 6
        await llm.add_lora(gone)
        numbers = [set(service.built.adapters.numbers) for service in llm.services]
        assert numbers == [{1, 3}] * 2, "a number that an engine's cache may know is not given again"


def test_adapters_are_taken_over(tiny: Path, tmp_path: Path) -> None:
    asyncio.run(_adapters_are_taken_over(tiny, write_adapter(tmp_path / "one", tiny)))


def test_others_continue_what_a_lost_engine_worked_on(tiny: Path) -> None:
    asyncio.run(_others_go_on(tiny))


def test_two_engines_give_the_answers_of_one(tiny: Path) -> None:
    asyncio.run(_two_engines(tiny))
