"""What the context cannot hold: every API says it in the words that its clients act on; what is cut fits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.testing.fake_generator import FakeOptions

CONTEXT = 128
WORDS = f"maximum context length is {CONTEXT} tokens"
LONG, HUGE = "a" * 200, "a" * 40_000  # too long once it is tokenised, and before
TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES"}


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """A request to every path that computes a text."""
    return {
        "/v1/chat/completions": {"messages": talk(text)},
        "/v1/completions": {"prompt": text},
        "/v1/embeddings": {"input": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"model": "fake", "max_tokens": 5, "messages": talk(text)},
        "/api/chat": {"model": "fake", "messages": talk(text)},
        "/api/generate": {"model": "fake", "prompt": text, "raw": True},
        "/api/embed": {"model": "fake", "input": text, "truncate": False},
        "/api/embeddings": {"model": "fake", "prompt": text},
        "/generate": {"inputs": text},
        "/generate_stream": {"inputs": text},
        "/v2/models/fake/infer": {"inputs": [{**TENSOR, "data": [text]}]},
        "/v2/models/fake/generate": {"text_input": text},
        "/rerank": {"query": "q", "documents": [text], "method": "embedding"},
        "/score": {"text_1": "q", "text_2": text},
        "/classify": {"input": text, "labels": ["a", "b"]},
    }


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize("path", bodies(""))
async def test_every_api_says_it_in_its_form(start: Starter, path: str, text: str) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT))
    for more in ({}, {"stream": True}) if path.startswith(("/v1/c", "/v1/resp", "/v1/m", "/api/chat")) else ({},):
        answer = await served.post(path, bodies(text)[path] | more)
        assert answer.status_code == 400 and WORDS in answer.text, answer.text
        assert f"at most {CONTEXT - 1} fit" in answer.text or f"at most {CONTEXT} fit" in answer.text
        error = answer.json()["error"]
        if path.startswith(("/api/", "/generate", "/v2/")):
            assert isinstance(error, str)
        elif path == "/v1/messages":
            assert answer.json()["type"] == "error" and error["type"] == "invalid_request_error"
            assert (
                error["message"].startswith("prompt is too long: ") and f"> {CONTEXT - 1} maximum" in error["message"]
            )
        else:
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == {
                "/v1/chat/completions": "messages",
                "/v1/completions": "prompt",
                "/rerank": "documents",
                "/score": "text_2",
            }.get(path, "input")
    assert not served.context.gate.open


async def test_an_answer_that_does_not_fit_says_how_much_does(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT))
    answer = await served.post("/v1/completions", {"prompt": "a" * 100, "max_tokens": 50})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert WORDS in error["message"] and "at most 28" in error["message"]
    message = {"model": "fake", "max_tokens": 127, "messages": talk("a")}
    found = (await served.post("/v1/messages", message)).json()["error"]["message"]
    assert found.startswith("input length and `max_tokens` exceed context limit: ") and WORDS in found
    other = (await served.post("/v1/completions", {"prompt": "a", "temperature": -1})).json()["error"]
    assert other["code"] == 400


CUTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"truncate_prompt_tokens": -1},
    "/v1/completions": {"truncate_prompt_tokens": 40},
    "/v1/embeddings": {"truncate_prompt_tokens": -1},
    "/v1/responses": {"truncation": "auto"},
    "/api/chat": {"truncate": True, "stream": False},
    "/api/generate": {"truncate": True, "stream": False},
    "/api/embed": {"truncate": True},
    "/generate": {"parameters": {"truncate": 30, "max_new_tokens": 10}},
    "/v2/models/fake/generate": {"parameters": {"truncate_prompt_tokens": 20}},
    "/rerank": {"truncate_prompt_tokens": 20},
    "/score": {"truncate_prompt_tokens": 20},
}


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize("path", CUTS)
async def test_what_is_cut_fits_however_long_it_was(start: Starter, path: str, text: str) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT, script="Yes."))
    answer = await served.post(path, bodies(text)[path] | CUTS[path])
    assert answer.status_code == 200, answer.text


async def test_counting_has_no_limit(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT))
    found = await served.post("/tokenize", {"prompt": HUGE})
    assert found.json()["count"] == len(HUGE)
    found = await served.post("/tokenize", {"messages": talk(HUGE)})
    assert found.json()["count"] > len(HUGE)
    found = await served.post("/v1/messages/count_tokens", {"model": "fake", "messages": talk(HUGE)})
    assert found.json()["input_tokens"] > len(HUGE)


async def test_a_length_that_nobody_asked_for_ends_with_the_context(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT))
    served.context.backend.info.generation["max_new_tokens"] = 100
    for path, body in (
        ("/v1/completions", {"prompt": "a" * (CONTEXT - 5)}),
        ("/v1/chat/completions", {"messages": talk("a" * 60)}),
        ("/v1/chat/completions", {"messages": talk(LONG), "truncate_prompt_tokens": -1}),
    ):
        answer = await served.post(path, {**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["choices"][0]["finish_reason"] == "length" and found["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_a_vector_needs_no_room_for_an_answer(start: Starter, path: str) -> None:
    served = await start(FakeOptions(max_model_len=CONTEXT))
    for length, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
        answer = await served.post(path, bodies("a" * length)[path])
        assert answer.status_code == status, answer.text
    assert f"the prompt has {CONTEXT + 1} tokens, and at most {CONTEXT} fit" in answer.text
    cut = {"truncate": True} if path == "/api/embed" else {"truncate_prompt_tokens": -1}
    answer = (await served.post(path, bodies(LONG)[path] | cut)).json()
    assert answer.get("prompt_eval_count", answer.get("usage", {}).get("prompt_tokens")) == CONTEXT
    text = await served.post("/v1/completions", {"prompt": "a" * CONTEXT, "max_tokens": 1})
    assert text.status_code == 400 and f"at most {CONTEXT - 1} fit" in text.text
