"""The openai package (2.x and 3.x) against a running server: python tests/clients/openai_python.py URL [KEY]."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    common: dict[str, Any] = {
        "model": model,
        "messages": HELLO,
        "max_completion_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {"5": -10},
        "stop": ["\n\n\n"],
        "user": "someone",
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.05, "min_tokens": 1},
    }
    whole = client.chat.completions.create(**common)
    assert len(whole.choices) == 2 and whole.usage is not None
    texts = {0: "", 1: ""}
    usage = None
    for chunk in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [c.message.content for c in whole.choices]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(model=model, messages=HELLO, max_tokens=5) as stream:
        kinds = {event.type for event in stream}  # (the helper's final parse rejects answers cut by max_tokens)
    assert "chunk" in kinds


def others(client: openai.OpenAI, model: str) -> None:
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model
    text = client.completions.create(model=model, prompt=["One", "Two"], max_tokens=4, echo=True, logprobs=1)
    assert [c.index for c in text.choices] == [0, 1] and text.choices[0].text.startswith("One")
    parts = list(client.completions.create(model=model, prompt="One", max_tokens=4, stream=True))
    assert parts[-1].choices[0].finish_reason in ("stop", "length")
    vectors = client.embeddings.create(model=model, input=["a", "b"])
    floats = client.embeddings.create(model=model, input="a", encoding_format="float", dimensions=8)
    assert len(vectors.data) == 2 and len(floats.data[0].embedding) == 8


def errors(client: openai.OpenAI, model: str) -> None:
    for kind, arguments in (
        (openai.NotFoundError, {"model": "missing", "prompt": "x"}),
        (openai.BadRequestError, {"model": model, "prompt": "x", "suffix": "y"}),
        (openai.BadRequestError, {"model": model, "prompt": "x", "max_tokens": 10**8}),
    ):
        try:
            client.completions.create(**arguments)
        except kind as error:
            assert error.body and error.status_code in (400, 404)
        else:
            raise AssertionError(arguments)


async def several_at_once(url: str, key: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=model, messages=HELLO, max_tokens=8) for _ in range(16))
        )
    assert len({a.id for a in answers}) == 16


def main() -> None:
    url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        whole_and_streamed(client, model)
        others(client, model)
        errors(client, model)
    asyncio.run(several_at_once(url, key, model))
    print("openai", openai.__version__, "ok")


main()
