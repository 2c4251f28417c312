"""Reading prompts has a budget; who is to blame when it is over is told apart."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.pure.server.conftest import Starter, until
from tokenmill.core.errors import UserError
from tokenmill.engine.steps.admission import BusyError
from tokenmill.server import bodies, text_workers
from tokenmill.server.errors import describe_error
from tokenmill.server.openai import embeddings
from tokenmill.server.scoring import scores
from tokenmill.server.text_workers import LONG, LONG_THREADS, THREADS, TextWorkers
from tokenmill.testing.fake_generator import FakeOptions, byte_tokenizer
from tokenmill.testing.hostile import TALK, VALID, path_of
from tokenmill.text.codec import Tokenizer


async def test_work_that_takes_too_long_is_refused() -> None:
    workers = TextWorkers(None, 100, budget_s=0.05)
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    try:
        with pytest.raises(UserError, match="shorten it") as found:
            await workers.run_in_thread(burn)
    finally:
        ended.set()
        workers.close()
    assert not isinstance(found.value, BusyError) and describe_error(found.value).status == 400


async def test_work_that_had_to_wait_is_not_to_blame() -> None:
    workers = TextWorkers(None, 100, budget_s=0.3)
    ended = threading.Event()
    before = [asyncio.create_task(workers.run_in_thread(ended.wait)) for _ in range(THREADS)]
    await asyncio.sleep(0)  # they take the threads
    try:
        with pytest.raises(BusyError) as found:
            await workers.run_in_thread(time.monotonic)
        assert all(isinstance(error, BusyError) for error in await asyncio.gather(*before, return_exceptions=True))
    finally:
        ended.set()
        workers.close()
    refusal = describe_error(found.value)
    assert refusal.status == 503 and refusal.retry_after == 1


async def test_others_work_is_not_counted() -> None:
    """The rest of the process is busy; the thread that reads the prompt only waits."""
    workers = TextWorkers(None, 100, budget_s=0.4)
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    other = threading.Thread(target=burn)
    other.start()
    try:
        with pytest.raises(BusyError):
            await workers.run_in_thread(ended.wait)
    finally:
        ended.set()
        other.join()
        workers.close()


async def test_an_overdue_prompt_is_told_to_come_again(start: Starter) -> None:
    served = await start(text_timeout=0.3)
    ended = threading.Event()
    for _ in range(THREADS):
        served.context.text.threads.submit(ended.wait)
    try:
        answer = await served.post("/v1/completions", {"prompt": "abc", "max_tokens": 1})
    finally:
        ended.set()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert served.context.gate.open == 0


async def test_bodies_are_read_one_after_the_other_and_long_ones_apart(start: Starter) -> None:
    """Reading holds Python's lock, so two at once only keep the event loop from it."""
    made, ended = (await start()).context.bodies, threading.Event()
    begun: list[int] = []

    def read(size: int) -> None:
        begun.append(size)
        ended.wait()

    sizes = [bodies.LONG + 1, bodies.SMALL + 1]
    work = [asyncio.create_task(made.run_in_thread(size, lambda size=size: read(size))) for size in sizes * 8]
    await until(lambda: len(begun) == 2)
    assert sorted(begun) == sorted(sizes) and await made.run_in_thread(bodies.SMALL, lambda: 7) == 7
    assert (made.slow._work_queue.qsize(), made.threads._work_queue.qsize()) == (7, 7) and len(begun) == 2
    ended.set()
    await asyncio.gather(*work)
    assert sorted(begun) == sorted(sizes * 8)


async def test_long_texts_make_only_each_other_wait(start: Starter) -> None:
    served = await start(text_timeout=0.5)
    ended = threading.Event()
    workers = served.context.text
    long = [asyncio.create_task(workers.run_in_thread(ended.wait, LONG + 1)) for _ in range(THREADS + LONG_THREADS)]
    await until(lambda: workers.slow._work_queue.qsize() == THREADS)
    try:
        for path, body in {
            "/v1/completions": {"prompt": "abc", "max_tokens": 1},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            "/tokenize": {"prompt": "abc"},
        }.items():
            assert (await served.post(path, body)).status_code == 200, path
        for path, body in {
            "/tokenize": {"prompt": "a" * (LONG + 1)},
            "/v1/completions": {"prompt": "a" * (LONG + 1), "max_tokens": 1, "truncate_prompt_tokens": 1},
            "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "a" * LONG}]},
            "/apply-template": {"messages": [{"role": "user", "content": "a" * LONG}]},
        }.items():
            assert (await served.post(path, body)).status_code == 503, path
    finally:
        ended.set()
        await asyncio.gather(*long, return_exceptions=True)


async def test_texts_that_are_only_counted_or_cut_have_a_ceiling(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_workers, "MOST", 10)
    served = await start()
    for path, body in {
        "/tokenize": {"prompt": "a" * 11},
        "/v1/completions": {"prompt": "a" * 11, "max_tokens": 1, "truncate_prompt_tokens": 1},
        "/v1/embeddings": {"input": "a" * 11, "truncate_prompt_tokens": 1},
    }.items():
        answer = await served.post(path, body)
        assert answer.status_code == 400 and "longer than the limit of 10 characters" in answer.text, path
    assert (await served.post("/tokenize", {"content": "a" * 11})).status_code == 400
    assert (await served.post("/tokenize", {"prompt": "a" * 10})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_tokenised_or_written_on_the_loop(
    start: Starter, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Every POST route with a body that is answered, and those whose work lies deeper in the body. (What is small is
    done at once: here nothing is.)"""
    monkeypatch.setattr(bodies, "SMALL", 0)
    loop, found, script = threading.current_thread(), set(), "<think>ab</think>x"

    def watch(holder: Any, name: str) -> None:
        work = getattr(holder, name)

        def watched(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is loop and [script] not in args:  # the fake engine reads that one
                found.add(name)
            return work(*args, **more)

        monkeypatch.setattr(holder, name, watched)

    served = await start(FakeOptions(script=script), reasoning_parser="think")
    watch(Tokenizer, "encode_batch")
    watch(embeddings, "_encode")
    watch(scores, "cosine")
    deeper: list[tuple[str, dict[str, Any]]] = [
        ("/classify", {"input": "a", "labels": ["b", "c"]}),
        ("/score", {"text_1": "a", "text_2": ["b", "c"], "method": "likelihood"}),
        ("/rerank", {"query": "a", "documents": ["b"], "method": "likelihood"}),
        ("/v1/chat/completions", {"messages": TALK, "n": 2, "temperature": 1}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "fake", "messages": TALK, "max_tokens": 99}),
        ("/api/chat", {"model": "fake", "messages": TALK}),
    ]
    for path, body in [*((path_of(route), body) for route, (body, _) in VALID.items()), *deeper]:
        asked = {**body, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {})}
        answer = await served.post(path, asked)
        assert answer.status_code < 500 or answer.status_code == 501, (path, answer.text)
        assert not found, path


def test_a_text_that_the_library_cannot_split_is_not_called_a_damaged_file_alone() -> None:
    class PanicException(BaseException):
        """As the library raises it."""

    class Inner:
        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise PanicException("retry-limit-in-match over")

    tokenizer = byte_tokenizer()
    tokenizer._inner = Inner()  # type: ignore[assignment]
    with pytest.raises(UserError, match="too long a run"):
        tokenizer.encode("a" * 10)


IDS = {"prompt": [5, 6], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/completions", {**IDS, "suffix": "a"}, "suffix"),
        ("/v1/completions", {**IDS, "stop": ["a"]}, "stop"),
        ("/v1/completions", {**IDS, "bad_words": ["a"]}, "bad_words"),
        ("/v1/completions", {**IDS, "dry_multiplier": 1, "dry_sequence_breakers": ["a"]}, "dry_sequence_breakers"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/v1/responses", {"input": "a"}, "input"),
        ("/v1/responses/input_tokens", {"input": "a"}, "input"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/embeddings", {"input": "a"}, "input"),
        ("/api/generate", {"model": "fake", "prompt": "a", "suffix": "b", "stream": False}, None),
        ("/api/generate", {"model": "fake", "prompt": "a", "stream": False}, None),
        ("/generate", {"inputs": "a"}, None),
    ],
)
async def test_without_a_tokenizer_text_is_refused_by_its_field(
    start: Starter, path: str, body: dict[str, Any], param: str | None
) -> None:
    served = await start(FakeOptions(blind=True))
    assert (await served.post("/v1/completions", IDS)).status_code == 200
    answer = await served.post(path, body)
    assert answer.status_code == 400 and ("no tokenizer" in answer.text or "without a tokenizer" in answer.text)
    assert param is None or answer.json()["error"]["param"] == param
