"""litellm: completions, streams, tools, embeddings, and errors as its own types: a context overflow is recognised."""

from __future__ import annotations

import sys

import litellm

URL, KEY = sys.argv[1:]
MODEL = "openai/demo"
TO = {"api_base": URL, "api_key": KEY, "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def main() -> None:
    answer = litellm.completion(MODEL, user("Say hello."), max_tokens=8, temperature=0, **TO)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0

    pieces = litellm.completion(MODEL, user("Say hello."), max_tokens=8, temperature=0, stream=True, **TO)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == answer.choices[0].message.content

    forced = {"type": "function", "function": {"name": "get_weather"}}
    called = litellm.completion(MODEL, user("Weather in Rome?"), tools=[TOOL], tool_choice=forced, max_tokens=60, **TO)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and "city" in call.function.arguments

    vectors = litellm.embedding("openai/demo", ["a", "b"], **TO)
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 8

    try:
        litellm.completion(MODEL, user("word " * 100_000), max_tokens=8, **TO)
    except litellm.ContextWindowExceededError as error:
        assert error.status_code == 400
    else:
        raise AssertionError("no overflow")
    try:
        litellm.completion(MODEL, user("x"), max_tokens=8, api_base=URL, api_key="wrong", num_retries=0)
    except litellm.AuthenticationError:
        pass
    else:
        raise AssertionError("no key, and no error")
    print("litellm: completions, streams, tools, embeddings, overflow, keys")


main()
