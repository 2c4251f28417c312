"""Deaths, hangs, replay and choice of engines: streams go on without a repeated or missing token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.pure.server.conftest import Served, Starter, kill, until
from tests.pure.server.server_chat_helpers import events
from tokenmill.core.request import SamplingParams, TextDelta
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.running.wire import Report, encode_news, read_news
from tokenmill.kvcache.cache_events import prompt_marks
from tokenmill.server.backend import DeltaStream
from tokenmill.server.engines.state import FleetOptions
from tokenmill.testing.fake_generator import FakeLink, FakeOptions

PATH = "/v1/completions"


async def undisturbed(start: Starter, bodies: list[dict[str, Any]]) -> list[Any]:
    served = await start()
    return [(await served.post(PATH, body)).json() for body in bodies]


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def test_streams_survive_deaths_with_identical_text(start: Starter) -> None:
    bodies = [
        {"prompt": "abc", "max_tokens": 40 + i, "seed": i, "n": 1 + i % 3, "temperature": 1, "logprobs": i % 2}
        for i in range(12)
    ]
    bodies += [{"prompt": "abc", "max_tokens": 40, "seed": 77, "stop": ["zz", "q"]}]
    bodies += [{"prompt": "abc", "max_tokens": 30, "seed": 78, "echo": True, "logprobs": 2}]
    calm = await undisturbed(start, bodies)
    served = await start(FakeOptions(step_s=0.003), FleetOptions(max_deaths_per_request=9))
    tasks = [asyncio.create_task(served.post(PATH, body)) for body in bodies]
    await until(lambda: len(served.fake.fleet.open_requests) == len(bodies))
    for _ in range(3):
        await kill(served, 60)
    answers = [(await task).json() for task in tasks]
    assert served.fake.fleet.restarts == 3 and served.fake.fleet.replays >= len(bodies)
    for got, wanted in zip(answers, calm, strict=True):
        assert got["choices"] == wanted["choices"] and got["usage"] == wanted["usage"]
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests
    counted = served.fake.fleet.stats()[0].prompt_tokens
    assert counted == sum(answer["usage"]["prompt_tokens"] for answer in answers), "every prompt counts once"


async def test_what_an_engine_tells_of_its_cache_draws_requests(start: Starter) -> None:
    """Through the wire, until it says that it is gone, or dies."""
    served = await start(FakeOptions(), FleetOptions(engines=3))
    fleet, body = served.fake.fleet, {"prompt": "abc" * 40, "max_tokens": 2}
    tokenizer, fleet.picker.block_size = fleet.info.tokenizer, 16
    assert tokenizer is not None
    marks = b"".join(prompt_marks(tokenizer.encode("abc" * 40), "", 16, 1 << 20))
    assert marks

    async def owner(published: bytes = b"", gone: bytes = b"") -> int:
        """Who takes the prompt, once engine 2 has said this; engines 0 and 1 have been given nothing."""
        fleet._heard(
            fleet.engines[2], fleet.engines[2].life, read_news(encode_news(Report(published=published, gone=gone)))
        )
        before = [fleet.picker._load(number).given for number in range(3)]
        assert (await served.post(PATH, body)).status_code == 200
        given = [fleet.picker._load(number).given - old for number, old in enumerate(before)]
        for number in range(3):
            fleet.picker._load(number).given = 10 * (number == 2)
        return given.index(max(given))

    assert await owner(marks) == 2
    assert await owner(gone=marks[8:]) == 2, "one block is left"
    assert await owner(gone=marks[:8]) == 0
    await owner(marks)
    served.fake.link(2).die()
    await until(lambda: fleet.restarts == 1 and fleet.engines[2].ready)
    assert await owner() == 0


async def test_a_stream_shows_no_seam(start: Starter) -> None:
    body = {"prompt": "abc", "max_tokens": 60, "seed": 5, "stream": True, "return_token_ids": True}
    calm = await undisturbed(start, [{**body, "stream": False}])
    served = await start(FakeOptions(step_s=0.002))
    task = asyncio.create_task(served.post(PATH, body))
    await kill(served, 10)
    chunks = events((await task).text)
    ids = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
    assert ids == calm[0]["choices"][0]["token_ids"]
    assert "".join(c["choices"][0]["text"] for c in chunks) == texts(calm[0])[0]


async def test_a_request_that_kills_engines_is_given_up(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.005), FleetOptions(max_deaths_per_request=2, max_restarts_per_minute=9))
    task = asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 4000}))
    for _ in range(3):
        await kill(served, 3)
    assert (await task).status_code == 500
    assert (await served.post(PATH, {"prompt": "abc", "max_tokens": 3})).status_code == 200


class Deadly:
    """Engines that die three steps after they have begun to work on a prompt of these words."""

    def __init__(self, served: Served, words: str, engines: int = 1) -> None:
        self.fleet = served.fake.fleet
        tokenizer = self.fleet.info.tokenizer
        assert tokenizer is not None
        self.words = tokenizer.encode(words, add_special_tokens=False)
        self.task = asyncio.create_task(self._run(served, engines))

    async def _run(self, served: Served, engines: int) -> None:
        begun: dict[tuple[Any, str], int] = {}
        while not self.fleet.broken:
            await asyncio.sleep(0.001)
            for link in [served.fake.link(number) for number in range(engines)]:
                for name, work in list(link.works.items()):
                    if work.request.prompt_ids[: len(self.words)] == self.words and work.started:
                        if link.steps > begun.setdefault((link, name), link.steps) + 2:
                            link.die()
                            break


@pytest.mark.parametrize("engines", [1, 2])
async def test_one_that_kills_engines_takes_nobody_with_it(start: Starter, engines: int) -> None:
    """Three of 24 kill whatever engine works on them: they alone are given up, within the usual number of deaths."""
    bodies = [{"prompt": "abc", "max_tokens": 300, "seed": i, "n": 1 + i % 2, "temperature": 1} for i in range(21)]
    calm = await undisturbed(start, bodies)
    served = await start(FakeOptions(step_s=0.003), FleetOptions(engines=engines))
    deadly = Deadly(served, "kill", engines)
    tasks = [asyncio.create_task(served.post(PATH, body)) for body in bodies]
    await until(lambda: len(served.fake.fleet.open_requests) == len(bodies))
    short = {"prompt": "abc", "max_tokens": 3}
    assert (await served.post(PATH, short)).status_code == 200
    killers = [
        asyncio.create_task(served.post(PATH, {"prompt": f"kill {i}", "max_tokens": 300, "seed": i})) for i in range(3)
    ]
    assert [(await killer).status_code for killer in killers] == [500] * 3
    for task, wanted in zip(tasks, calm, strict=True):
        assert (await task).json()["choices"] == wanted["choices"]
    trials = served.fake.fleet.trials
    assert not served.fake.fleet.broken and trials.engine == -1 and trials.current is None and not trials.suspects
    assert (await served.post(PATH, short)).status_code == 200 and not served.fake.fleet.parked
    deadly.task.cancel()


async def test_deaths_that_nobody_is_to_blame_for_cost_nobody_a_request(start: Starter) -> None:
    """Whoever is tried apart passes; more deaths follow, and all requests come to their end."""
    bodies = [{"prompt": "abc", "max_tokens": 400, "seed": i} for i in range(6)]
    calm = await undisturbed(start, bodies)
    served = await start(FakeOptions(step_s=0.002), FleetOptions(max_restarts_per_minute=99))
    tasks = [asyncio.create_task(served.post(PATH, body)) for body in bodies]
    await until(lambda: len(served.fake.fleet.open_requests) == len(bodies))
    fleet = served.fake.fleet
    for number in range(5):
        await until(lambda: fleet.trials.engine == -1 and len(served.fake.link().works) == len(bodies))
        await kill(served, 12)
        assert bool(fleet.trials.suspects) == (number > 0)
    for task, wanted in zip(tasks, calm, strict=True):
        assert (await task).json()["choices"] == wanted["choices"]


async def test_suspects_may_leave_while_they_wait(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.003), FleetOptions(max_restarts_per_minute=99))
    fleet = served.fake.fleet
    tasks = [asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 3000})) for _ in range(6)]
    await until(lambda: len(fleet.open_requests) == 6)
    for _ in range(2):
        await kill(served, 12)
    await until(lambda: fleet.trials.current is not None)
    fresh = asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 3}))
    for task in tasks:
        task.cancel()
    assert (await fresh).status_code == 200  # it waited for the trials alone
    await until(lambda: not fleet.open_requests)
    assert fleet.trials.engine == -1 and not fleet.trials.suspects


async def test_who_is_tried_next_is_not_given_up_for_one_that_left(start: Starter) -> None:
    """A caller leaves whose request is on trial. The engine has not read that yet, and dies of it."""
    bodies = [{"prompt": "abc", "max_tokens": 300, "seed": i} for i in range(3)]
    served = await start(FakeOptions(step_s=0.003), FleetOptions(max_restarts_per_minute=99))
    fleet = served.fake.fleet
    tasks = [asyncio.create_task(served.post(PATH, body)) for body in bodies]
    await until(lambda: len(fleet.open_requests) == 3)
    for _ in range(2):
        await kill(served, 12)
    await until(lambda: fleet.trials.current is not None)
    left = fleet.trials.current
    assert left is not None
    task = tasks[left.request.seed]
    fleet.abandon(left.request.id)
    assert fleet.trials.current not in (None, left)
    served.fake.link().die()
    task.cancel()
    assert [(await each).status_code for each in tasks if each is not task] == [200] * 2


async def test_too_many_deaths_end_everything_with_an_error(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.005), FleetOptions(max_deaths_per_request=99, max_restarts_per_minute=2))
    told: list[str] = []
    served.fake.fleet.on_broken = told.append
    whole = asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 4000}))
    stream = asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 4000, "stream": True}))
    await until(lambda: len(served.fake.fleet.open_requests) == 2)
    for _ in range(3):
        await kill(served, 6)
    assert (await whole).status_code == 503
    assert '"error"' in (await stream).text and (await stream).text.endswith("data: [DONE]\n\n")
    assert told and (await served.client.get("/health")).status_code == 503
    late = await served.post(PATH, {"prompt": "abc"})
    assert late.status_code == 503 and "retry-after" in late.headers


async def test_a_hung_engine_is_noticed_and_replaced(start: Starter) -> None:
    options = FakeOptions(step_s=0.003)
    served = await start(options, FleetOptions(watchdog_s=1.0))
    body = {"prompt": "abc", "max_tokens": 200, "seed": 8}
    calm = await undisturbed(start, [body])
    task = asyncio.create_task(served.post(PATH, body))
    await until(lambda: served.fake.link().output_tokens >= 20)
    options.hung = True
    engine = served.fake.fleet.engines[0]
    said: set[int] = set()
    while engine.life == 1:
        late = engine.heard + 1.0 < asyncio.get_running_loop().time()
        status = (await served.client.get("/health")).status_code
        if late and engine.life == 1:
            said.add(status)
        await asyncio.sleep(0.005)
    assert said <= {503}
    options.hung = False
    assert texts((await task).json()) == texts(calm[0])
    assert served.fake.fleet.restarts >= 1


async def test_a_server_is_healthy_while_any_engine_serves(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts again or hangs is seen in /metrics, and gets no requests."""
    served = await start(FakeOptions(step_s=0.002), FleetOptions(engines=2, watchdog_s=0.5))
    fleet, begin = served.fake.fleet, FakeLink.start

    async def seen() -> tuple[list[int], list[str]]:
        paths = ("/health", "/ready", "/ping", "/v2/health/ready", "/v2/models/fake/ready")
        text = (await served.client.get("/metrics")).text
        states = [(await served.client.get(path)).status_code for path in paths]
        return states, re.findall(r'tokenmill:engine_up\{engine="."[^}]*\} (\S+)', text)

    assert await seen() == ([200] * 5, ["1.0", "1.0"])
    monkeypatch.setattr(FakeLink, "start", lambda self, on_news, on_death: begin(self, lambda news: None, on_death))
    served.fake.link(1).die()  # its next life never says that it has loaded
    await until(lambda: fleet.restarts == 1)
    assert await seen() == ([200] * 5, ["1.0", "0.0"])
    assert (await served.post(PATH, {"prompt": "abc", "max_tokens": 3})).status_code == 200
    served.fake.link(0).die()
    await until(lambda: fleet.restarts == 2)
    assert await seen() == ([503] * 5, ["0.0", "0.0"])
    monkeypatch.setattr(FakeLink, "start", begin)
    for number in (0, 1):
        served.fake.link(number).die()
    await until(lambda: all(engine.ready for engine in fleet.engines))
    monkeypatch.setattr(fleet.engines[1], "absence", lambda limit: "engine 1 has made no progress for 9.0 s")
    for i in range(6):
        assert (await served.post(PATH, {"prompt": f"abc{i}", "max_tokens": 3})).status_code == 200
    assert (await seen())[1] == ["1.0", "0.0"] and not served.fake.link(1).prompt_tokens


async def test_other_engines_take_over_at_once(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.004), FleetOptions(engines=3))
    bodies = [{"prompt": "abc", "max_tokens": 60, "seed": i} for i in range(12)]
    calm = await undisturbed(start, bodies)
    tasks = [asyncio.create_task(served.post(PATH, body)) for body in bodies]
    await until(lambda: min(len(engine.requests) for engine in served.fake.fleet.engines) >= 3)
    await kill(served, 3, engine=1)
    assert [texts((await t).json()) for t in tasks] == [texts(c) for c in calm]


async def test_requests_end_as_they_are_told(start: Starter) -> None:
    """By themselves, aborted with their last deltas, or abandoned."""
    fake = (await start(FakeOptions(step_s=0.002))).fake
    fleet = fake.fleet

    async def deltas(name: str, tokens: int, n: int = 1) -> AsyncIterator[TextDelta]:
        stream, left = DeltaStream(), n
        params = SamplingParams(max_tokens=tokens, n=n)
        await fleet.open(make_request(name, None, [5, 6], params, arrival=0.0), stream)
        while left:
            for delta in await stream.batch():
                left -= delta.finish_reason is not None
                yield delta

    found = [delta async for delta in deltas("one", 6, n=2)]
    assert sum(len(d.token_ids) for d in found) == 12 and [d.finish_reason for d in found].count("length") == 2
    seen = []
    async for delta in deltas("two", 4000):
        seen.append(delta)
        if len(seen) == 3:
            await fleet.abort("two")
    assert seen[-1].finish_reason == "abort"
    async for _ in deltas("three", 4000):
        break
    fleet.abandon("three")
    await until(lambda: not fake.link().works and not fleet.open_requests)
