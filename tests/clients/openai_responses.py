"""openai's Responses API against a running server: python tests/clients/openai_responses.py URL KEY.

Run by tests/clients/run.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
common: Any = {"model": "demo", "temperature": 0}
PARIS = "What is the capital of France?"
TOOL: Any = {
    "type": "function", "name": "get_weather", "description": "Get the weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                   "additionalProperties": False},
}  # fmt: skip


class Person(BaseModel):
    name: str
    age: int


whole = client.responses.create(input=PARIS, **common)
assert "Paris" in whole.output_text and whole.status == "completed" and whole.usage.output_tokens > 0
with client.responses.stream(input=PARIS, **common) as stream:
    deltas = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert deltas == stream.get_final_response().output_text == whole.output_text
kinds = [e.type for e in client.responses.create(input=PARIS, stream=True, **common)]
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

first = client.responses.create(input="My name is Alice.", **common)
second = client.responses.create(input="What is my name?", previous_response_id=first.id, **common)
assert "Alice" in second.output_text
assert [part.text for item in client.responses.input_items.list(second.id) for part in item.content] == [
    "What is my name?"
]
assert client.responses.retrieve(first.id).output_text == first.output_text
client.responses.delete(first.id)
try:
    client.responses.retrieve(first.id)
except openai.NotFoundError:
    pass
else:
    raise AssertionError("a deleted response was found")

asked = client.responses.create(input="What's the weather in Paris?", tools=[TOOL], **common)
call = asked.output[-1]
assert call.type == "function_call" and call.name == "get_weather" and "Paris" in call.arguments
result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees and sunny"}
told = client.responses.create(input=[result], previous_response_id=asked.id, tools=[TOOL], **common)
assert "22" in told.output_text
question = {"role": "user", "content": "What's the weather in Paris?"}
again = client.responses.create(input=[question, call.model_dump(), result], tools=[TOOL], **common)
assert again.output_text == told.output_text
streamed = list(client.responses.create(input=[question], tools=[TOOL], stream=True, **common))
assert [e.arguments for e in streamed if e.type == "response.function_call_arguments.done"] == [call.arguments]

parsed = client.responses.parse(input="Extract name and age as JSON: Tom is 31.", text_format=Person, **common)
assert parsed.output_parsed == Person(name="Tom", age=31)
likely = client.responses.create(input=PARIS, include=["message.output_text.logprobs"], top_logprobs=2, **common)
assert len(likely.output[0].content[0].logprobs[0].top_logprobs) == 2

run = client.responses.create(model="demo", input="Write a short story about a robot.", background=True)
while run.status in ("queued", "in_progress"):
    time.sleep(0.05)
    run = client.responses.retrieve(run.id)
assert run.status == "completed" and run.output_text
numbers = [e.sequence_number for e in client.responses.retrieve(run.id, stream=True, starting_after=3)]
assert numbers[0] == 4 and numbers == list(range(4, 4 + len(numbers)))
ended = client.responses.create(model="demo", input="Write a long story.", background=True, max_output_tokens=4000)
assert client.responses.cancel(ended.id).status in ("cancelled", "completed")
short = client.responses.create(input=PARIS, max_output_tokens=2, **common)
assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
for wrong in ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
              {"input": "x", "tools": [{"type": "web_search"}]}):  # fmt: skip
    try:
        client.responses.create(**wrong, **common)
    except openai.BadRequestError:
        continue
    raise AssertionError(f"{wrong} was accepted")
