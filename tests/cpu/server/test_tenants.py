"""Keys have cached prompts of their own, unless they are told to share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cpu.server.conftest import Running

KEYS = ("first-key-0123456789", "second-key-0123456789")
PROMPT = list(range(40, 140))


def cached(running: Running, key: str, **fields: str) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    answer = running.client.post(running.url + "/v1/completions", json=body, headers={"x-api-key": key})
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_cached_prompts_belong_to_a_key(launch: Callable[..., Running], shared: bool) -> None:
    flags = ["--share-prefix-cache"] if shared else []
    running = launch("--engines", "0", "--api-key", KEYS[0], "--api-key", KEYS[1], *flags)
    assert cached(running, KEYS[0]) == 0
    assert cached(running, KEYS[0]) >= 90
    assert (cached(running, KEYS[1]) >= 90) is shared
    assert cached(running, KEYS[1]) >= 90
    assert cached(running, KEYS[1], cache_salt="mine") == 0  # a salt divides a key's prompts further
