"""TEI's forms, and vLLM's smaller paths: /pooling, /invocations and /tokenizer_info."""

from __future__ import annotations

from tests.pure.server.conftest import Starter
from tokenmill.testing.fake_generator import FakeOptions

TALK = [{"role": "user", "content": "Hi"}]


async def test_vectors_are_a_bare_list(start: Starter) -> None:
    served = await start()
    usual = (await served.post("/v1/embeddings", {"input": ["a", "b"]})).json()["data"]
    found = (await served.post("/embed", {"inputs": ["a", "b"], "normalize": True})).json()
    assert found == [each["embedding"] for each in usual]
    assert (await served.post("/embed", {"inputs": "a"})).json() == found[:1]
    assert len((await served.post("/embed", {"inputs": "a", "dimensions": 2})).json()[0]) == 2
    assert "length one" in (await served.post("/embed", {"inputs": "a", "normalize": False})).text


async def test_what_is_too_long_is_cut_where_that_is_asked(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=64))
    long = {"inputs": "ab" * 50}
    refused = await served.post("/embed", long)
    assert refused.status_code == 400 and "maximum context length is 64 tokens" in refused.text
    for side in ("Left", "Right", "left", "right"):
        assert (
            await served.post("/embed", {**long, "truncate": True, "truncation_direction": side})
        ).status_code == 200
    rank = {"query": "a", "texts": ["ab" * 50]}
    assert (await served.post("/rerank", rank)).status_code == 400
    assert (await served.post("/rerank", {**rank, "truncate": True})).status_code == 200
    for side, kept in (("right", "a" * 64), ("Left", "b" * 64), (None, "a" * 64)):
        asked = {"query": "a", "truncate": True} | ({"truncation_direction": side} if side else {})
        found = [await served.post("/rerank", {**asked, "texts": [text]}) for text in ("a" * 64 + "b" * 64, kept)]
        assert found[0].json() == found[1].json(), side


async def test_texts_are_ranked_in_a_bare_list(start: Starter) -> None:
    served = await start()
    texts = ["b", "a", "c"]
    usual = (await served.post("/rerank", {"query": "a", "documents": texts})).json()["results"]
    found = (await served.post("/rerank", {"query": "a", "texts": texts})).json()
    assert [(each["index"], each["score"]) for each in found] == [(e["index"], e["relevance_score"]) for e in usual]
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    for most, kept in ((1, 1), (0, 3), (9, 3)):
        assert (await served.post("/rerank", {"query": "a", "texts": texts, "top_n": most})).json() == found[:kept]
    shown = (await served.post("/rerank", {"query": "a", "texts": texts, "return_text": True})).json()
    assert all(each["text"] == texts[each["index"]] for each in shown) and "text" not in found[0]
    assert (
        "raw_scores is not supported"
        in (await served.post("/rerank", {"query": "a", "texts": texts, "raw_scores": True})).text
    )
    near = await served.post("/similarity", {"inputs": {"source_sentence": "a", "sentences": texts}})
    assert len(near.json()) == 3


async def test_what_this_model_cannot_give_is_refused_by_name(start: Starter) -> None:
    served = await start()
    for path, word in (("/embed_all", "/embed"), ("/embed_sparse", "/embed"), ("/predict", "/classify")):
        answer = await served.post(path, {"inputs": "a"})
        said = answer.json()["error"]
        assert answer.status_code == 404 and word in (said if isinstance(said, str) else said["message"])


async def test_errors_have_the_form_that_tei_s_clients_read(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=64))
    for path, body in (
        ("/embed", {"inputs": "ab" * 50}),
        ("/embed", {"inputs": "a", "normalize": False}),
        ("/similarity", {"inputs": {"source_sentence": 3}}),
        ("/embed_all", {"inputs": "a"}),
    ):
        answer = await served.post(path, body)
        said = answer.json()
        assert answer.status_code in (400, 404) and said.keys() == {"error", "error_type"}, said
        assert said["error_type"] == "Validation" and isinstance(said["error"], str)
    other = (await served.post("/v1/embeddings", {"input": "ab" * 50})).json()
    assert other["error"]["message"]


async def test_pooling_gives_the_same_vectors(start: Starter) -> None:
    served = await start()
    usual = (await served.post("/v1/embeddings", {"input": "a"})).json()
    found = (await served.post("/pooling", {"input": "a", "task": "embed"})).json()
    assert found["object"] == "list" and found["id"].startswith("pool-") and found["usage"] == usual["usage"]
    assert found["data"] == [{"index": 0, "object": "pooling", "data": usual["data"][0]["embedding"]}]


async def test_one_path_for_all_that_a_host_invokes(start: Starter) -> None:
    served = await start(FakeOptions(script="yes"))
    for body, kind in (
        ({"messages": TALK}, "chat.completion"),
        ({"prompt": "Hi"}, "text_completion"),
        ({"input": "Hi"}, "list"),
    ):
        answer = await served.post("/invocations", body)
        assert answer.status_code == 200 and answer.json()["object"] == kind
    streamed = await served.post("/invocations", {"messages": TALK, "stream": True})
    assert streamed.text.rstrip().endswith("data: [DONE]")
    for body in ({}, {"text": "Hi"}, [1]):
        assert (await served.post("/invocations", body)).status_code == 400
    assert not served.context.gate.open


async def test_the_tokenizer_s_settings(start: Starter) -> None:
    served = await start()
    found = (await served.client.get("/tokenizer_info")).json()
    assert found["eos_token"] == "<|im_end|>" and "im_start" in found["chat_template"]
    assert {each["content"] for each in found["added_tokens_decoder"].values()} >= {"<|im_end|>"}
