"""anthropic against a running server: python tests/clients/anthropic_python.py URL KEY. Run by tests/clients/run.py."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic

url, key = sys.argv[1].removesuffix("/v1"), sys.argv[2]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
common: Any = {"model": "demo", "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOLS: Any = [
    {"name": "get_weather", "description": "Get the weather",
     "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
]  # fmt: skip


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


paris = user("What is the capital of France?")
whole = client.messages.create(messages=paris, system="Be brief.", **common)
assert "Paris" in whole.content[0].text and whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0
with client.messages.stream(messages=paris, system="Be brief.", **common) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    last = stream.get_final_message()
    assert last.usage.output_tokens == whole.usage.output_tokens and last.stop_reason == "end_turn"
kinds = [e.type for e in client.messages.create(messages=paris, stream=True, **common)]
assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
counted = client.messages.count_tokens(model="demo", messages=paris, system="Be brief.").input_tokens
assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

weather = user("What's the weather in Paris?")
called = client.messages.create(messages=weather, tools=TOOLS, **common)
use = called.content[-1]
assert called.stop_reason == "tool_use" and use.name == "get_weather" and use.input == {"city": "Paris"}
with client.messages.stream(messages=weather, tools=TOOLS, tool_choice={"type": "any"}, **common) as stream:
    assert stream.get_final_message().content[-1].input == {"city": "Paris"}
result = {"type": "tool_result", "tool_use_id": use.id, "content": "22 degrees and sunny"}
turns = [*weather, {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
assert "22" in client.messages.create(messages=turns, tools=TOOLS, **common).content[0].text

models = client.models.list()
assert [model.id for model in models] == ["demo"] and models.data[0].type == "model"
assert client.models.retrieve("demo") == models.data[0] and models.data[0].lifecycle == "active"

stopped = client.messages.create(messages=paris, stop_sequences=["Paris"], **common)
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "Paris"
begun = [*paris, {"role": "assistant", "content": "The capital of France is"}]
assert "Paris" in client.messages.create(messages=begun, **common).content[0].text
assert client.messages.create(**{**common, "max_tokens": 2}, messages=paris).stop_reason == "max_tokens"
try:
    client.messages.create(**{**common, "model": "nope"}, messages=paris)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("an unknown model was served")
try:
    anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(messages=paris, **common)
except anthropic.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was taken")


async def together() -> None:
    other = anthropic.AsyncAnthropic(base_url=url, api_key=key)
    found = await asyncio.gather(
        *[other.messages.create(messages=paris, system="Be brief.", **common) for _ in range(8)]
    )
    assert {m.content[0].text for m in found} == {whole.content[0].text}


asyncio.run(together())
