"""A server without descriptors, an engine that stops at any time, a server that is killed: real processes."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cpu.server.conftest import Running
from tests.cpu.server.server_process_helpers import wait_for
from tokenmill.process.vitals import is_stopped, state_of

Launch = Callable[..., Running]
BODY: dict[str, Any] = {"prompt": [20, 40, 60], "max_tokens": 16, "ignore_eos": True, "temperature": 0}
LONG_S = 120.0


@pytest.fixture(scope="module")
def survivor(launch: Launch) -> Running:
    return launch("--read-timeout", "600", "--watchdog-timeout", "2", "--max-restarts", "50")


def text(client: httpx.Client, url: str) -> str:
    answer = client.post(url + "/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_an_engine_comes_back_although_connections_hold_every_descriptor(survivor: Running) -> None:
    running = survivor
    server, address = running.process.pid, urlsplit(running.url)
    held: list[socket.socket] = []
    with httpx.Client(timeout=60) as kept:  # its connection exists before
        calm = text(kept, running.url)
        (engine,) = running.children()
        used = len(os.listdir(f"/proc/{server}/fd"))
        soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (used + 20, hard))
        for _ in range(60):
            held.append(socket.create_connection((address.hostname, address.port)))
        wait_for(lambda: len(os.listdir(f"/proc/{server}/fd")) >= used + 15, 120)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: kept.get(running.url + "/health").status_code == 503, 120)
        wait_for(lambda: kept.get(running.url + "/health").status_code == 200, LONG_S)
        assert text(kept, running.url) == calm
        for sock in held:
            sock.close()
    resource.prlimit(server, resource.RLIMIT_NOFILE, (soft, hard))
    assert text(running.client, running.url) == calm


def test_an_engine_that_is_stopped_while_it_restarts_is_replaced(survivor: Running) -> None:
    running = survivor
    calm = text(running.client, running.url)
    (first,) = running.children()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: running.children() not in ([], [first]), 120)
    (second,) = running.children()
    os.kill(second, signal.SIGSTOP)
    wait_for(lambda: running.get("/health").status_code == 503, 120)
    wait_for(lambda: gone(second), LONG_S)
    wait_for(lambda: running.get("/health").status_code == 200, LONG_S)
    assert text(running.client, running.url) == calm


@pytest.mark.parametrize("stopped", [True, False])
def test_nothing_is_left_of_a_server_that_is_killed(launch: Launch, stopped: bool) -> None:
    """Not even an engine that was stopped, and no folder."""
    before = set(Path("/tmp").glob("tokenmill-*"))
    running = launch()
    assert running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}).status_code == 200
    family = running.family()
    (engine,) = running.children()
    if stopped:
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: is_stopped(engine), 120)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    began = time.monotonic()
    wait_for(lambda: all(gone(pid) for pid in family), 120)
    print(f"all {len(family)} processes were gone after {time.monotonic() - began:.2f} s")
    assert set(Path("/tmp").glob("tokenmill-*")) <= before
