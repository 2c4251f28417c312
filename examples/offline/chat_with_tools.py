"""A call of a tool, its result, and the answer that follows from it."""

from __future__ import annotations

import json
import sys
from typing import Any

from tokenmill import LLM, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_current_weather", "description": "The weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
TEMPLATE = (
    "{% for tool in tools %}tool: {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def get_current_weather(city: str) -> str:
    """The tool: it knows one answer."""
    return f"The weather in {city} is 24 degrees, and sunny."


def main(model: str = "demo") -> list[dict[str, Any]]:
    """Ask, call the tool with what the model filled in, and ask again."""
    llm = LLM(model=model)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    shape = StructuredOutputsParams(json=CITY, whitespace_pattern=" ?")
    arguments = SamplingParams(max_tokens=64, temperature=0.0, structured_outputs=shape)
    called = llm.chat(messages, arguments, use_tqdm=False, tools=TOOLS, chat_template=TEMPLATE)[0].outputs[0].text
    result = get_current_weather(**json.loads(called))
    messages += [{"role": "assistant", "content": called}, {"role": "tool", "content": result}]
    answer = llm.chat(messages, SamplingParams(max_tokens=16), use_tqdm=False, tools=TOOLS, chat_template=TEMPLATE)
    messages.append({"role": "assistant", "content": answer[0].outputs[0].text})
    print(json.dumps(messages, indent=2))
    return messages


if __name__ == "__main__":
    main(*sys.argv[1:])
