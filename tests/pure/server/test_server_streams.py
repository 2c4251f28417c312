"""Streams of what is only known late (best_of) or early (scores of an echoed prompt), and headers that steer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.pure.server.conftest import Starter, until
from tests.pure.server.server_chat_helpers import events
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.openai.completions import CompletionStream
from tokenmill.testing.fake_generator import FakeOptions

PATH = "/v1/completions"


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """One choice's parts put together."""
    text, columns, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                for name, values in (choice["logprobs"] or {}).items():
                    columns.setdefault(name, []).extend(values)
    return {"text": text, "logprobs": columns or None, "finish_reason": reason}


@pytest.mark.parametrize(
    "extra",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "n": 3, "temperature": 1},
        {"echo": True, "logprobs": 1, "prompt": ["abc", "a longer one"]},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"best_of": 4, "n": 2, "temperature": 1},
        {"best_of": 3, "temperature": 1, "logprobs": 1},
        {"best_of": 2, "temperature": 1, "echo": True},
        {"best_of": 3, "temperature": 1, "echo": True, "logprobs": 1, "prompt": ["abc", "a longer one"]},
        {"best_of": 2, "temperature": 1, "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt_logprobs": 0},
    ],
)
async def test_a_stream_says_what_a_whole_answer_says(start: Starter, extra: dict[str, Any]) -> None:
    served = await start()
    body = {"prompt": "abc", "max_tokens": 7, "seed": 4, **extra}
    whole = (await served.post(PATH, body)).json()
    found = await served.post(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = events(found.text)
    for choice in whole["choices"]:
        wanted = {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
        assert joined(chunks, choice["index"]) == wanted
    assert chunks[-1]["usage"] == whole["usage"]
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_a_prompt_count_once_for_each_choice(start: Starter, stream: bool) -> None:
    """Every choice tells them: a short request must not become an answer of hundreds of megabytes."""
    served = await start()
    body = {"prompt": [97] * 1000, "max_tokens": 1, "n": 128, "temperature": 1, "echo": True, "logprobs": 4}
    refused = await served.post(PATH, {**body, "stream": stream})
    assert refused.status_code == 400 and "log-probabilities" in refused.json()["error"]["message"]
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests
    assert (await served.post(PATH, {**body, "n": 8, "stream": stream})).status_code == 200


async def test_long_echoes_are_written_in_threads(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start()
    threads = []
    told = CompletionStream._told

    def noted(self: CompletionStream, batch: Any) -> bytes:
        threads.append(threading.current_thread())
        return told(self, batch)

    monkeypatch.setattr(CompletionStream, "_told", noted)
    body = {"prompt": [97] * 1000, "max_tokens": 3, "n": 4, "temperature": 1, "seed": 1, "echo": True, "logprobs": 1}
    whole = (await served.post(PATH, body)).json()
    chunks = events((await served.post(PATH, {**body, "stream": True})).text)
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"])["logprobs"] == choice["logprobs"]
    first = threads.index(threading.main_thread())  # what follows the echoes is little
    assert 0 < first < len(threads) and all(
        thread.name.startswith(("tokenmill-body", "tokenmill-long-body")) for thread in threads[:first]
    )


async def test_scores_of_the_prompt_survive_a_death(start: Starter) -> None:
    body = {"prompt": "abc", "max_tokens": 60, "seed": 4, "echo": True, "logprobs": 1, "n": 2, "temperature": 1}
    calm = await start()
    wanted = (await calm.post(PATH, body)).json()["choices"]
    served = await start(FakeOptions(step_s=0.002))
    task = asyncio.create_task(served.post(PATH, {**body, "stream": True}))
    while served.fake.link().output_tokens < 20:
        await asyncio.sleep(0.002)
    served.fake.link().die()
    chunks = events((await task).text)
    for choice in wanted:
        assert joined(chunks, choice["index"])["logprobs"] == choice["logprobs"]


async def test_prompt_logprobs_are_refused_in_streams_as_vllm_does(start: Starter) -> None:
    served = await start()
    for path, rest in (
        (PATH, {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        refused = await served.post(path, {**rest, "stream": True, "prompt_logprobs": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_prompt_logprobs_that_no_stream_shows_are_not_computed(start: Starter, monkeypatch: Any) -> None:
    """0 is allowed there, as in vLLM; the scores that `echo` shows are made all the same."""
    served, asked = await start(), []
    opened = served.fake.fleet.open

    def note(request: Any, *more: Any, **named: Any) -> Any:
        asked.append(request.params.prompt_logprobs)
        return opened(request, *more, **named)

    monkeypatch.setattr(served.fake.fleet, "open", note)
    body = {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 0}
    for more in ({}, {"stream": True}, {"stream": True, "echo": True, "logprobs": 1}):
        assert (await served.post(PATH, {**body, **more})).status_code == 200
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 0, "stream": True}
    assert (await served.post("/v1/chat/completions", talk)).status_code == 200
    assert asked == [0, None, 1, None]


async def test_a_session_stays_with_its_engine(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.001), FleetOptions(engines=4))

    async def engine_of(i: int, headers: dict[str, str], **fields: Any) -> int:
        body = {"prompt": f"prompt {i}", "max_tokens": 4000, "stream": True, **fields}
        before = [len(e.requests) for e in served.fake.fleet.engines]
        task = asyncio.create_task(served.post(PATH, body, **headers))
        while True:
            await asyncio.sleep(0.001)
            now = [len(e.requests) for e in served.fake.fleet.engines]
            if sum(now) > sum(before):
                tasks.append(task)
                return next(k for k in range(4) if now[k] > before[k])

    tasks: list[asyncio.Task[Any]] = []
    assert len({await engine_of(i, {}) for i in range(4)}) == 4  # strangers go to the idlest
    assert len({await engine_of(i, {"x-session-id": "one"}) for i in range(5)}) == 1
    assert len({await engine_of(i, {}, session_id="two") for i in range(5)}) == 1
    assert {await engine_of(i, {"x-data-parallel-rank": "2"}) for i in range(5)} == {2}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for bad in ("4", "-1", "x", "1e3", ""):
        refused = await served.post(PATH, {"prompt": "abc"}, **{"x-data-parallel-rank": bad})
        assert refused.status_code == 400, bad


async def test_a_priority_header_wins_over_the_body(start: Starter) -> None:
    served = await start()
    for headers, fields, wanted in (
        ({"x-vllm-priority": "-10"}, {}, 400),  # this server was not started with priorities
        ({"x-vllm-priority": "0"}, {"priority": 5}, 200),
        ({}, {"priority": 5}, 400),
        ({"x-vllm-priority": "high"}, {}, 400),
        ({"x-vllm-priority": "99999999999"}, {}, 400),
    ):
        answer = await served.post(PATH, {"prompt": "abc", "max_tokens": 1, **fields}, **headers)
        assert answer.status_code == wanted, (headers, fields, answer.text)


SAID = "The engine is not available right now; try again."
LLAMA = f'data: {{"error":{{"message":"{SAID}","type":"unavailable_error","param":null,"code":503}}}}\n\n'
OPENAI = f'data: {{"error":{{"message":"{SAID}","type":"ServiceUnavailableError","param":null,"code":503}}}}\n\n'
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "model": "fake"}
ENDS = [
    (PATH, {"prompt": "abc", "max_tokens": 900}, OPENAI + "data: [DONE]\n\n"),
    (PATH, {"prompt": "abc", "max_tokens": 900, "best_of": 2, "temperature": 1}, OPENAI + "data: [DONE]\n\n"),
    ("/v1/chat/completions", HI, OPENAI + "data: [DONE]\n\n"),
    ("/v1/chat/completions", {**HI, "store": True}, OPENAI + "data: [DONE]\n\n"),
    ("/invocations", HI, OPENAI + "data: [DONE]\n\n"),
    ("/v1/messages", HI, f'"error":{{"type":"overloaded_error","message":"{SAID}"}},"request_id":"ID"}}\n\n'),
    ("/v1/responses", {"input": "abc", "max_output_tokens": 900}, "}\n\n"),
    ("/api/generate", {"model": "fake", "prompt": "abc"}, f'{{"error":"{SAID}"}}\n'),
    ("/api/chat", {"model": "fake", "messages": HI["messages"]}, f'{{"error":"{SAID}"}}\n'),
    ("/generate_stream", {"inputs": "abc"}, f'data:{{"error":"{SAID}","error_type":"overloaded"}}\n\n'),
    ("/", {"inputs": "abc"}, f'data:{{"error":"{SAID}","error_type":"overloaded"}}\n\n'),
    ("/generate", {"prompt": "abc"}, f'{{"error":"{SAID}","error_type":"overloaded"}}\n'),
    ("/v2/models/fake/generate_stream", {"text_input": "abc"}, f'data: {{"error":"{SAID}"}}\n\n'),
    ("/completion", {"prompt": "abc"}, LLAMA),
    ("/infill", {"input_prefix": "abc", "input_suffix": "d"}, LLAMA),
]


@pytest.mark.parametrize(("path", "body", "end"), ENDS, ids=[f"{path}-{i}" for i, (path, *_) in enumerate(ENDS)])
async def test_an_error_ends_a_stream_in_its_apis_words(start: Starter, path: str, body: Any, end: str) -> None:
    served = await start(FakeOptions(step_s=0.001))
    fleet = served.fake.fleet
    served.options.hung = True  # nothing ends by itself
    asked = body if path in ("/generate_stream", "/v2/models/fake/generate_stream") else {**body, "stream": True}
    answer = asyncio.create_task(served.post(path, asked))
    await until(lambda: fleet.open_requests or answer.done())
    fleet.end_all("gone")
    found = await answer
    end = end.replace("ID", found.headers["x-request-id"])
    assert found.status_code == 200 and found.text.endswith(end) and found.text.count(SAID) == 1, found.text
    assert served.context.gate.open == 0 and not fleet.open_requests
