"""Engines on several devices of one process: each computes on its own in every thread, which keeps the one it had."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenmill.core.step import LateInputs, StepPlan, StepResult
from tokenmill.device import memory
from tokenmill.engine.steps.executor import InProcessExecutor


class Devices:
    """What torch.cuda is with two devices: the current one belongs to a thread, and is the first one to begin with."""

    def __init__(self) -> None:
        self.local = threading.local()

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return getattr(self.local, "now", 0)

    def set_device(self, number: int) -> None:
        self.local.now = number

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before = self.current_device()
        self.set_device(number)
        try:
            yield
        finally:
            self.set_device(before)


class WatchedRunner:
    """Notes the device on which each of its parts ran."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.seen: list[int] = []
        self.kernels = self

    def counters(self) -> dict[str, dict[str, int]]:
        self.seen.append(self.devices.current_device())
        return {}

    def begin(self, plan: StepPlan) -> object:
        self.seen.append(self.devices.current_device())
        return plan

    def sample(self, running: object, late: LateInputs | None) -> None:
        self.seen.append(self.devices.current_device())

    def finish(self, running: Any) -> StepResult:
        self.seen.append(self.devices.current_device())
        return StepResult(plan_id=running.id)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    monkeypatch.setattr(memory, "_module", lambda device: None if device == "cpu" else made)
    return made


def in_thread(deed: Callable[[], None]) -> None:
    thread = threading.Thread(target=deed)
    thread.start()
    thread.join()


def one_step(executor: InProcessExecutor, number: int) -> None:
    ticket = executor.submit(StepPlan(id=number, late=[0]))
    executor.supply(number, LateInputs())
    ticket.wait()
    executor.control({"what": "counters"})
    executor.control_all({"what": "counters"})


@pytest.mark.parametrize("lazy", [False, True], ids=["enqueued", "run when waited for"])
def test_each_engine_computes_on_its_own_device_in_every_thread(devices: Devices, lazy: bool) -> None:
    runners = [WatchedRunner(devices), WatchedRunner(devices)]
    engines = [
        InProcessExecutor(runner, [8], lazy=lazy, here=memory.place(f"cuda:{i}"))  # type: ignore[arg-type]
        for i, runner in enumerate(runners)
    ]

    def both() -> None:
        for number in range(3):
            for engine in engines:
                one_step(engine, number)
        assert devices.current_device() == 0, "the thread's own device is what it was"

    both()
    in_thread(both)
    for i, runner in enumerate(runners):
        assert len(runner.seen) == 2 * 3 * 5
        assert set(runner.seen) == {i}


def test_a_device_without_a_number_is_the_one_that_its_maker_had(devices: Devices) -> None:
    devices.set_device(1)
    runner = WatchedRunner(devices)
    executor = InProcessExecutor(runner, [8], lazy=False, here=memory.place("cuda"))  # type: ignore[arg-type]
    in_thread(lambda: one_step(executor, 0))
    assert set(runner.seen) == {1}


def test_nothing_is_changed_on_a_cpu_or_where_there_is_one_device(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.place("cpu") is contextlib.nullcontext
    monkeypatch.setattr(devices, "device_count", lambda: 1)
    assert memory.place("cuda") is contextlib.nullcontext
