"""The engine's side says when how much of a prompt was read, which timelines show."""

from __future__ import annotations

from pathlib import Path

from tokenmill.core.config import make_config
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.wire import Add, Command, News, Report


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

    loop = EngineLoop(made, receive, send)
    loop.run_loop()
    made.engine.close()
    seen = {i: [r.prefilled[i] for r in reports if i in r.prefilled] for i in prompts}
    assert seen["long"] == [16, 32, 48, 50]
    assert seen["again"] == [50]  # most of it was cached: one step
    assert seen["short"] == [3]
    assert not loop.prefilling
