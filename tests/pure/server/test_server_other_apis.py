"""TGI, vLLM's first API, KServe, scores; and one question through every API."""

from __future__ import annotations

import json

import pytest

from tokenmill.server.scoring import routes as scoring_routes
from tokenmill.server.scoring import scores
from tokenmill.testing.fake_generator import FakeOptions

ASK = [{"role": "user", "content": "What?"}]
SAID = "Just this."
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}


async def test_one_question_through_every_api_gets_one_answer(start):
    served = await start(FakeOptions(script=SAID))

    async def post(path, **body):
        answer = await served.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    counts, texts = set(), set()
    chat = await post("/v1/chat/completions", messages=ASK, temperature=0)
    counts.add((chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]))
    texts.add(chat["choices"][0]["message"]["content"])
    response = await post("/v1/responses", input="What?", temperature=0)
    counts.add((response["usage"]["input_tokens"], response["usage"]["output_tokens"]))
    texts.add(response["output"][0]["content"][0]["text"])
    message = await post("/v1/messages", model="fake", max_tokens=99, messages=ASK)
    counts.add((message["usage"]["input_tokens"], message["usage"]["output_tokens"]))
    texts.add(message["content"][0]["text"])
    ollama = await post("/api/chat", model="fake", messages=ASK, stream=False)
    counts.add((ollama["prompt_eval_count"], ollama["eval_count"]))
    texts.add(ollama["message"]["content"])
    prompt = (await post("/v1/chat/completions", messages=ASK, return_prompt_text=True))["prompt_text"]
    done = await post("/v1/completions", prompt=prompt, max_tokens=99, temperature=0)
    counts.add((done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]))
    texts.add(done["choices"][0]["text"])
    tgi = await post("/generate", inputs=prompt, parameters={"details": True, "decoder_input_details": True})
    counts.add((len(tgi["details"]["prefill"]), tgi["details"]["generated_tokens"]))
    texts.add(tgi["generated_text"])
    old = await post("/generate", prompt=prompt, max_tokens=99)
    texts.add(old["text"][0].removeprefix(prompt))
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    texts.add(
        (await post("/v2/models/fake/infer", inputs=[tensor], parameters={"max_tokens": 99}))["outputs"][0]["data"][0]
    )
    texts.add((await post("/v2/models/fake/generate", text_input=prompt, parameters={"max_tokens": 99}))["text_output"])
    assert texts == {SAID} and len(counts) == 1


async def test_tgi_streams_tokens_and_tells_why_it_ended(start):
    served = await start(FakeOptions(script="abc"))
    body = {"inputs": "x", "parameters": {"max_new_tokens": 9, "top_n_tokens": 2, "return_full_text": True}}
    answer = await served.post("/generate_stream", body)
    found = [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line]
    assert [e["token"]["text"] for e in found[:3]] == ["a", "b", "c"] and [e["index"] for e in found] == [
        *range(1, len(found) + 1)
    ]
    assert all(len(e["top_tokens"]) == 2 and e["token"]["logprob"] <= 0 for e in found)
    assert found[-1]["generated_text"] == "xabc"
    assert found[-1]["details"]["finish_reason"] == "eos_token" and found[0]["details"] is None
    for change, reason in (({"max_new_tokens": 2}, "length"), ({"stop": ["b"]}, "stop_sequence")):
        whole = await served.post("/generate", {"inputs": "x", "parameters": {**change, "details": True}})
        assert whole.json()["details"]["finish_reason"] == reason
    listed = (await served.post("/", {"inputs": "x", "parameters": {"max_new_tokens": 2}})).json()
    assert listed == [{"generated_text": "ab"}]
    assert (await served.client.get("/info")).json()["max_total_tokens"] == 4096


@pytest.mark.parametrize("most", range(1, 8))
async def test_tgis_tokens_together_are_the_text(start, most):
    """Clients put streams together from their tokens' texts; a character may be several tokens, or be cut off."""
    served = await start(FakeOptions(script="é水a"))
    body = {"inputs": "x", "parameters": {"max_new_tokens": most, "details": True}}
    whole = (await served.post("/generate", body)).json()
    lines = (await served.post("/generate_stream", body)).text.splitlines()
    tokens = [json.loads(line.removeprefix("data:"))["token"] for line in lines if line]
    said = whole["generated_text"]
    for each in (whole["details"]["tokens"], tokens):
        assert "".join(token["text"] for token in each if not token["special"]) == said
    assert said == "é水a".encode()[:most].decode(errors="replace")


async def test_tgi_best_of_shows_every_candidate(start):
    served = await start()
    body = {"inputs": "x", "parameters": {"best_of": 3, "max_new_tokens": 4, "details": True, "seed": 5}}
    details = (await served.post("/generate", body)).json()["details"]
    assert len(details["best_of_sequences"]) == 2 and len(details["tokens"]) == 4


HI = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": HI}), ("/v1/messages", {"model": "fake", "messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "x"}), ("/v1/responses/compact", {"input": "x"}), ("/v1/embeddings", {"input": "x"}),
    ("/api/chat", {"model": "fake", "messages": HI, "stream": False}), ("/generate", {"inputs": "x"}),
    ("/completion", {"prompt": "x", "n_predict": 2}), ("/v2/models/fake/generate", {"text_input": "x"}),
    ("/embed", {"inputs": "x"}), ("/rerank", {"query": "x", "documents": ["y"]}),
])  # fmt: skip
async def test_a_request_is_found_by_the_id_that_its_client_saw(start, path, body):
    served = await start()
    answer = await served.post(path, body)
    assert answer.status_code == 200, answer.text
    said = answer.json().get("id") if path.startswith("/v1") else None
    found = (await served.client.get(f"/v1/requests/{said or answer.headers['x-request-id']}")).json()
    assert found["state"] == "ended" and said in (None, found["id"])
    assert (await served.client.get("/v1/requests")).json()["data"][0] == found


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [
        ({}, False),
        ({"seed": 7}, False),
        ({"do_sample": True}, True),
        ({"typical_p": 0.9}, True),
        ({"do_sample": True, "seed": 7}, True),
    ],
)
async def test_tgi_tells_the_seed_of_what_was_sampled(start, asked, sampled):
    """It gives the same text again, whether or not the request had one. A greedy text has none."""
    served = await start()
    body = {"inputs": "x", "parameters": {"max_new_tokens": 2, "details": True, **asked}}
    whole = (await served.post("/generate", body)).json()["details"]["seed"]
    last = (await served.post("/generate_stream", body)).text.strip().splitlines()[-1]
    seeds = {whole, json.loads(last.removeprefix("data:"))["details"]["seed"]}
    assert seeds == {asked.get("seed")} if sampled and "seed" in asked else (None in seeds) is not sampled


async def test_vllms_first_api_streams_whole_texts(start):
    served = await start(FakeOptions(script="abc"))
    answer = await served.post("/generate", {"prompt": "x", "n": 2, "stream": True, "max_tokens": 9})
    found = [json.loads(line)["text"] for line in answer.text.splitlines()]
    assert found[-1] == ["xabc", "xabc"] and all(len(a) <= len(b) for a, b in zip(found[0], found[-1], strict=True))


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/generate", {"inputs": "x", "parameters": {"temperature": 0}}, "temperature"),
    ("/generate", {"inputs": "x", "parameters": {"watermark": True}}, "watermark"),
    ("/generate", {"inputs": "x", "parameters": {"adapter_id": "a"}}, "adapter_id"),
    ("/generate", {"inputs": ""}, "inputs"),
    ("/generate", {"text": "x", "sampling_params": {}}, "use inputs"),  # SGLang's
    ("/generate", {"prompt": "x", "temperature": -2}, "temperature"),
    ("/generate_stream", {"inputs": "x", "parameters": {"best_of": 2}}, "best_of"),
    ("/generate_stream", {"inputs": "x", "parameters": {"decoder_input_details": True}}, "decoder_input_details"),
    ("/v2/models/fake/infer", {"inputs": [{**TENSOR, "name": "y"}]}, "text_input"),
    ("/v2/models/fake/infer", {"inputs": [{**TENSOR, "datatype": "FP32", "data": [1]}]}, "BYTES"),
    ("/v2/models/fake/generate", {"text_input": "x", "parameters": {"logprobs": 2}}, "logprobs"),
    ("/v2/models/fake/generate", {"text_input": "x", "parameters": {"echo": True}}, "echo"),
])  # fmt: skip
async def test_bad_requests_are_refused_in_each_shape(start, path, body, word):
    served = await start()
    answer = await served.post(path, body)
    assert answer.status_code == 400 and word in answer.json()["error"]
    assert ("error_type" in answer.json()) == path.startswith("/generate")
    assert served.context.gate.open == 0


@pytest.mark.parametrize(
    "turn", [{"role": "wizard", "content": "x"}, {"role": "user"}, {"role": "user", "content": None}]
)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/tokenize", "/apply-template"],
)
async def test_what_is_no_turn_is_refused_by_every_api(start, path, turn):
    served = await start(FakeOptions(script=SAID))
    body = {"model": "fake", "messages": [*ASK, turn, *ASK]}
    refused = await served.post(path, {**body, "max_tokens": 9} if path == "/v1/messages" else body)
    field = "content" if turn["role"] == "user" else "role"
    assert refused.status_code == 400 and f"messages.1.{field}" in refused.text, refused.text
    if field == "role":
        assert "assistant" in refused.text and "user" in refused.text
    assert served.context.gate.open == 0


async def test_a_turn_of_calls_needs_no_content(start):
    served = await start(FakeOptions(script=SAID))
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1", "tool_name": "f"}]
    answer = await served.post("/api/chat", {"model": "fake", "messages": turns, "stream": False})
    assert answer.status_code == 200, answer.text


async def test_kserve_tells_of_its_models(start):
    served = await start(FakeOptions(script="abc"))
    for path in (
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/fake",
        "/v2/models/fake/ready",
        "/v2/models/fake/versions/1",
        "/v2/models/fake/versions/1/ready",
    ):
        assert (await served.client.get(path)).status_code == 200
    missing = await served.client.get("/v2/models/nope")
    assert missing.status_code == 404 and isinstance(missing.json()["error"], str)
    two = {"name": "text_input", "shape": [2, 1], "datatype": "BYTES", "data": [["x"], ["y"]]}
    limit = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [2]}
    asked = {"id": "7", "inputs": [two, limit], "outputs": [{"name": "text_output"}]}
    found = (await served.post("/v2/models/fake/versions/1/infer", asked)).json()
    assert found["id"] == "7" and [o["name"] for o in found["outputs"]] == ["text_output"]
    assert found["outputs"][0]["data"] == ["ab", "ab"] and found["outputs"][0]["shape"] == [2]
    stream = await served.post("/v2/models/fake/generate_stream", {"text_input": "x", "parameters": {"max_tokens": 9}})
    pieces = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line]
    assert "".join(p["text_output"] for p in pieces) == "abc" and pieces[-1]["finish_reason"] == "stop"


async def test_reranking_sorts_and_cuts(start):
    served = await start()
    documents = ["b", {"text": "a"}, "c"]
    for method in ("embedding", "likelihood"):
        body = {"query": "a", "documents": documents, "method": method}
        found = (await served.post("/rerank", body)).json()
        scores = [r["relevance_score"] for r in found["results"]]
        assert scores == sorted(scores, reverse=True) and {r["index"] for r in found["results"]} == {0, 1, 2}
        assert all(-1 <= s <= 1 for s in scores) and found["usage"]["prompt_tokens"] > 0
        two = (await served.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False})).json()["results"]
        assert [r["index"] for r in two] == [r["index"] for r in found["results"][:2]] and "document" not in two[0]
    found = (await served.post("/rerank", {"query": "a", "documents": documents})).json()["results"]
    assert {r["document"]["text"]: r["relevance_score"] for r in found}["a"] == pytest.approx(1.0)


async def test_questions_that_repeat_a_long_text_are_made_one_at_a_time(start, monkeypatch):
    """All of them together would take a thousand times the body's memory."""
    served, made = await start(), []
    for module, name in ((scores, "relevance_question"), (scoring_routes, "label_question")):
        make = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, make=make: made.append(1) or make(*given))
    long, texts = "x" * 100_000, ["a"] * 50
    for path, body in (
        ("/rerank", {"query": long, "documents": texts, "method": "likelihood"}),
        ("/score", {"text_1": long, "text_2": texts, "method": "likelihood"}),
        ("/classify", {"input": texts, "labels": ["a", "b"], "instruction": long[: 1 << 16]}),
    ):
        assert (await served.post(path, body)).status_code == 400
    assert len(made) == 3


async def test_scores_of_pairs_and_labels(start):
    served = await start()
    one = (await served.post("/score", {"text_1": "a", "text_2": ["a", "b"]})).json()["data"]
    pairs = (await served.post("/v1/score", {"queries": ["a", "a"], "documents": ["a", "b"]})).json()["data"]
    assert one == pairs and one[0]["score"] == pytest.approx(1.0)
    uneven = await served.post("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert uneven.status_code == 400 and "first" in uneven.json()["error"]["message"]
    found = (await served.post("/classify", {"input": ["x", "y"], "labels": ["good", "bad", "neither"]})).json()["data"]
    for entry in found:
        assert sum(entry["probs"]) == pytest.approx(1.0) and entry["num_classes"] == 3
        assert entry["label"] == ["good", "bad", "neither"][entry["probs"].index(max(entry["probs"]))]
    assert (await served.post("/classify", {"input": "x", "labels": ["a", "a"]})).status_code == 400
    assert served.context.gate.open == 0
