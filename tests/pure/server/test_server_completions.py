"""Completions, embeddings and the small endpoints: every form of prompt, echo, columns of log-probabilities."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest

from tests.pure.server.conftest import Starter
from tests.pure.server.server_chat_helpers import client, events
from tokenmill.core.request import TokenLogprob
from tokenmill.engine.running.wire import Add
from tokenmill.server.openai.logprobs import CompletionColumns, TokenNames
from tokenmill.testing.fake_generator import FakeOptions, byte_tokenizer

PATH = "/v1/completions"


async def test_batches_of_every_kind_of_prompt(start: Starter) -> None:
    served = await start()
    prompts = ["one", "two", [5, 6, 7]]
    answer = (await served.post(PATH, {"prompt": ["one", "two"], "n": 2, "max_tokens": 3, "temperature": 1})).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 12 and answer["usage"]["prompt_tokens"] == 6
    mixed = (await served.post(PATH, {"prompt": prompts, "max_tokens": 2, "return_token_ids": True})).json()
    assert mixed["choices"][2]["prompt_token_ids"] == [5, 6, 7]
    flat = (await served.post(PATH, {"prompt": [5, 6, 7], "max_tokens": 2})).json()
    assert len(flat["choices"]) == 1 and flat["usage"]["prompt_tokens"] == 3
    assert (await served.post(PATH, {"prompt": "x"})).json()["usage"]["completion_tokens"] == 16


async def test_streamed_batch_says_the_same(start: Starter) -> None:
    served = await start()
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 7, "seed": 9, "temperature": 1, "echo": True}
    whole = (await served.post(PATH, body)).json()
    chunks = events((await served.post(PATH, {**body, "stream": True})).text)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == "length"


async def test_echo_with_logprobs_scores_the_prompt(start: Starter) -> None:
    served = await start()
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = (await served.post(PATH, body)).json()["choices"]
    columns = choice["logprobs"]
    assert choice["text"].startswith("abc") and "".join(columns["tokens"]) == choice["text"]
    assert columns["token_logprobs"][0] is None and columns["token_logprobs"][1:3] == [-1.0, -1.0]
    assert columns["text_offset"] == [0, 1, 2, 3, 4]
    only = (await served.post(PATH, {**body, "max_tokens": 0})).json()
    assert only["choices"][0]["text"] == "abc" and only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_parts_of_characters_have_names_and_places_of_their_own(start: Starter, stream: bool) -> None:
    served = await start(FakeOptions(script="é水a"))
    ids = served.context.backend.info.tokenizer.encode("é水", add_special_tokens=False)
    assert len(ids) == 5
    for echo in (False, True):
        body = {"prompt": "é", "max_tokens": 6, "logprobs": 2, "echo": echo, "stream": stream}
        answer = await served.post(PATH, body)
        told = events(answer.text) if stream else [answer.json()]
        columns = [each["choices"][0]["logprobs"] for each in told if each["choices"][0]["logprobs"]]
        names = [name for each in columns for name in each["tokens"]]
        assert names[-6:] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe6", "bytes:\\xb0", "bytes:\\xb4", "a"]
        assert [n for each in columns for n in each["text_offset"]] == [0] * 2 * echo + [
            echo + n for n in (0, 0, 1, 1, 1, 2)
        ]
        assert all(len(likely) >= 2 for each in columns for likely in each["top_logprobs"][2 * echo :])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("prompt", ["b<|im_start|>c<|im_end|>", [98, 0xC3]])
async def test_places_point_into_the_echoed_text(
    start: Starter, prompt: str | list[int], skip: bool, stream: bool
) -> None:
    served = await start(FakeOptions(script="xyz"))
    tokenizer = served.context.backend.info.tokenizer
    if isinstance(prompt, list):  # it ends inside a character
        prompt = [next(i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte])) for byte in prompt]
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 1, "echo": True, "skip_special_tokens": skip}
    answer = await served.post(PATH, {**body, "stream": stream})
    told = [each["choices"][0] for each in (events(answer.text) if stream else [answer.json()])]
    text = "".join(each["text"] for each in told)
    columns = [each["logprobs"] for each in told if each["logprobs"]]
    names = [name for each in columns for name in each["tokens"]]
    places = [place for each in columns for place in each["text_offset"]]
    whole = [(name, place) for name, place in zip(names, places, strict=True) if not name.startswith("bytes:")]
    assert whole and all(text.startswith(name, place) for name, place in whole), (text, whole)


def test_a_name_that_two_tokens_share_is_the_chosen_one() -> None:
    row = {7: TokenLogprob(-3.0, 3, "x"), 5: TokenLogprob(-1.0, 1, "x"), 6: TokenLogprob(-2.0, 2, "y")}
    columns = CompletionColumns(TokenNames(byte_tokenizer(()), False), 2, None).take([row], [7])
    assert columns["top_logprobs"] == [{"x": -3.0, "y": -2.0}]


async def test_completion_logprobs_with_the_client(start: Starter) -> None:
    served = await start()
    answer = await client(served).completions.create(model="fake", prompt="abc", max_tokens=3, logprobs=2)
    columns = answer.choices[0].logprobs
    assert len(columns.tokens) == len(columns.top_logprobs) == 3 and len(columns.top_logprobs[0]) == 2
    chunks = [
        chunk
        async for chunk in await client(served).completions.create(
            model="fake", prompt="abc", max_tokens=3, logprobs=2, stream=True
        )
    ]
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] != []
    offsets = [o for c in chunks for o in c.choices[0].logprobs.text_offset]
    assert offsets == [0, 1, 2]


async def test_truncation_keeps_the_asked_side(start: Starter) -> None:
    served = await start()
    for side, kept in (("left", [8, 9]), ("right", [5, 6]), (None, [8, 9])):
        body = {"prompt": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2, "max_tokens": 1, "return_token_ids": True}
        answer = await served.post(PATH, {**body, "truncation_side": side} if side else body)
        assert answer.json()["choices"][0]["prompt_token_ids"] == kept


async def test_prompts_that_do_not_fit_are_refused_with_counts(start: Starter) -> None:
    served = await start()
    long = await served.post(PATH, {"prompt": [5] * 4096, "max_tokens": 1})
    assert long.status_code == 400 and "4096" in long.json()["error"]["message"]
    much = await served.post(PATH, {"prompt": [5] * 96, "max_tokens": 4001})
    assert much.status_code == 400 and "4000" in much.json()["error"]["message"]
    assert (await served.post(PATH, {"prompt": [5] * 96, "max_tokens": 4000, "stream": False})).status_code == 200
    text = await served.post(PATH, {"prompt": "x" * 100_000, "max_tokens": 1})
    assert text.status_code == 400 and "at least" in text.json()["error"]["message"]
    assert served.context.gate.open == 0


async def test_embeddings_in_both_encodings(start: Starter) -> None:
    served = await start()
    plain = (await served.post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"})).json()
    assert [d["index"] for d in plain["data"]] == [0, 1] and plain["usage"]["prompt_tokens"] == 2
    packed = (await served.post("/v1/embeddings", {"input": "a", "encoding_format": "base64", "dimensions": 4})).json()
    values = struct.unpack("<4f", base64.b64decode(packed["data"][0]["embedding"]))
    assert abs(sum(v * v for v in values) - 1) < 1e-6
    sdk = await client(served).embeddings.create(model="fake", input=["a", "b"])
    assert len(sdk.data) == 2 and sdk.data[1].embedding == pytest.approx(plain["data"][1]["embedding"])
    over = await served.post("/v1/embeddings", {"input": "a", "dimensions": 9})
    assert over.status_code == 400 and over.json()["error"]["param"] == "dimensions"


async def test_tokenize_and_back(start: Starter) -> None:
    served = await start()
    made = (await served.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) == 3
    assert (await served.post("/detokenize", {"tokens": made["tokens"]})).json() == {"prompt": "Hé", "content": "Hé"}
    chat = (await served.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
    assert chat["tokens"][0] >= 256 and chat["max_model_len"] == 4096
    assert (await served.post("/tokenize", {})).status_code == 400


async def test_models_version_load_health(start: Starter) -> None:
    served = await start()
    listed = await client(served).models.list()
    assert [m.id for m in listed.data] == ["fake", "other"]
    assert (await client(served).models.retrieve("other")).max_model_len == 4096  # type: ignore[attr-defined]
    assert (await served.client.get("/v1/models/none")).status_code == 404
    assert "version" in (await served.client.get("/version")).json()
    assert (await served.client.get("/load")).json() == {"server_load": 0}
    assert [(await served.client.get(p)).status_code for p in ("/health", "/ready", "/ping")] == [200, 200, 200]


async def test_metrics_count_what_happened(start: Starter) -> None:
    served = await start()
    for _ in range(3):
        await served.post(PATH, {"prompt": "abc", "max_tokens": 4})
    text = (await served.client.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"} 3.0' in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="fake"} 12.0' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="fake"} 3.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 3.0' in text


async def test_timings_when_asked_for(start: Starter) -> None:
    served = await start(enable_per_request_metrics=True)
    found = (await served.post(PATH, {"prompt": "abc", "max_tokens": 4})).json()["metrics"]
    assert found["time_to_first_token_ms"] > 0 and found["mean_itl_ms"] >= 0 and found["tokens_per_second"] > 0


async def test_the_timeline_of_a_request(start: Starter) -> None:
    served = await start(api_key=["a", "b"])
    body = {"prompt": ["abc", "de"], "max_tokens": 4, "request_id": "mine"}
    assert (await served.post(PATH, body, **{"x-api-key": "a"})).status_code == 200
    found = (await served.client.get("/v1/requests/cmpl-mine", headers={"x-api-key": "a"})).json()
    assert found["state"] == "ended" and [p["prompt_tokens"] for p in found["prompts"]] == [3, 2]
    for prompt in found["prompts"]:
        names = [e["event"] for e in prompt["events"]]
        times = [e["at_ms"] for e in prompt["events"]]
        assert names == ["accepted", "started", "first_token", "last_token", "ended"] and times == sorted(times)
        assert prompt["finish_reasons"] == ["length"] and prompt["output_tokens"] == 4
    assert (await served.client.get("/v1/requests/cmpl-mine", headers={"x-api-key": "b"})).status_code == 404
    history = served.context.history
    for i in range(1100):
        history.end(history.begin(f"r{i}", "a", 0.0), 1.0)
    assert len(history) <= 1000 and not history.open


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/generate", "/completion", "/props", "/tokenizer_info", "/infill"]
)
async def test_an_address_names_a_model_that_is_served(start, path):
    served = await start()
    book, sent = served.fake.fleet.adapters.book, []
    book.serve(book.add("tuned", Path("/tuned")))
    served.fake.fleet.tell_names()
    send = served.fake.link().send
    served.fake.link().send = lambda command: sent.append(command) or send(command)
    body = {"prompt": "a", "max_tokens": 1} if path != "/generate" else {"inputs": "a"}
    for name, status, adapter in (("nope", 404, None), ("fake", 200, 0), ("tuned", 200, 1)):
        sent.clear()
        where = f"{path}?model={name}"
        get = path in ("/props", "/tokenizer_info")
        answer = await (served.client.get(where) if get else served.post(where, body))
        assert answer.status_code == status, answer.text
        if status == 200 and not get:
            assert [each.request.adapter for each in sent if isinstance(each, Add)] == [adapter]
    refused = await served.client.post("/v1/conversations?model=fake", json={})
    assert refused.headers["x-tokenmill-ignored"] == "model"
