"""Ceilings hold, refusals come before any work, and everything is given back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.pure.server.conftest import Starter, until
from tokenmill.core.errors import TooLargeError
from tokenmill.server import gate, request_job
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.errors import HttpError
from tokenmill.server.gate import Gate, GateLimits
from tokenmill.testing.fake_generator import FakeOptions

PATH = "/v1/completions"


async def test_a_burst_fills_the_queue_and_the_rest_is_told_to_come_back(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    served = await start(FakeOptions(step_s=0.002, max_rows=16), max_num_queued_reqs=32)
    times: list[float] = []

    async def one(i: int) -> int:
        began = time.monotonic()
        response = await served.post(PATH, {"prompt": "abc", "max_tokens": 20, "stream": i % 2 == 0})
        if response.status_code != 200:
            times.append(time.monotonic() - began)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        else:
            assert response.text.rstrip().endswith(("[DONE]", "}"))
        return response.status_code

    found = await asyncio.gather(*(one(i) for i in range(300)))
    assert found.count(200) >= 32 and found.count(503) == 300 - found.count(200)
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests
    assert (await served.post(PATH, {"prompt": "abc"})).status_code == 200
    assert 'tokenmill:rejected_total{reason="queue_full"}' in (await served.client.get("/metrics")).text
    lines = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    told = [record.data for record in lines if record.getMessage() == "request refused"]  # type: ignore[attr-defined]
    assert lines and len(told) == len(lines) < 0.5 * found.count(503), "a line a second, not a line a request"
    assert told[0]["status"] == 503 and "outputs are open" in told[0]["why"]


async def test_outputs_count_not_requests(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.01), max_num_queued_reqs=8)
    first = asyncio.create_task(served.post(PATH, {"prompt": "abc", "n": 6, "temperature": 1, "max_tokens": 40}))
    await until(lambda: served.context.gate.open == 6)
    assert (await served.post(PATH, {"prompt": "abc", "n": 4, "temperature": 1})).status_code == 503
    assert (await served.post(PATH, {"prompt": "abc", "n": 9, "temperature": 1})).status_code == 400
    assert (await served.post(PATH, {"prompt": "abc", "max_tokens": 1})).status_code == 200
    assert (await first).status_code == 200 and served.context.gate.open == 0


async def test_bodies_over_the_ceiling(start: Starter) -> None:
    served = await start(max_body_bytes=1000)
    large = b'{"prompt": "' + b"a" * 2000 + b'"}'
    json = {"content-type": "application/json"}
    known = await served.client.post(PATH, content=large, headers=json)
    assert known.status_code == 413 and known.json()["error"]["code"] == 413

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(large), 6):
            yield large[i : i + 6]

    assert (await served.client.post(PATH, content=pieces(), headers=json)).status_code == 413
    small = b'{"prompt": "abc", "max_tokens": 1}'
    zipped = await served.client.post(PATH, content=small, headers={**json, "content-encoding": "gzip"})
    assert zipped.status_code == 415
    text = await served.client.post(PATH, content=small, headers={"content-type": "text/plain"})
    assert text.status_code == 415
    assert (await served.client.post(PATH, content=small, headers=json)).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/api/chat", "/generate", "/v1/models", "/health"])
async def test_what_a_client_expects_is_done_or_refused(start: Starter, path: str) -> None:
    served = await start()
    get = path in ("/v1/models", "/health")
    for said, status in (("100-continue", None), ("100-Continue", None), ("magic", 417), ("100-continue, magic", 417)):
        ask = {} if get else {"json": {"prompt": "abc", "max_tokens": 1}}
        response = await served.client.request("GET" if get else "POST", path, headers={"expect": said}, **ask)
        assert (response.status_code == 417) is (status == 417), (said, response.text)
        assert status is None or "100-continue" in response.text


async def test_rates_per_key(start: Starter) -> None:
    served = await start(api_key=["a", "b"], requests_per_minute=3)
    answers = [await served.post(PATH, {"prompt": "abc", "max_tokens": 1}, **{"x-api-key": "a"}) for _ in range(5)]
    assert [r.status_code for r in answers] == [200] * 3 + [429] * 2
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
    assert (await served.post(PATH, {"prompt": "abc", "max_tokens": 1}, **{"x-api-key": "b"})).status_code == 200
    tokens = await start(api_key=["a"], tokens_per_minute=10)
    assert (await tokens.post(PATH, {"prompt": "abc", "max_tokens": 9}, **{"x-api-key": "a"})).status_code == 200
    assert (await tokens.post(PATH, {"prompt": "abc", "max_tokens": 1}, **{"x-api-key": "a"})).status_code == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc", "max_tokens": 1, "n": 4, "temperature": 1}),
        (PATH, {"prompt": ["a", "b", "c"], "max_tokens": 1}),
        (PATH, {"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "best_of": 3, "temperature": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "n": 2}),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}),
        ("/api/embed", {"model": "fake", "input": ["a", "b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/classify", {"input": ["a", "b"], "labels": ["c", "d"]}),
        ("/v2/models/fake/generate", {"text_input": "a", "parameters": {"max_tokens": 1}}),
    ],
)
async def test_a_request_is_one_request_whatever_it_asks_for(start: Starter, path: str, body: dict[str, Any]) -> None:
    served = await start(requests_per_minute=3)
    body = {"temperature": 1, **body} if "n" in body else body
    assert [(await served.post(path, body)).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert served.context.gate.open == 0


async def test_two_keys_that_choose_the_same_request_id(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.002), api_key=["a", "b"])
    body = {"prompt": "abc", "max_tokens": 400, "seed": 1, "request_id": "same"}

    async def ask(key: str, **more: Any) -> Any:
        return await served.post(PATH, {**body, **more}, **{"x-api-key": key, "x-request-id": "same"})

    leaver = asyncio.create_task(ask("a"))
    await until(lambda: served.context.gate.open == 1)
    stayer = asyncio.create_task(ask("b", seed=2))
    await until(lambda: served.context.gate.open == 2)
    for key in ("a", "b"):
        for _ in range(1000):
            found = await served.client.get("/v1/requests/cmpl-same", headers={"x-api-key": key})
            if found.status_code == 200:
                break
            await asyncio.sleep(0.01)
        assert found.status_code == 200 and found.json()["state"] == "open"
    leaver.cancel()
    answer = await stayer
    alone = await ask("b", seed=2)
    assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert (await served.client.get("/v1/requests/cmpl-same", headers={"x-api-key": "b"})).json()["state"] == "ended"
    await until(lambda: served.context.gate.open == 0)


def test_a_greedy_key_leaves_room_for_the_others() -> None:
    gate = Gate(GateLimits(capacity=16, tenants=2))
    taken = 0
    with pytest.raises(HttpError) as refused:
        for _ in range(100):
            gate.enter("greedy")
            taken += 1
    assert taken == 12 and refused.value.status == 429  # its own quarter and the common half
    for _ in range(4):
        gate.enter("modest")
    with pytest.raises(HttpError):
        gate.enter("modest")
    for _ in range(12):
        gate.leave("greedy")
    for _ in range(8):
        gate.enter("modest")
    assert gate.open == 12


@pytest.mark.parametrize("tenants", [1, 2, 5])
def test_what_never_fits_is_refused_for_good(tenants: int) -> None:
    """More places than a key can have while nobody else is there: it is told so, and not to come back."""
    gate = Gate(GateLimits(capacity=16, tenants=tenants))
    gate.enter("a")
    most = 1
    with pytest.raises(TooLargeError) as refused:
        while True:
            gate.grow("a", 1, most, "input")
            most += 1
    assert most == {1: 16, 2: 12, 5: 12}[tenants] and refused.value.param == "input"
    with pytest.raises(HttpError) as later:
        gate.enter("a")
    assert later.value.status in (429, 503)


MANY = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"prompt": MANY}, "prompt"),
        (PATH, {"prompt": MANY, "n": 2, "temperature": 1}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 5, "temperature": 1}, "n"),
        ("/v1/embeddings", {"input": MANY}, "input"),
        ("/embedding", {"content": MANY}, "content"),
        ("/rerank", {"query": "a", "documents": MANY}, "documents"),
        ("/rerank", {"query": "a", "texts": MANY}, "texts"),
        ("/score", {"text_1": "a", "text_2": MANY}, "text_2"),
        ("/classify", {"input": MANY, "labels": ["x", "y"]}, "input"),
        ("/embed", {"inputs": MANY}, None),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": MANY}}, None),
        ("/api/embed", {"model": "fake", "input": MANY}, None),
    ],
    ids=str,
)
async def test_too_many_outputs_are_said_of_the_field_that_asks_for_them(
    start: Starter, path: str, body: dict[str, Any], param: str | None
) -> None:
    served = await start(max_num_queued_reqs=4)
    answer = await served.post(path, body)
    assert answer.status_code == 400 and "takes at most 4" in answer.text, answer.text
    found = answer.json()["error"]
    assert param is None or found["param"] == param
    assert served.context.gate.open == 0


def test_rates_refill_with_time() -> None:
    now = [0.0]
    gate = Gate(GateLimits(requests_per_minute=60), clock=lambda: now[0])
    for _ in range(60):
        gate.enter("a")
    with pytest.raises(HttpError):
        gate.enter("a")
    now[0] = 2.0
    gate.enter("a")
    gate.enter("a")
    with pytest.raises(HttpError):
        gate.enter("a")


async def test_deadlines_end_requests(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.02))
    whole = await served.post(PATH, {"prompt": "abc", "max_tokens": 1000, "timeout": 0.2})
    assert whole.status_code == 408 and whole.json()["error"]["param"] == "timeout"
    stream = await served.post(PATH, {"prompt": "abc", "max_tokens": 1000, "timeout": 0.2, "stream": True})
    assert stream.status_code == 200 and '"code":408' in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests
    short = await start(FakeOptions(step_s=0.02), request_timeout=0.2)
    assert (await short.post(PATH, {"prompt": "abc", "max_tokens": 1000})).status_code == 408


ROWS = [
    ({"logprobs": 1, "n": 4, "temperature": 1}, "logprobs"),
    ({"logprobs": 1, "best_of": 4, "n": 1, "temperature": 1}, "logprobs"),
    ({"prompt": ["abcdefgh"] * 30, "prompt_logprobs": 1, "max_tokens": 1}, "prompt_logprobs"),
    ({"prompt": ["abcdefgh"] * 30, "logprobs": 1, "echo": True, "max_tokens": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
async def test_a_deadline_holds_while_texts_are_read(
    start: Starter, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    served = await start()

    async def never(*given: Any, **more: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(served.context.text, "run_in_thread", never)
    answer = await asyncio.wait_for(served.post(path, {**body, "timeout": 0.1}), 60)
    assert answer.status_code == 408 and answer.json()["error"]["param"] == "timeout"
    assert served.context.gate.open == 0
    monkeypatch.undo()
    assert (await served.post(path, {**body, "timeout": 60})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_holds_while_a_structure_waits_for_the_engine(start: Starter, stream: bool) -> None:
    served = await start(FakeOptions(hung=True))  # so it never says whether the structure can be compiled
    body = {"prompt": "x", "guided_choice": ["a", "b"], "timeout": 0.2, "stream": stream}
    answer = await asyncio.wait_for(served.post("/v1/completions", body), 60)
    assert answer.status_code == 408 and answer.json()["error"]["param"] == "timeout"
    served.options.hung = False
    assert (await served.post("/v1/completions", {**body, "timeout": 60})).status_code == 200


@pytest.mark.parametrize(("extra", "param"), ROWS, ids=range(len(ROWS)))
async def test_an_answer_holds_so_many_log_probabilities(
    start: Starter, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], param: str
) -> None:
    """Nothing else bounds them: prompts times tokens times the most likely ones of each."""
    served = await start()
    body = {"prompt": "abc", "max_tokens": 100, **extra}
    assert (await served.post(PATH, body)).status_code == 200
    monkeypatch.setattr(request_job, "MOST_LOGPROBS", 200)
    answer = await served.post(PATH, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert (await served.post(PATH, {"prompt": "abc", "max_tokens": 100, "logprobs": 1})).status_code == 200
    assert served.context.gate.held == 0 and not served.fake.fleet.open_requests


async def test_all_answers_together_hold_so_many(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(FakeOptions(step_s=0.002))
    monkeypatch.setattr(gate, "MOST_HELD", 300)
    body = {"prompt": "abc", "max_tokens": 100, "logprobs": 1, "temperature": 1}
    found = await asyncio.gather(*(served.post(PATH, body) for _ in range(8)))
    assert {answer.status_code for answer in found} == {200, 503}
    assert all("retry-after" in answer.headers for answer in found if answer.status_code == 503)
    plain = await asyncio.gather(*(served.post(PATH, {"prompt": "abc", "max_tokens": 100}) for _ in range(8)))
    assert {answer.status_code for answer in plain} == {200} and served.context.gate.held == 0
    streamed = await asyncio.gather(*(served.post(PATH, {**body, "stream": True}) for _ in range(8)))
    assert not any('"error"' in answer.text for answer in streamed)  # what is told at once is not held


async def test_draining_refuses_new_requests(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.01))
    running = asyncio.create_task(served.post(PATH, {"prompt": "abc", "max_tokens": 20}))
    await until(lambda: served.context.gate.open == 1)
    served.context.gate.draining = True
    refused = await served.post(PATH, {"prompt": "abc"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert (await served.client.get("/ready")).status_code == 503
    assert (await served.client.get("/health")).status_code == 200
    assert (await running).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/rerank"])
async def test_a_long_list_does_not_go_before_what_comes_later(
    start: Starter, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    served = await start()
    arrivals: list[tuple[float, int]] = []
    inner = served.fake.fleet.open

    async def opened(request: Any, *rest: Any) -> Any:
        arrivals.append((request.arrival, len(request.prompt_ids)))
        return await inner(request, *rest)

    monkeypatch.setattr(served.fake.fleet, "open", opened)
    texts, began = [f"{i}" + "a" * 500 for i in range(20)], time.monotonic()
    body = {"prompt": texts, "input": texts, "query": "a", "documents": texts, "max_tokens": 1}
    names = {
        "/v1/completions": ("prompt", "max_tokens"),
        "/v1/embeddings": ("input",),
        "/rerank": ("query", "documents"),
    }
    answer = await served.post(path, {name: body[name] for name in names[path]})
    assert answer.status_code == 200 and len(arrivals) >= 20
    assert began <= arrivals[0][0] <= time.monotonic()
    for (before, tokens), (after, _) in itertools.pairwise(arrivals):
        assert after - before == pytest.approx(tokens / request_job.LISTED, abs=1e-6)


async def test_keys_take_turns_at_the_engine(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.003, max_rows=4), FleetOptions(fair=True), api_key=["greedy", "modest"])
    order: list[str] = []

    async def one(key: str, tokens: int = 20) -> None:
        body = {"prompt": "abc", "max_tokens": tokens}
        assert (await served.post(PATH, body, **{"x-api-key": key})).status_code == 200
        order.append(key)

    served.options.hung = True  # until all have come
    turns = served.fake.fleet.queue
    many = [asyncio.create_task(one("greedy")) for _ in range(40)]
    await until(lambda: turns.num_waiting == 35)
    leaver = asyncio.create_task(one("modest", 4000))
    await until(lambda: turns.num_waiting == 36)
    few = [asyncio.create_task(one("modest")) for _ in range(3)]
    await until(lambda: turns.num_waiting == 39)
    leaver.cancel()
    await until(lambda: turns.num_waiting == 38)
    served.options.hung = False
    await asyncio.gather(*many, *few)
    places = [i for i, key in enumerate(order) if key == "modest"]
    assert len(places) == 3 and max(places) <= 20, places
    assert turns.sent == 0 and not turns.waiting and not turns.by_owner
