"""Small promises of OpenAI's and vLLM's APIs that strict clients hold a server to."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.server.openai.tools import arguments_schema
from tokenmill.testing.fake_generator import FakeOptions

TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
TEXT = {"prompt": "Hi", "max_tokens": 5}
ASKED = {"/v1/chat/completions": TALK, "/v1/completions": TEXT}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", ASKED)
async def test_one_fingerprint_in_every_answer_and_chunk(start: Starter, path: str) -> None:
    served = await start()
    whole = (await served.post(path, ASKED[path])).json()["system_fingerprint"]
    assert whole.startswith("fp_") and len(whole) == 11
    for more in ({}, {"logprobs": 1 if "prompt" in ASKED[path] else True}):
        found = events((await served.post(path, {**ASKED[path], "stream": True, **more})).text)
        assert {chunk["system_fingerprint"] for chunk in found} == {whole}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_interval": 3}])
async def test_a_running_usage_rises_from_nothing(start: Starter, path: str, more: dict[str, Any]) -> None:
    served = await start()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ASKED[path], "stream": True, "stream_options": options, "ignore_eos": True, **more}
    usage = [chunk["usage"] for chunk in events((await served.post(path, body)).text)]
    counts = [each["completion_tokens"] for each in usage]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 5 * more.get("n", 1)
    assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in usage)
    if path == "/v1/chat/completions":
        assert counts[0] == 0
    assert counts[0] <= more.get("stream_interval", 1)


async def test_best_of_nothing_is_best_of_one(start: Starter) -> None:
    served = await start()
    assert len((await served.post("/v1/completions", {**TEXT, "best_of": 0})).json()["choices"]) == 1


@pytest.mark.parametrize(("path", "field", "more"), [
    ("/v1/completions", "n", {"prompt": "a"}), ("/v1/completions", "best_of", {"prompt": "a"}),
    ("/v1/completions", "logprobs", {"prompt": "a"}), ("/v1/completions", "prompt_logprobs", {"prompt": "a"}),
    ("/v1/chat/completions", "n", TALK), ("/v1/chat/completions", "top_logprobs", {**TALK, "logprobs": True}),
    ("/v1/chat/completions", "prompt_logprobs", TALK), ("/v1/responses", "top_logprobs", {"input": "a"}),
    ("/completion", "n_probs", {"prompt": "a"}),
])  # fmt: skip
async def test_a_ceiling_names_the_field_that_is_over_it(
    start: Starter, path: str, field: str, more: dict[str, Any]
) -> None:
    served = await start(max_n=3, max_logprobs=3)
    error = (await served.post(path, {**more, field: 4})).json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field} is more than this server allows (3)")


async def test_log_probabilities_up_to_the_vocabulary(start: Starter) -> None:
    served = await start(max_logprobs=-1)
    size = served.context.backend.info.vocab_size
    assert size > 20
    for wanted in (-1, size, 10**6):
        chat = (await served.post("/v1/chat/completions", {**TALK, "logprobs": True, "top_logprobs": wanted})).json()
        assert len(chat["choices"][0]["logprobs"]["content"]) == 5
        text = await served.post("/v1/completions", {**TEXT, "logprobs": wanted, "prompt_logprobs": wanted})
        assert text.status_code == 200
    few = await start()
    for wanted in (-1, 21):
        answer = await few.post("/v1/completions", {**TEXT, "logprobs": wanted})
        assert answer.status_code == 400 and "(20)" in answer.json()["error"]["message"]
    assert (await few.post("/v1/completions", {**TEXT, "logprobs": -2})).status_code == 400


@pytest.mark.parametrize(
    "given", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"required": []}]
)
def test_a_function_that_names_no_arguments_takes_none(given: Any) -> None:
    assert arguments_schema(given) == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "object", "properties": {"a": {}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "additionalProperties": True},
        {"type": "string"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}},
        {"required": ["a"]},
    ],
)
def test_a_function_that_names_some_keeps_its_schema(given: Any) -> None:
    assert arguments_schema(given) is given


async def test_paths_with_and_without_the_root(start: Starter) -> None:
    served = await start(FakeOptions(), root_path="/llm/")
    for root, end in product(("", "/llm"), ("", "/")):  # nobody is sent elsewhere
        assert (await served.client.get(f"{root}/v1/models{end}")).json()["object"] == "list"
        assert (await served.post(f"{root}/v1/completions{end}", TEXT)).status_code == 200
        assert isinstance((await served.post(f"{root}/api/chat{end}", {})).json()["error"], str)
    assert (await served.client.get("/llmx/v1/models")).status_code == 404
    assert (await served.client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
