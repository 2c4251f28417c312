"""What openai's client keeps on a server, and its WebSocket: python tests/clients/openai_kept.py URL KEY.

Every answer is checked against the client's own types, strictly. Run by tests/clients/run.py.
"""

from __future__ import annotations

import sys
from typing import Any

import openai
from pydantic import BaseModel, TypeAdapter

client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
common: Any = {"model": "demo", "temperature": 0}
NAME = {"type": "message", "role": "user", "content": "My name is Alice."}


def right(value: BaseModel) -> Any:
    """The same, if its own type takes it strictly."""
    TypeAdapter(type(value)).validate_json(value.model_dump_json(by_alias=True, exclude_unset=True), strict=True)
    return value


def missing(call: Any, *args: Any, **fields: Any) -> None:
    try:
        call(*args, **fields)
    except openai.NotFoundError:
        return
    raise AssertionError("something that was deleted was found")


talk = right(client.conversations.create(items=[NAME], metadata={"topic": "names"}))
assert right(client.conversations.retrieve(talk.id)).metadata == {"topic": "names"}
asked = right(client.responses.create(input="What is my name?", conversation=talk.id, **common))
assert "Alice" in asked.output_text and asked.conversation.id == talk.id
items = list(client.conversations.items.list(talk.id, order="asc", limit=1))
assert [item.role for item in items] == ["user", "user", "assistant"]
added = right(client.conversations.items.create(talk.id, items=[NAME]))
assert right(client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id)).id == added.data[0].id
right(client.conversations.items.delete(added.data[0].id, conversation_id=talk.id))
assert right(client.conversations.update(talk.id, metadata={})).metadata == {}
assert right(client.conversations.delete(talk.id)).deleted
missing(client.conversations.retrieve, talk.id)

counted = right(client.responses.input_tokens.count(model="demo", input="What is my name?"))
assert counted.input_tokens == client.responses.create(input="What is my name?", **common).usage.input_tokens
short = right(client.responses.compact(model="demo", input=[NAME, {"role": "assistant", "content": "Hello Alice!"}]))
assert short.output[-1].type == "compaction" and short.output[-1].encrypted_content
again = client.responses.create(
    input=[*[o.model_dump() for o in short.output], {"role": "user", "content": "Hi"}], **common
)
assert right(again).status == "completed"

chat = client.chat.completions.create(
    messages=[{"role": "user", "content": "What is the capital of France?"}], store=True, metadata={"a": "b"}, **common
)
chunks = list(client.chat.completions.create(
    messages=[{"role": "user", "content": "What is the capital of France?"}], store=True, stream=True, **common
))  # fmt: skip
said = right(client.chat.completions.retrieve(chat.id)).choices[0].message.content
assert said == chat.choices[0].message.content and "Paris" in said
assert client.chat.completions.retrieve(chunks[0].id).choices[0].message.content == said
assert [c.id for c in client.chat.completions.list(limit=1)] == [chat.id, chunks[0].id]
assert [c.id for c in client.chat.completions.list(metadata={"a": "b"})] == [chat.id]
assert right(client.chat.completions.update(chat.id, metadata={"c": "d"})).metadata == {"c": "d"}
assert [m.content for m in client.chat.completions.messages.list(chat.id)] == ["What is the capital of France?"]
assert right(client.chat.completions.delete(chat.id)).deleted
missing(client.chat.completions.retrieve, chat.id)

with client.responses.connect() as connection:

    def answer(**fields: Any) -> Any:
        connection.response.create(**fields)
        for event in connection:
            if event.type == "error" or event.type in ("response.completed", "response.incomplete"):
                return right(event)
        raise AssertionError("the connection ended")

    first = answer(input="My name is Alice.", store=False, **common).response
    second = answer(input="What is my name?", previous_response_id=first.id, store=False, **common).response
    assert "Alice" in second.output_text
    assert answer(input="x", previous_response_id="resp_none", **common).error.code == "previous_response_not_found"
    assert answer(input="Hi", generate=False, **common).response.output == []
