"""What test_page_engine.py and other tests share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.web.conftest import WebServer


@contextmanager
def load(server: WebServer, users: int = 10, tokens: int = 40, **headers: str) -> Iterator[None]:
    """So many users ask again and again until the end of the block."""
    over = threading.Event()

    def user(number: int) -> None:
        body = {"prompt": "grain " * (number + 1), "max_tokens": tokens}
        while not over.is_set():
            httpx.post(f"{server.url}v1/completions", json=body, headers=headers, timeout=120).raise_for_status()

    with ThreadPoolExecutor(users) as pool:
        work = [pool.submit(user, number) for number in range(users)]
        try:
            yield
        finally:
            over.set()
        for one in work:
            one.result()


def wait_for_rows(page: Any, least: int) -> None:
    page.wait_for_function("n => document.querySelectorAll('.requests tbody tr').length >= n", arg=least)
