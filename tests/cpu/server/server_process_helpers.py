"""What test_server_process.py and other tests share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx


class Count:
    """How often it was called."""

    number = 0

    def __call__(self) -> None:
        self.number += 1


def stream_text(url: str, body: dict[str, Any], on_chunk: Callable[[], None] = lambda: None) -> str:
    """The whole text of a stream; asserts that it ended well."""
    text, ended = "", False
    with httpx.Client(timeout=120) as client:
        with client.stream("POST", url + "/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    on_chunk()
    assert ended
    return text


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
