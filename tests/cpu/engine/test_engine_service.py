"""AsyncLLM and LLM when something breaks: one request's handling, or the device under them all; what close() ends."""

from __future__ import annotations

import asyncio
import queue
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.errors import BusyError, EngineDeadError, ParameterError
from tokenmill.core.step import StepResult
from tokenmill.engine.running.loop import EngineLoop
from tokenmill.engine.running.service import Service
from tokenmill.engine.steps.deliveries import Deliveries
from tokenmill.engine.steps.engine import Engine
from tokenmill.engine.steps.faults import STICKY, Faults, FaultyExecutor, ends_process, read_faults
from tokenmill.engine.steps.worker import encoded

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "kernels": "auto"}
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
VICTIM = "the-victim"
SPEC = {"regex": "[a-c]{3}x"}


@pytest.fixture
def kept_helpers() -> None:
    """How helpers end is a subject here."""


async def said(llm: AsyncLLM, number: int, name: str) -> str:
    """The last text of a request, or what ended it."""
    text = ""
    try:
        async with asyncio.timeout(60):
            async for output in llm.generate({"prompt_token_ids": [number + 5, 9]}, PARAMS, name):
                text = output.outputs[0].text
                if output.outputs[0].finish_reason == "error":
                    return "error"
    except Exception as error:
        return f"raised {type(error).__name__}"
    return text


async def all_of(llm: AsyncLLM, tag: str) -> list[str]:
    names = [VICTIM if i == 7 else f"{tag}{i}" for i in range(32)]
    return await asyncio.gather(*(said(llm, i, name) for i, name in enumerate(names)))


PLACES = [
    *((Service, name) for name in ("_begin", "_sort", "_refuse", "_fail")),
    (Engine, "add"),
    *((EngineLoop, name) for name in ("_waits", "_end")),
    *((Deliveries, name) for name in ("_track", "_text", "add")),
]


async def test_one_of_32_breaks_and_31_do_not_notice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(str(tiny), **OPTIONS) as llm:
        calm = await all_of(llm, "calm")
        assert len(set(calm)) > 8
        for owner, name in PLACES:
            function, left = getattr(owner, name), [3]

            def broken(*args: Any, function: Any = function, left: list[int] = left, **named: Any) -> Any:
                if left[0] and VICTIM in repr(args[1:2]):
                    left[0] -= 1
                    raise RuntimeError("injected")
                return function(*args, **named)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                found = await all_of(llm, name)
            assert found[:7] + found[8:] == calm[:7] + calm[8:], name
            assert found[7] in (calm[7], "error") or found[7].startswith("raised"), name
        assert await all_of(llm, "after") == calm and llm.service.dead is None


async def test_an_engine_that_dies_ends_what_is_open_and_nothing_else(tiny: Path) -> None:
    """Of two outputs one has ended before; its end stays."""
    params = msgspec.structs.replace(PARAMS, n=2, max_tokens=200, temperature=1.0)
    async with AsyncLLM(str(tiny), **OPTIONS) as llm:
        service, ends = llm.service, {}

        def die() -> None:
            raise RuntimeError("injected")

        async with asyncio.timeout(60):
            async for output in llm.generate({"prompt_token_ids": [5, 9]}, params, VICTIM):
                ends = {each.index: each.finish_reason for each in output.outputs}
                if len(ends) == 2 and not any(ends.values()):
                    await service.call(lambda: service._deliver(service.loop.abort(VICTIM, 0)))
                elif ends.get(0) and not ends.get(1):
                    service.engine.step = die  # type: ignore[method-assign, assignment]
    assert ends == {0: "abort", 1: "error"}


async def test_nobody_waits_for_a_thread_that_is_gone(tiny: Path) -> None:
    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    async with AsyncLLM(str(tiny), **OPTIONS) as llm, asyncio.timeout(60):
        quits = msgspec.structs.replace(PARAMS, logits_processors=[leave])
        async for output in llm.generate({"prompt_token_ids": [5, 9]}, quits):
            reason = output.outputs[0].finish_reason
        assert reason == "error" and "SystemExit" in (llm.service.dead or "")
    async with AsyncLLM(str(tiny), **OPTIONS) as llm, asyncio.timeout(60):
        service = llm.service

        class Late(queue.SimpleQueue[Any]):
            """The thread ends after the caller has looked whether it lives."""

            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                super().put(None)
                service.thread.join()
                super().put(item)

        service.commands = Late()
        with pytest.raises(EngineDeadError, match="closed"):
            await service.call(lambda: 1)


async def test_close_ends_the_grammars_helper(tiny: Path) -> None:
    llm = AsyncLLM(str(tiny), **OPTIONS)
    params = SamplingParams(max_tokens=8, structured_outputs=SPEC)
    async for output in llm.generate({"prompt_token_ids": [5, 6]}, params):
        text = output.outputs[0].text
    assert text.endswith("x")
    compiler: Any = llm.service.engine.admission.compiler
    (pid,) = compiler._helper.pool.pids()
    await asyncio.to_thread(llm.close)
    assert not Path(f"/proc/{pid}").exists() and compiler._helper.pool.pids() == []


def test_offline_has_the_servers_budget(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = {f"^p{i}[a-z]+$": {"type": "string"} for i in range(900)}  # would compile for minutes
    slow = SamplingParams(max_tokens=4, structured_outputs={"json": {"type": "object", "patternProperties": patterns}})
    with LLM(str(tiny), **OPTIONS) as llm:
        helper: Any = llm.engine.admission.compiler._helper
        while True:
            try:
                with monkeypatch.context() as patch:  # its process works last: less work is waited for less long
                    patch.setattr(helper, "budget_s", helper.budget_s / 8)
                    llm.generate({"prompt_token_ids": [5, 6]}, slow, use_tqdm=False)
            except BusyError:
                continue
            except ParameterError as error:
                assert error.param == "structured_outputs" and "of work" in str(error)
                break
        fine = SamplingParams(max_tokens=8, structured_outputs=SPEC)
        assert llm.generate({"prompt_token_ids": [5, 6]}, fine, use_tqdm=False)[0].outputs[0].text.endswith("x")


BROKEN = [
    "AcceleratorError: CUDA error: device-side assert triggered",
    "AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: unspecified launch failure",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    "AcceleratorError: CUDA error: misaligned address",
]
PASSING = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AcceleratorError: CUDA error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: invalid configuration argument",
    "OutOfResources: out of resource: shared memory, Required: 300000, Hardware limit: 232448",
    "RuntimeError: shape mismatch",
    "InjectedError: this step was told to fail",
    "an earlier step failed",
]


def test_a_broken_device_is_told_from_a_failed_step() -> None:
    assert [text for text in BROKEN if not ends_process(text)] == []
    assert [text for text in PASSING if ends_process(text)] == []
    assert read_faults("cuda@3;spin@4") == Faults(cuda_at=3, spin_at=4)


class AcceleratorError(RuntimeError):
    """As torch calls it."""


def test_a_broken_device_is_nobodys_fault_offline(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out of the model as torch raises it; no sequence is blamed."""
    with LLM(str(tiny), **OPTIONS) as llm:
        executor: Any = llm.engine.executor

        def broken(plan: Any) -> None:
            raise AcceleratorError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")

        monkeypatch.setattr(executor.runner, "_forward", lambda running: broken(running.plan))
        with pytest.raises(EngineDeadError, match="device-side assert"):
            llm.generate([{"prompt_token_ids": [5, i]} for i in range(4)], PARAMS, use_tqdm=False)


async def test_a_broken_device_ends_every_request_of_asyncllm_at_once(tiny: Path) -> None:
    async with AsyncLLM(str(tiny), **OPTIONS) as llm:
        llm.service.engine.executor = FaultyExecutor(llm.service.engine.executor, Faults(cuda_at=4))
        found = set(await all_of(llm, "x"))
        # who asks after the break (a busy machine begins some of the 32 late) is told that nobody is there
        assert "error" in found <= {"error", "raised EngineDeadError"} and "device" in (llm.service.dead or "")
        with pytest.raises(EngineDeadError):
            async for _ in llm.generate({"prompt_token_ids": [5]}, PARAMS):
                raise AssertionError("it answers")


def test_a_step_that_cannot_be_encoded_fails_as_a_step(tiny: Path) -> None:
    """Between the engine and its worker: one try more, and the same text."""
    with LLM(str(tiny), executor="process", **OPTIONS) as llm:
        prompts = [{"prompt_token_ids": [5 + i, 9]} for i in range(8)]
        calm = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        executor: Any = llm.engine.executor
        encoder, left = executor.encoder, [0]

        class Broken:
            def encode(self, value: Any) -> bytes:
                left[0] += 1
                if left[0] == 3:
                    raise OverflowError("Integer value out of range")
                return encoder.encode(value)

        executor.encoder = Broken()
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
        assert found == calm and left[0] > 3
        assert llm.engine.scheduler.counters.failures >= 1


def test_a_workers_result_that_cannot_be_encoded_fails_its_step() -> None:
    found = msgspec.msgpack.decode(encoded(StepResult(plan_id=3, tokens=[[1 << 70]])), type=StepResult)
    assert found.plan_id == 3 and "OverflowError" in (found.failure or "")
    assert STICKY not in (found.failure or "")
