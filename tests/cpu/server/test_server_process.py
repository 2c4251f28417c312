"""A real server with a real engine process: answers, deaths, hangs, drains."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.cpu.server.conftest import Running
from tests.cpu.server.server_process_helpers import Count, stream_text, wait_for

Launch = Callable[..., Running]
HELLO = [{"role": "user", "content": "Tell me about the mill"}]


@pytest.fixture(scope="module")
def served(launch: Launch) -> Running:
    return launch("--max-restarts", "50", "--watchdog-timeout", "3")


def test_the_openai_client_works_unmodified(served: Running) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=HELLO,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 12
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        again = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
        assert again.usage.prompt_tokens_details.cached_tokens >= 16
        assert again.choices[0].message.content == text
        many = client.completions.create(
            model="tiny", prompt=["The mill", "A windy day"], n=3, max_tokens=5, temperature=1
        )
        assert len(many.choices) == 6
        scored = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=4
        )
        assert all(len(e.top_logprobs) == 4 for e in scored.choices[0].logprobs.content)
        vectors = client.embeddings.create(model="tiny", input=["one", "two"])
        assert abs(sum(x * x for x in vectors.data[0].embedding) - 1) < 1e-4
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="tiny", prompt="x", suffix="y")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="none", prompt="x")
        choice = client.completions.create(
            model="tiny", prompt="x", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert choice.choices[0].text in ("yes", "no")


@pytest.mark.parametrize("extra", [{"use_beam_search": True, "n": 3}, {"best_of": 3, "temperature": 1, "seed": 2}])
def test_chosen_outputs_can_be_streamed(served: Running, extra: dict[str, Any]) -> None:
    body = {"prompt": "The mill", "max_tokens": 9, "temperature": 0, "ignore_eos": True, **extra}
    whole = served.post("/v1/completions", body).json()["choices"]
    assert stream_text(served.url, body) == "".join(choice["text"] for choice in whole)
    chat = {name: value for name, value in body.items() if name != "prompt"} | {"messages": HELLO}
    said = served.post("/v1/chat/completions", chat).json()["choices"]
    streamed = served.post("/v1/chat/completions", {**chat, "stream": True}).text
    assert streamed.count('"finish_reason":"length"') == len(said) == extra.get("n", 1)


def test_a_killed_engine_costs_a_pause_and_nothing_else(served: Running) -> None:
    bodies = [
        {
            "prompt": f"The mill number {i}",
            "max_tokens": 120,
            "ignore_eos": True,
            "seed": i,
            "temperature": float(i % 2),
        }
        for i in range(32)
    ]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        calm = list(pool.map(lambda body: stream_text(served.url, body), bodies))
        before = served.metric("tokenmill:engine_restarts")
        seen = Count()
        futures = [pool.submit(stream_text, served.url, body, seen) for body in bodies]
        wait_for(lambda: seen.number > 32 * 10, 120)
        (engine,) = served.children()
        os.kill(engine, signal.SIGKILL)
        down = wait_for(lambda: served.get("/health").status_code == 503, 120)
        up = wait_for(lambda: served.get("/health").status_code == 200, 120)
        texts = [future.result() for future in futures]
    assert texts == calm
    assert served.metric("tokenmill:engine_restarts") == before + 1
    print(f"/health said so after {down:.2f} s, the engine was back after {up:.2f} s")


def test_a_stopped_engine_is_noticed_and_replaced(served: Running) -> None:
    body = {"prompt": "The mill", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    calm = stream_text(served.url, body)
    seen = Count()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(stream_text, served.url, body, seen)
        wait_for(lambda: seen.number > 20, 120)
        (engine,) = served.children()
        os.kill(engine, signal.SIGSTOP)
        noticed = wait_for(lambda: served.get("/health").status_code == 503, 120)
        assert future.result() == calm
    print(f"noticed after {noticed:.2f} s")
    wait_for(lambda: served.children() not in ([engine], []), 120)  # it may have said all before it was stopped


def test_a_client_that_leaves_frees_its_sequence(served: Running) -> None:
    for _ in range(10):
        body = {"prompt": "The mill", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2, "temperature": 1}
        with served.client.stream("POST", served.url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_for(lambda: served.get("/load").json()["server_load"] == 0, 120)
    wait_for(lambda: served.metric("vllm:num_requests_running") == 0, 120)
    assert served.metric("vllm:kv_cache_usage_perc") == 0


def test_whole_answers_are_given_up_too_when_the_client_leaves(served: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            served.url + "/v1/completions",
            json={"prompt": "The mill", "max_tokens": 1900, "ignore_eos": True},
            timeout=httpx.Timeout(60, read=0.15),
        )
    wait_for(lambda: served.get("/load").json()["server_load"] == 0, 120)


def test_nothing_of_a_prompt_is_in_the_log(served: Running) -> None:
    served.post("/v1/completions", {"prompt": "CANARY-51", "max_tokens": 2})
    served.post("/v1/completions", {"prompt": "CANARY-51", "temperature": "CANARY-51"})
    assert "CANARY" not in served.log.read_text()


def test_a_signal_lets_running_requests_finish(launch: Launch) -> None:
    running = launch("--shutdown-timeout", "30", "--kernels", "reference")  # slow enough to be interrupted
    body = {"prompt": "The mill", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    calm = stream_text(running.url, body)
    seen = Count()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(stream_text, running.url, body, seen)
        wait_for(lambda: seen.number > 5, 120)
        engines = running.children()
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: running.get("/ready").status_code == 503, 120)
        refused = running.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert running.get("/ready").status_code == 503
        assert future.result() == calm
    assert running.process.wait(120) == 0
    wait_for(lambda: not any(alive(pid) for pid in engines), 120)


def test_without_grace_or_at_the_second_signal_it_ends_at_once(launch: Launch) -> None:
    for flags, signals in ((("--shutdown-timeout", "0"), 1), (("--shutdown-timeout", "60"), 2)):
        running = launch(*flags)
        body = {"prompt": "The mill", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with running.client.stream("POST", running.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            engines = running.children()
            began = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            if signals == 2:  # (two signals at once may arrive as one)
                wait_for(lambda r=running: r.get("/ready").status_code == 503, 120)
                running.process.send_signal(signal.SIGTERM)
            rest = list(lines)
            assert "data: [DONE]" in rest and any('"error"' in line for line in rest)
            assert running.process.wait(120) == 0
            print(f"ended after {time.monotonic() - began:.2f} s")
        wait_for(lambda pids=engines: not any(alive(pid) for pid in pids), 120)


def test_too_many_deaths_end_the_server(launch: Launch) -> None:
    running = launch("--max-restarts", "1")
    for _ in range(2):
        wait_for(lambda: running.process.poll() is not None or running.get("/health").status_code == 200, 120)
        (engine,) = running.children()
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda pid=engine: not alive(pid), 120)
        wait_for(lambda: running.process.poll() is not None or down(running), 120)
    assert running.process.wait(120) == 3


def test_the_engine_counts_what_it_does(served: Running) -> None:
    steps, flops = served.metric("tokenmill:steps_total"), served.metric("vllm:estimated_flops_per_gpu_total")
    served.post("/v1/completions", {"prompt": "The mill", "max_tokens": 50, "ignore_eos": True})
    wait_for(lambda: served.metric("tokenmill:steps_total") >= steps + 50, 120)
    assert served.metric("vllm:estimated_flops_per_gpu_total") > flops
    assert served.metric("vllm:estimated_read_bytes_per_gpu_total") > 50 * 100_000  # the weights, once a step
    wait_for(lambda: served.metric("tokenmill:kernel_calls_total") > 50, 120)
    assert served.metric("tokenmill:engine_resident_memory_bytes") > 10 << 20
    assert served.metric("tokenmill:engine_open_fds") > 3


def test_a_port_in_use_is_told_before_loading(served: Running) -> None:
    port = served.url.rpartition(":")[2]
    found = subprocess.run(
        [*served.process.args[:3], "serve", served.process.args[4], "--port", port],  # type: ignore[index,list-item]
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert found.returncode == 2 and "Cannot listen" in found.stderr and "Traceback" not in found.stderr


def down(running: Running) -> bool:
    """Does the server say that its engine is gone, or is it gone itself?"""
    try:
        return running.get("/health").status_code == 503
    except httpx.TransportError:
        return True


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
