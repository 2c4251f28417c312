"""A price list, and what each API's usage then says."""

from __future__ import annotations

import json

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.core.errors import ParameterError
from tokenmill.server.prices import Prices, read_prices

USER = [{"role": "user", "content": "x"}]


def test_a_list_is_read_whole_or_refused() -> None:
    assert read_prices(None) is None
    assert read_prices("prompt=0.1, output=0.4") == Prices(0.1, 0.4, 0.1)
    assert read_prices("cached=0,prompt=1e1") == Prices(10.0, 0.0, 0.0)
    for text in ("", "0.1", "prompt", "prompt=", "prompt=x", "prompt=-1", "prompt=nan", "output=inf", "input=1",
                 "prompt=1,prompt=2", "prompt=1,", "prompt=1;output=2"):  # fmt: skip
        with pytest.raises(ParameterError, match="--prices"):
            read_prices(text)


def test_the_sum() -> None:
    assert Prices(1.0, 10.0, 0.25).cost(1000, 400, 50) == pytest.approx((600 + 100 + 500) / 1e6)


async def test_every_api_with_usage_says_it(start: Starter) -> None:
    served = await start(prices="prompt=1,output=10,cached=0.5")
    asked = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 4},
        "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
        "/v1/responses": {"input": "abc", "max_output_tokens": 16},
        "/v1/messages": {"messages": USER, "max_tokens": 4},
        "/v1/embeddings": {"input": "abc"},
        "/score": {"text_1": "a", "text_2": "b"},
    }
    for path, body in asked.items():
        usage = (await served.post(path, {"model": "fake", **body})).json()["usage"]
        given = usage.get("prompt_tokens", usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0))
        made = usage.get("completion_tokens", usage.get("output_tokens", 0))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
        if path == "/v1/responses":
            given = usage["input_tokens"]
        assert usage["cost"] == pytest.approx((given - cached + cached / 2 + 10 * made) / 1e6), path
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    lines = (await served.post("/v1/completions", body)).text.split("\n\n")
    last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert last["usage"]["cost"] == pytest.approx((3 + 40) / 1e6)


async def test_no_prices_no_cost(start: Starter) -> None:
    served = await start()
    answer = await served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4})
    assert "cost" not in answer.json()["usage"]
