"""The engine's side says when how much of a prompt was read, which timelines show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.request import Request, SamplingParams, TokenDelta
from tokenmill.engine.running import loop
from tokenmill.engine.running.build import build_engine
from tokenmill.engine.running.loop import EngineLoop
from tokenmill.engine.running.wire import Add, Command, News, Report, encode_news, read_news


def test_every_step_of_a_prompt_is_reported_once(tiny: Path) -> None:
    made = build_engine(make_config({}, model=str(tiny), max_num_batched_tokens=16, kv_cache_memory_bytes=8 << 20))
    prompts = {"long": list(range(40, 90)), "again": list(range(40, 90)), "short": [7, 8, 9]}
    waiting = [Add(Request(id=i, prompt_ids=ids, params=SamplingParams(max_tokens=3))) for i, ids in prompts.items()]
    reports: list[Report] = []

    def receive(seconds: float) -> list[Command] | None:
        ended = sum(d.finish is not None for r in reports for d in r.deltas)
        if ended == len(prompts):
            return None
        return [waiting.pop(0)] if waiting and ended == len(prompts) - len(waiting) else []

    def send(news: News) -> None:
        assert isinstance(news, Report)
        reports.append(news)

    around = EngineLoop(made, receive, send)
    around.run_loop()
    made.engine.close()
    seen = {i: [r.prefilled[i] for r in reports if i in r.prefilled] for i in prompts}
    assert seen["long"] == [16, 32, 48, 50]
    assert seen["again"] == [50]  # most of it was cached: one step
    assert seen["short"] == [3]
    assert not around.prefilling


def test_a_request_starts_when_its_first_step_is_planned_not_when_that_is_over(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a prompt's time would be told as time in the queue."""
    made = build_engine(make_config({}, model=str(tiny), kv_cache_memory_bytes=8 << 20))
    reports: list[Report] = []
    clock = [100.0]
    execute = made.engine.step

    def step() -> list[TokenDelta]:
        found = execute()
        clock[0] += 2.0
        return found

    monkeypatch.setattr(made.engine, "step", step)
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    add = Add(Request(id="a", prompt_ids=[7, 8, 9], params=SamplingParams(max_tokens=1)))

    def receive(seconds: float) -> list[Command] | None:
        return [add] if not reports else None if any(r.deltas for r in reports) else []

    def send(news: News) -> None:
        assert isinstance(news, Report)
        reports.append(news)

    EngineLoop(made, receive, send).run_loop()
    made.engine.close()
    assert [r.started for r in reports if r.started] == [{"a": 2.0}]
    assert read_news(encode_news(reports[0])) == reports[0]
