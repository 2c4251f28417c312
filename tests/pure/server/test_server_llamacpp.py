"""llama.cpp's own API: its shapes, its spellings, and gaps that code models fill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pure.server.conftest import Served, Starter
from tokenmill.core.request import Request
from tokenmill.server.engines.state import FleetOptions
from tokenmill.server.openai import tokens
from tokenmill.server.openai.schemas import CompletionRequest
from tokenmill.server.openai.structure import structure
from tokenmill.testing.fake_generator import FILLS, FakeOptions, byte_tokenizer

MARKS = (*FILLS, "<|fim_pad|>")
GAP = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 6}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


def requests_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The list of requests that reach the engine from now on."""
    seen: list[Request] = []
    inner = served.fake.fleet.open

    async def opened(request: Request, *rest: Any) -> Any:
        seen.append(request)
        return await inner(request, *rest)

    monkeypatch.setattr(served.fake.fleet, "open", opened)
    return seen


async def coder(start: Starter, **options: Any) -> Served:
    return await start(FakeOptions(tokenizer=byte_tokenizer(MARKS), **options))


async def test_chats_have_a_path_without_v1_too(start: Starter) -> None:
    """As llama.cpp's: a client's base address may lack it. Fields, streams, errors and metrics are those of /v1."""
    served = await start(FakeOptions(script="one"))
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/chat/completions", "/chat/completions/"):
        found = (await served.post(path, chat)).json()
        assert found["object"] == "chat.completion" and found["choices"][0]["message"]["content"] == "one"
        assert (await served.post(path, {**chat, "stream": True})).text.endswith("data: [DONE]\n\n")
        wrong = await served.post(path, {"messages": "Hi"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "messages"
    assert 'handler="/chat/completions"' not in (await served.client.get("/metrics")).text


async def test_a_completion_has_llama_cpp_s_shape(start: Starter) -> None:
    served = await start(FakeOptions(script="one\ntwo"))
    for path in ("/completion", "/completions"):
        found = (await served.post(path, {"prompt": "Hi", "n_predict": -1, "cache_prompt": True, "seed": -1})).json()
        assert found["content"] == "one\ntwo" and found["stop"] and found["has_new_line"] and not found["truncated"]
        assert (found["stop_type"], found["stopping_word"], found["tokens"]) == ("eos", "", [])
        assert found["tokens_evaluated"] == 2 and found["tokens_predicted"] == 7 and found["index"] == 0
        assert found["timings"]["prompt_n"] == 2 and found["timings"]["predicted_n"] == 7
        assert found["generation_settings"]["n_ctx"] == 4096 and found["model"] == "fake"
    cut = (await served.post("/completion", {"prompt": "Hi", "n_predict": 2, "return_tokens": True})).json()
    assert cut["content"] == "on" and cut["stop_type"] == "limit" and len(cut["tokens"]) == 2
    word = (await served.post("/completion", {"prompt": "Hi", "stop": ["\n"]})).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("one", "word", "\n")
    silent = (await served.post("/completion", {"prompt": "Hi", "n_predict": 0})).json()
    assert silent["content"] == "" and silent["tokens_predicted"] == 0 and silent["stop_type"] == "limit"


async def test_several_prompts_are_answered_in_a_list(start: Starter) -> None:
    served = await start(FakeOptions(script="yes"))
    found = (await served.post("/completion", {"prompt": ["Hi", [70, 71, 72]]})).json()
    assert [each["index"] for each in found] == [0, 1] and [each["tokens_evaluated"] for each in found] == [2, 3]


async def test_streamed_pieces_make_the_whole(start: Starter) -> None:
    served = await start(FakeOptions(script="abc"))
    answer = await served.post("/completion", {"prompt": "Hi", "stream": True})
    *pieces, last = events(answer.text)
    assert "".join(each["content"] for each in pieces) == "abc" and not any(each["stop"] for each in pieces)
    assert last["stop"] and last["content"] == "" and last["stop_type"] == "eos" and last["tokens_predicted"] == 3
    assert "[DONE]" not in answer.text


async def test_tokens_without_text_are_streamed_as_well(start: Starter) -> None:
    """A character's first bytes are tokens, too: streams of every API that tells tokens tell all of them."""
    served = await start(FakeOptions(script="é水"))
    ids = served.context.backend.info.tokenizer.encode("é水", add_special_tokens=False)
    ask = {"prompt": "Hi", "n_predict": 5}
    whole = (await served.post("/completion", {**ask, "return_tokens": True})).json()
    pieces = events((await served.post("/completion", {**ask, "return_tokens": True, "stream": True})).text)
    assert whole["tokens"] == [token for each in pieces for token in each["tokens"]] == ids
    unasked = events((await served.post("/completion", {**ask, "stream": True})).text)
    assert [token for each in unasked for token in each["tokens"]] == ids, "as llama.cpp's streams always do"
    body = {"max_tokens": 5, "stream": True, "return_token_ids": True}
    for path, said in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        lines = (await served.post(path, {**body, **said})).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert [t for each in chunks for c in each["choices"] for t in c.get("token_ids") or []] == ids


async def test_probabilities_and_biases(start: Starter) -> None:
    served = await start(FakeOptions(script="ab"))
    for stream in (False, True):
        answer = await served.post("/completion", {"prompt": "Hi", "n_predict": 2, "n_probs": 3, "stream": stream})
        rows = [row for each in events(answer.text) for row in each.get("completion_probabilities", ())]
        assert [row["token"] for row in rows] == ["a", "b"] and all(len(row["top_logprobs"]) <= 3 for row in rows)
        assert all(row.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"} for row in rows)
    plain = (await served.post("/completion", {"prompt": "Hi", "n_probs": 0})).json()
    assert "completion_probabilities" not in plain
    assert (
        await served.post("/completion", {"prompt": "Hi", "logit_bias": [[70, -1.5], [71, False]]})
    ).status_code == 200
    for bias in ([["a", True]], [["", 1]], [[1, True]], [[1]], [1], [[-1, 1.0]]):
        assert (await served.post("/completion", {"prompt": "Hi", "logit_bias": bias})).status_code == 400
    refused = await served.post("/completion", {"prompt": "Hi", "n": 2})
    assert refused.status_code == 400 and "one text" in refused.json()["error"]["message"]


async def test_a_bias_of_a_word_is_one_of_each_of_its_tokens(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(FakeOptions(script="ab"))
    seen = requests_of(served, monkeypatch)
    ids = served.context.backend.info.tokenizer.encode("ab", add_special_tokens=False)
    for given in ([["ab", -3], [9, False]], {"ab": -3, "9": False}):
        assert (await served.post("/completion", {"prompt": "Hi", "logit_bias": given})).status_code == 200
        assert seen[-1].params.logit_bias == {**dict.fromkeys(ids, -3.0), 9: -100.0}
    for long in ([["a" * 9000, 1]], {"a" * 9000: 1}):
        refused = await served.post("/completion", {"prompt": "Hi", "logit_bias": long})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"


async def test_a_prompt_may_hold_texts_and_ids(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(FakeOptions(script="yes"))
    seen = requests_of(served, monkeypatch)
    a, b, c = served.context.backend.info.tokenizer.encode("abc", add_special_tokens=False)

    async def read(prompt: Any) -> list[list[int]]:
        seen.clear()
        found = (await served.post("/completion", {"prompt": prompt, "n_predict": 1})).json()
        assert (len(found) if isinstance(found, list) else 1) == len(seen)
        return [request.prompt_ids for request in seen]

    assert await read([1, "ab", 2, "c"]) == [[1, a, b, 2, c]]
    assert await read(["ab", 2]) == [[a, b, 2]]
    assert await read({"prompt_string": "ab"}) == [[a, b]]
    assert await read([[1, "a"], "b", [3], {"prompt_string": "c"}]) == [[1, a], [b], [3], [c]]
    for wrong in ({"prompt": "a"}, {"prompt_string": ""}, [1, ""], [1, None], [[1, "a"], 2]):
        assert (await served.post("/completion", {"prompt": wrong})).status_code == 400
    pictures = {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}
    assert "multimodal_data" in (await served.post("/completion", pictures)).json()["error"]["message"]


async def test_only_the_fields_asked_for_are_answered(start: Starter) -> None:
    served = await start(FakeOptions(script="yes"))
    body = {"prompt": "Hi", "response_fields": ["content", "timings/prompt_n", "nothing", "stop/there"]}
    assert (await served.post("/completion", body)).json() == {"content": "yes", "timings/prompt_n": 2}
    *pieces, last = events((await served.post("/completion", {**body, "stream": True})).text)
    assert all("tokens_predicted" in each for each in pieces) and last == {"content": "", "timings/prompt_n": 2}
    assert "timings" in (await served.post("/completion", {"prompt": "Hi", "response_fields": []})).json()


async def test_errors_have_llama_cpp_s_types(start: Starter) -> None:
    served = await start()
    for body, status, kind in (
        ({"prompt": 5}, 400, "invalid_request_error"),
        ({"prompt": "Hi", "model": "none"}, 404, "not_found_error"),
    ):
        error = (await served.post("/completion", body)).json()["error"]
        assert (error["code"], error["type"]) == (status, kind)


def test_an_empty_grammar_is_none() -> None:
    schema = {"type": "integer"}
    asked = {"prompt": "Hi", "grammar": ""}
    assert structure(CompletionRequest.model_validate(asked)) is None
    assert structure(CompletionRequest.model_validate({**asked, "json_schema": schema})) == {"json": schema}
    found = structure(CompletionRequest.model_validate({**asked, "guided_grammar": ""}))
    assert found == {"grammar": ""}, "it has no such meaning in other fields, where it is refused"


async def test_an_overflow_has_both_counts(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=64))
    for path, body in (("/completion", {"prompt": "a" * 99}), ("/embedding", {"content": "a" * 99})):
        error = (await served.post(path, body)).json()["error"]
        assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
        assert "maximum context length is 64 tokens" in error["message"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (99, 64)


async def test_what_a_server_tells_about_itself(start: Starter) -> None:
    served = await start()

    async def get(path: str) -> Any:
        answer = await served.client.get(path)
        assert answer.status_code == 200
        return answer.json()

    props, slots = await get("/props"), await get("/slots")
    assert props["total_slots"] == len(slots) == served.context.backend.info.max_rows
    assert "<|im_start|>" in props["chat_template"] and props["eos_token"] == "<|im_end|>"
    assert slots[0] == {"id": 0, "is_processing": False, "n_ctx": 4096, "speculative": False}
    assert await get("/lora-adapters") == [] and await get("/health") == {"status": "ok"}
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = (await served.post("/apply-template", talk)).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n") and "Hi" in prompt
    vectors = (await served.post("/embedding", {"content": ["a", "b"]})).json()
    assert [each["index"] for each in vectors] == [0, 1] and len(vectors[0]["embedding"][0]) > 1
    assert (await served.post("/embeddings", {"input": ["a", "b"], "embd_normalize": 2})).json() == vectors
    refused = (await served.post("/embeddings", {"input": "a", "embd_normalize": -1})).json()["error"]
    assert refused["param"] == "embd_normalize" and "length one" in refused["message"]


async def test_slots_are_the_rows_of_all_engines_of_the_model(start: Starter) -> None:
    served = await start(FakeOptions(max_rows=2), FleetOptions(engines=3))
    assert (await served.client.get("/props")).json()["total_slots"] == 6
    served.context.gate.open = 5  # (of other models)
    served.fake.fleet.engines[1].stats.running = 2
    slots = (await served.client.get("/slots?fail_on_no_slot=1")).json()
    assert [slot["is_processing"] for slot in slots] == [True, True, False, False, False, False]
    for engine in served.fake.fleet.engines:
        engine.stats.running = 2
    assert (await served.client.get("/slots?fail_on_no_slot=1")).status_code == 503
    served.context.gate.open = 0


async def test_tokens_in_llama_cpp_s_form(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start()
    ids = (await served.post("/tokenize", {"content": "aé"})).json()
    assert ids.keys() == {"tokens"} and len(ids["tokens"]) == 3
    pieces = (await served.post("/tokenize", {"content": "aé", "with_pieces": True})).json()["tokens"]
    assert [each["piece"] for each in pieces] == ["a", [0xC3], [0xA9]]
    spelled = {"content": "<|im_end|>"}
    assert len((await served.post("/tokenize", spelled)).json()["tokens"]) == 1
    assert len((await served.post("/tokenize", {**spelled, "parse_special": False})).json()["tokens"]) == 10
    assert (await served.post("/detokenize", ids)).json()["content"] == "aé"
    assert (await served.post("/tokenize", {"content": "a", "prompt": "b"})).status_code == 400
    monkeypatch.setattr(tokens, "SLICE", 2)
    for text in ("", "a", "ab", "abaab"):
        asked = {"content": text, "with_pieces": True}
        assert "".join(each["piece"] for each in (await served.post("/tokenize", asked)).json()["tokens"]) == text
        named = (await served.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
        assert "".join(named["token_strs"]) == text and len(named["tokens"]) == len(text)


async def test_a_gap_is_filled_in_every_api(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await coder(start, script="x")
    seen: list[Any] = []
    inner = served.fake.fleet.open

    async def opened(request: Any, *rest: Any) -> Any:
        seen.append(request)
        return await inner(request, *rest)

    monkeypatch.setattr(served.fake.fleet, "open", opened)
    tokenizer = served.context.backend.info.tokenizer
    assert tokenizer is not None
    asked = {
        "/v1/completions": {"prompt": "def f(", "suffix": "): pass"},
        "/api/generate": {"model": "fake", "prompt": "def f(", "suffix": "): pass", "stream": False},
        "/infill": GAP,
        "/completion": {"prompt": "def f(", "suffix": "): pass"},
        "/v2/models/fake/generate": {"text_input": "def f(", "parameters": {"suffix": "): pass"}},
    }
    for path, body in asked.items():
        answer = await served.post(path, body)
        assert answer.status_code == 200, answer.text
        request = seen.pop()
        text = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        assert text == "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>", path
        assert {tokenizer.token_to_id(name) for name in MARKS} <= set(request.params.stop_token_ids)
    await served.post("/infill", {**GAP, "input_extra": [{"filename": "a.py", "text": "b"}], "prompt": "<|fim_pad|>"})
    text = tokenizer.decode(seen[-1].prompt_ids, skip_special_tokens=False)
    assert text.startswith("<|file_sep|>a.py\nb\n<|fim_prefix|>") and text.endswith("<|fim_middle|><|fim_pad|>")
    assert tokenizer.token_to_id("<|fim_pad|>") not in seen[-1].prompt_ids, "what is typed stays text"
    assert "insert" in (await served.post("/api/show", {"model": "fake"})).json()["capabilities"]


async def test_other_models_refuse_gaps_by_name(start: Starter) -> None:
    served = await start(FakeOptions(tokenizer=byte_tokenizer()))
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "fake", "prompt": "a", "suffix": "b"}),
        ("/infill", GAP),
    ):
        answer = await served.post(path, body)
        assert answer.status_code == 400 and "suffix is not supported by this model" in answer.text
    assert (await served.post("/v1/completions", {"prompt": "a", "suffix": ""})).status_code == 200
    assert "insert" not in (await served.post("/api/show", {"model": "fake"})).json()["capabilities"]


async def test_what_has_no_place_beside_a_suffix(start: Starter) -> None:
    served = await coder(start)
    for more in ({"prompt": [70, 71]}, {"truncate_prompt_tokens": 2}):
        answer = await served.post("/v1/completions", {"prompt": "a", "suffix": "b", **more})
        assert answer.status_code == 400
    ollama = {"model": "fake", "prompt": "a", "suffix": "b"}
    for more in ({"system": "x"}, {"truncate": True}):
        assert (await served.post("/api/generate", {**ollama, **more})).status_code == 400
