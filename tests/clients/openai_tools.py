"""The openai package's tools, parse and stream helpers with pydantic models, unpatched: openai_tools.py URL KEY.

Nothing is passed that OpenAI's own API would not take. Run by tests/clients/run.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class GetWeather(BaseModel):
    """Get the current weather in a city."""

    city: str


class Answer(BaseModel):
    """A typed answer; bounded, for a small model may go on with digits or words for ever."""

    mood: Literal["good", "bad"]
    number: int = Field(ge=0, le=99)
    words: list[Literal["sea", "sun"]] = Field(max_length=3)


def tool_loop(client: openai.OpenAI, model: str) -> None:
    """The demo model calls its tool, gets a result, and answers with it."""
    whole = client.chat.completions.create(model=model, messages=ASK, tools=[WEATHER], temperature=0)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    name, arguments, ids, reasons = "", "", [], []
    for chunk in client.chat.completions.create(model=model, messages=ASK, tools=[WEATHER], temperature=0, stream=True):
        for part in chunk.choices:
            reasons.append(part.finish_reason)
            for piece in part.delta.tool_calls or ():
                assert piece.index == 0
                ids += [piece.id] if piece.id else []
                name += piece.function.name or "" if piece.function else ""
                arguments += piece.function.arguments or "" if piece.function else ""
    assert (name, arguments) == ("get_weather", call.function.arguments)
    assert len(ids) == 1 and reasons[-1] == "tool_calls" and not any(reasons[:-1])
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"city": "Paris", "temperature": 21, "sky": "sunny"}',
    }
    after = [*ASK, choice.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=model, messages=after, tools=[WEATHER], temperature=0)
    assert answer.choices[0].finish_reason == "stop" and "21" in (answer.choices[0].message.content or "")


def choices(client: openai.OpenAI, model: str) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        answer = client.chat.completions.create(
            model=model, messages=hello, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert set(json.loads(call.function.arguments)) >= {"city"} and answer.choices[0].finish_reason == reason
    without = client.chat.completions.create(model=model, messages=hello, tools=[WEATHER], tool_choice="none")
    assert not without.choices[0].message.tool_calls


def parsed(client: openai.OpenAI, model: str) -> None:
    """chat.completions.parse and .stream with models: the answer is an object of the class."""
    say: Any = [{"role": "user", "content": "How are you?"}]
    done = client.chat.completions.parse(model=model, messages=say, response_format=Answer, temperature=0.7, seed=1)
    assert isinstance(done.choices[0].message.parsed, Answer)
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    called = client.chat.completions.parse(model=model, messages=ASK, tools=[tool], temperature=0)
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    with client.chat.completions.stream(model=model, messages=say, response_format=Answer, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer) and {"content.delta", "content.done"} <= kinds
    with client.chat.completions.stream(model=model, messages=ASK, tools=[tool], temperature=0) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


def reasoning(client: openai.OpenAI, model: str) -> None:
    ask: Any = [{"role": "user", "content": "What is 12 plus 5?"}]
    whole = client.chat.completions.create(model=model, messages=ask, reasoning_effort="low", temperature=0)
    message = whole.choices[0].message
    assert message.model_extra and message.model_extra["reasoning"] and "<think>" not in (message.content or "")
    assert (
        whole.usage and whole.usage.completion_tokens_details and whole.usage.completion_tokens_details.reasoning_tokens
    )
    said = {"reasoning_content": "", "content": ""}
    stream = client.chat.completions.create(
        model=model, messages=ask, reasoning_effort="low", temperature=0, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
    assert said == {"reasoning_content": message.model_extra["reasoning_content"], "content": message.content}


def responses(client: openai.OpenAI, model: str) -> None:
    """The responses API's parse and stream with the same models."""
    done = client.responses.parse(model=model, input="How are you?", text_format=Answer, temperature=0)
    assert isinstance(done.output_parsed, Answer)
    function: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    tools: Any = [{"type": "function", **function}]
    called = client.responses.parse(model=model, input="What is the weather in Paris?", tools=tools, temperature=0)
    assert [item.type for item in called.output] == ["function_call"]
    with client.responses.stream(model=model, input="How are you?", text_format=Answer, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Answer)
    assert {"response.output_text.delta", "response.completed"} <= kinds


def refused(client: openai.OpenAI, model: str) -> None:
    bad: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"properties": {"a": {"pattern": "(?=x)"}}}},
    }
    try:
        client.chat.completions.create(model=model, messages=ASK, response_format=bad)
    except openai.BadRequestError as error:
        assert "#/properties/a/pattern" in str(error)
    else:
        raise AssertionError("a schema that cannot be enforced was accepted")


def main() -> None:
    url, key = sys.argv[1:3]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        for check in (tool_loop, choices, parsed, reasoning, responses, refused):
            check(client, model)
            print("ok", check.__name__)


if __name__ == "__main__":
    main()
