"""Numbers of tokens that the model does not have: every endpoint that takes numbers refuses them by their field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server.conftest import Starter

ONE = {"max_tokens": 1}
USER = [{"role": "user", "content": "a"}]
TAKERS: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", lambda t: {"prompt": [1, t], **ONE}),
    "completions of several": ("/v1/completions", lambda t: {"prompt": [[1], [1, t]], **ONE}),
    "echo": ("/v1/completions", lambda t: {"prompt": [1, t], "max_tokens": 0, "echo": True}),
    "stop": ("/v1/completions", lambda t: {"prompt": "a", "stop_token_ids": [t], **ONE}),
    "allowed": ("/v1/completions", lambda t: {"prompt": "a", "allowed_token_ids": [1, t], **ONE}),
    "bias": ("/v1/completions", lambda t: {"prompt": "a", "logit_bias": {str(t): 1}, **ONE}),
    "chat's stop": ("/v1/chat/completions", lambda t: {"messages": USER, "stop_token_ids": [t], **ONE}),
    "chat's allowed": ("/v1/chat/completions", lambda t: {"messages": USER, "allowed_token_ids": [t], **ONE}),
    "chat's bias": ("/v1/chat/completions", lambda t: {"messages": USER, "logit_bias": {str(t): 1}, **ONE}),
    "embeddings": ("/v1/embeddings", lambda t: {"input": [1, t]}),
    "embeddings of several": ("/v1/embeddings", lambda t: {"input": [[1], [1, t]]}),
    "pooling": ("/pooling", lambda t: {"input": [1, t]}),
    "detokenize": ("/detokenize", lambda t: {"tokens": [1, t]}),
    "vLLM's generate": ("/generate", lambda t: {"prompt": "a", "stop_token_ids": [t], **ONE}),
    "KServe": ("/v2/models/fake/generate", lambda t: {"text_input": "a", "parameters": {"stop_token_ids": [t]}}),
    "llama.cpp": ("/completion", lambda t: {"prompt": [1, t], "n_predict": 1}),
    "llama.cpp's pairs": ("/completion", lambda t: {"prompt": "a", "n_predict": 1, "logit_bias": [[t, 1.0]]}),
    "llama.cpp's bans": ("/completion", lambda t: {"prompt": "a", "n_predict": 1, "logit_bias": [[t, False]]}),
    "llama.cpp's vectors": ("/embedding", lambda t: {"content": [1, t]}),
    "texts among numbers": ("/completion", lambda t: {"prompt": ["a", t], "n_predict": 1}),
    "Ollama's context": ("/api/generate", lambda t: {"model": "fake", "prompt": "a", "context": [1, t]}),
    "numbers of bad words": ("/v1/completions", lambda t: {"prompt": "a", "bad_words_ids": [[t]], **ONE}),
    "numbers for logprobs": ("/v1/completions", lambda t: {"prompt": "a", "logprob_token_ids": [t], **ONE}),
    "numbers around a gap": ("/infill", lambda t: {"input_prefix": [1, t], "input_suffix": "b"}),
    "numbers for scores": ("/score", lambda t: {"text_1": [1, t], "text_2": "b"}),
    "numbers for labels": ("/classify", lambda t: {"input": [1, t]}),
}  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS)
async def test_a_number_that_is_no_token_is_refused(taker: str, start: Starter) -> None:
    path, body = TAKERS[taker]
    served = await start()
    for number in (10**6, 2**31, 2**63, 2**70, -1):
        answer = await served.post(path, body(number))
        found = answer.json()["error"]
        text = found if isinstance(found, str) else found["message"]
        assert answer.status_code == 400 and "\n" not in text, (number, text)
        assert any(name in text for name in (*body(number), "stop_token_ids")), (number, text)
