"""langchain-openai against a running server: python tests/clients/langchain_openai_client.py URL KEY.

Run by tests/clients/run.py.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, key = sys.argv[1], sys.argv[2]
common: Any = {"base_url": url, "api_key": key, "model": "demo", "max_retries": 0}
talk = [SystemMessage("Be brief."), HumanMessage("Tell me about the sea.")]

chat = ChatOpenAI(**common, max_tokens=12, temperature=0, seed=3)
whole = chat.invoke(talk)
assert whole.usage_metadata["output_tokens"] >= 1 and whole.response_metadata["finish_reason"] in ("stop", "length")
chunks = list(ChatOpenAI(**common, max_tokens=12, temperature=0, seed=3, stream_usage=True).stream(talk))
assert "".join(c.content for c in chunks) == whole.content
assert (
    sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == whole.usage_metadata["output_tokens"]
)
assert len(chat.batch(["One", "Two", "Three"])) == 3
assert chat.invoke([*talk, AIMessage("Blue."), HumanMessage("More?")]).content

every = ChatOpenAI(
    **common, max_completion_tokens=8, temperature=0.8, top_p=0.9, frequency_penalty=0.1, presence_penalty=0.1, n=2,
    logprobs=True, top_logprobs=2, stop=["zzz"], extra_body={"top_k": 20, "min_p": 0.01},
)  # fmt: skip
found = every.generate([talk])
assert len(found.generations[0]) == 2
assert len(every.invoke(talk).response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2

schema = {"title": "x", "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
schema["additionalProperties"] = False  # a small model may think of further ones without end
for method in ("json_schema",):
    said = ChatOpenAI(**common, max_tokens=60, temperature=0).with_structured_output(schema, method=method).invoke(talk)
    assert isinstance(said["ok"], bool), said

weather = {"title": "get_weather", "description": "The weather of a city.", "type": "object"}
weather |= {"properties": {"city": {"type": "string"}}, "required": ["city"]}
asked = ChatOpenAI(**common, max_tokens=60, temperature=0).bind_tools([weather], tool_choice="get_weather")
(call,) = asked.invoke([HumanMessage("What is the weather in Rome?")]).tool_calls
assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str), call
last = AIMessage("", tool_calls=[call])
told = ToolMessage("18 degrees, rain", tool_call_id=call["id"])
assert chat.invoke([HumanMessage("What is the weather in Rome?"), last, told]).content

text = OpenAI(**common, max_tokens=4, temperature=0)
assert isinstance(text.invoke("One"), str) and "".join(text.stream("One")) == text.invoke("One")
assert len(text.generate(["One", "Two"]).generations) == 2
vectors = OpenAIEmbeddings(**common, check_embedding_ctx_length=False)
assert len(vectors.embed_documents(["a", "b"])) == 2 and len(vectors.embed_query("a")) > 8


async def at_once() -> None:
    answers = await asyncio.gather(*(chat.ainvoke(talk) for _ in range(8)))
    assert {a.content for a in answers} == {whole.content}
    streamed = [c.content async for c in chat.astream(talk)]
    assert "".join(streamed) == whole.content


asyncio.run(at_once())
print("langchain-openai ok")
