"""Whatever is sent, 4xx in OpenAI's shape, nothing left behind."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, model_validator

from tests.pure.server.conftest import Served, Starter
from tokenmill.server.bodies import MOST_WHOLE, parse, validated
from tokenmill.server.errors import HttpError
from tokenmill.server.fields import few
from tokenmill.server.openai.schemas import CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]
ADDRESS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"")

BIG = [2**31, 2**63, 2**64, 2**100, -(2**63) - 1, 1e308]
NUMBERS: dict[str, list[Any]] = {
    "n": [0, -1, 129, True, 1.5, "2", *BIG],
    "best_of": [-1, 129, True, "2", *BIG],
    "max_tokens": [-1, True, 1.5, "5", [], *BIG],
    "min_tokens": [-1, True, 17, "1", 2**31],
    "logprobs": [-1, 21, "1", 2**63, 1.5],
    "prompt_logprobs": [-1, 21, True, 2**63],
    "temperature": [-0.1, 101, True, "1", [], -1e308, 1e308],
    "top_p": [0, -1, 1.1, True, "1", 2],
    "top_k": [-2, True, 1.5, "1", 2**31],
    "min_p": [-0.1, 1.1, True, "0"],
    "presence_penalty": [-2.1, 2.1, True, "0"],
    "frequency_penalty": [-2.1, 2.1, True, "0"],
    "repetition_penalty": [0, -1, 101, True, "1"],
    "length_penalty": [-101, 101, True],
    "seed": [-(2**63) - 1, 2**64, True, 1.5, "1", 2**200],
    "stop": ["", ["a"] * 17, ["a", ""], "x" * 257, [1], 5, True, {"a": 1}],
    "stop_token_ids": [[-1], [2**31], ["a"], [True], [1] * 257, 5],
    "bad_words": [[""], ["x" * 257], ["a"] * 1025, "a", ["x" * 200] * 41],
    "dry_sequence_breakers": [[""], ["x" * 41], ["a"] * 33, "a", ["x" * 40] * 7],
    "allowed_token_ids": [[], [-1], [2**31], [True], [300]],
    "logit_bias": [{"a": 1}, {"1": "x"}, {"-1": 1}, {"1": True}, [1], {"1e3": 1}, {"999999": 1}, {"7": 1, "07": 2}],
    "truncate_prompt_tokens": [-2, 0, True, "1"],
    "timeout": [0, -1, True, "1", 86_401],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": "yes"}, 5, {"include_usage": True}],
    "response_format": [{"type": "xml"}, "json", {"type": "json_schema"}, {}],
    "structured_outputs": [{"json": {}}, {"regex": "(a+)+$"}, 5, {"choice": []}, {"json": False}, {"regex": 0}, {}],
    "ignore_eos": [1, "true", []],
    "priority": [1, True, "0", 2**31],
    "request_id": ["", "a b", "x" * 129, "\u00e9", 5],
    "cache_salt": ["", "x" * 129, 5],
    "model": [5, "x" * 2000, "nope"],
    "use_beam_search": ["yes", 1],
    "echo": ["yes", 1],
}
PROMPTS: list[Any] = [
    *(None, "", [], [[]], [""], [-1], [300], [True], [1.5], [2**31], ["a", 5], {"a": 1}, 5, True, [[1], ["a"]]),
    *([None], ["a"] * 1025, [[1, -1]], [[1] * 5000]),
]
MESSAGES: list[Any] = [
    *(None, [], "x", [5], [{}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}], {"role": "user"}),
    *([{"role": role, "content": "x"}] for role in ("", " ", "wizard", "User")),
    *([{"role": role, "content": None}] for role in ("system", "developer", "user", "tool", "assistant")),
    [{"role": "user"}],
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [5]}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
]
BODIES: list[bytes] = [
    *(b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"{}", b"[" * 100_000, b'{"a":' * 100_000),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": Infinity}', b'{"prompt": "a", "seed": 1e999}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "a"} x', b'{"prompt": "a",}', b"{'prompt': 'a'}", b'{"prompt": "a\x00b"}'),
    b'{"prompt": "a", "unknown": NaN}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
]


def check_refused(served: Served, response: Any) -> None:
    assert 400 <= response.status_code < 500, (response.status_code, response.text[:500])
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (response.status_code, "context_length_exceeded")
    assert not ADDRESS.search(response.text)
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests


@pytest.mark.parametrize("field", NUMBERS)
async def test_extreme_values_are_refused(start: Starter, field: str) -> None:
    served = await start()
    for value in NUMBERS[field]:
        response = await served.post(TEXT, {"prompt": "abc", "max_tokens": 4, field: value})
        check_refused(served, response)
        assert response.json()["error"]["param"] or field == "model", (value, response.text)


def test_the_table_is_long_enough() -> None:
    assert sum(map(len, NUMBERS.values())) >= 120


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: repr(p)[:20])
async def test_bad_prompts(start: Starter, prompt: Any) -> None:
    served = await start()
    check_refused(served, await served.post(TEXT, {"prompt": prompt, "max_tokens": 2}))
    check_refused(served, await served.post("/v1/embeddings", {"input": prompt}))


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda p: repr(p)[:20])
async def test_bad_messages(start: Starter, messages: Any) -> None:
    served = await start()
    check_refused(served, await served.post(CHAT, {"messages": messages, "max_tokens": 2}))


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:20]))
async def test_malformed_bodies(start: Starter, body: bytes) -> None:
    served = await start()
    for path in (TEXT, CHAT, "/v1/embeddings", "/detokenize"):
        check_refused(served, await served.client.post(path, content=body, headers=JSON))


async def test_greedy_copies_and_streams_of_what_cannot_stream(start: Starter) -> None:
    served = await start()
    for extra in (
        {"n": 2, "temperature": 0},
        {"stream": True, "prompt_logprobs": 1},
    ):
        check_refused(served, await served.post(TEXT, {"prompt": "abc", **extra}))
    both = {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}
    check_refused(served, await served.post(TEXT, {"prompt": "abc", **both}))
    check_refused(served, await served.post(CHAT, {"messages": HELLO, "top_logprobs": 2}))


async def test_unusual_values_that_are_right(start: Starter) -> None:
    served = await start()
    fine = [
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"temperature": 2},
        {"top_k": -1},
        {"logit_bias": {"5": -1000.0}},
        {"stop": ["a" * 256] * 16},
        {"n": 128, "max_tokens": 1, "temperature": 1.0},
        {"logprobs": 0},
        {"stream_options": None, "stream": None, "echo": None, "n": None, "temperature": None, "seed": None},
        {"truncate_prompt_tokens": -1},
    ]
    for extra in fine:
        response = await served.post(TEXT, {"prompt": "abc", "max_tokens": 2, **extra})
        assert response.status_code == 200, (extra, response.text)


def test_whole_numbers_are_mended_in_a_few_readings() -> None:
    """16.0 is an integer in JSON. However many there are, and wherever: a body is read again, not once for each."""
    readings = []

    class Inner(BaseModel):
        number: Annotated[int, Field(strict=True)] | None = None
        more: Annotated[list[Inner], few(99)] = Field(default_factory=list)

    class Outer(Inner):
        @model_validator(mode="before")
        @classmethod
        def count(cls, value: Any) -> Any:
            readings.append(1)
            return value

    def nested(depth: int) -> dict[str, Any]:
        return {"number": 7.0, "more": [nested(depth - 1) for _ in range(4)]} if depth else {"number": 3}

    asked = validated(Outer, nested(4))
    assert all(type(each.number) is int for inner in asked.more for each in (inner, *inner.more))
    assert 1 < len(readings) <= MOST_WHOLE
    with pytest.raises(ValidationError):
        validated(Outer, {"more": [{"number": 7.0}, {"number": 7.5}]})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_no_combination_of_values_is_a_server_error(start: Starter, data: st.DataObject) -> None:
    served = start.open[0] if start.open else await start()
    names = st.sampled_from(
        [*NUMBERS, "tools", "messages", "prompt", "chat_template_kwargs", "documents", "top_logprobs"]
    )
    body = {"prompt": "abc", "messages": HELLO, "max_tokens": 2} | data.draw(
        st.dictionaries(names, VALUES | st.sampled_from([v for vs in NUMBERS.values() for v in vs]), max_size=4)
    )
    for path in (TEXT, CHAT):
        response = await served.post(path, body)
        assert response.status_code < 500, (body, response.text)
        assert not ADDRESS.search(response.text)
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests


@pytest.mark.parametrize(
    "half", [rb"\ud83d", rb"\ud83d x", rb"\udc00", rb"\\\ud83d\ud83d\ude00", rb"\ud83d\ude00\ude00"]
)
def test_half_of_a_character_is_called_so(half: bytes) -> None:
    """JavaScript writes one where a text was cut within an emoji. The reader would call it the body's end."""
    with pytest.raises(HttpError, match=r"\\ud83d|\\udc00|\\ude00") as found:
        parse(b'{"prompt": "' + half + b'"}', CompletionRequest)
    assert "half of a character" in found.value.message
    assert parse(rb'{"prompt": "\ud83d\ude00\\ud83d"}', CompletionRequest).prompt == "\U0001f600\\ud83d"
