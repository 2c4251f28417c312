"""Several turns with a tool: the model asks for it, gets its result, and answers."""

from __future__ import annotations

import json
import sys

from tokenmill import LLM
from tokenmill.program import Session

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": CITY}


def get_weather(city: str) -> str:
    """A tool that knows one answer."""
    return json.dumps({"city": city, "temperature": 21, "sky": "sunny"})


def solve(session: Session, question: str) -> str:
    """Answer with as many calls as the model wants, at most four rounds."""
    talk = session.talk(tools=[{"type": "function", "function": WEATHER}]).user(question).gen()
    for _ in range(4):
        calls = talk.calls()
        for call in calls:
            talk.tool(get_weather(**json.loads(call.arguments)), call)
        if not calls:
            break
        talk.gen()
    return talk["answer"]


if __name__ == "__main__":
    print(solve(Session(LLM(*sys.argv[1:])), "What is the weather in Paris?"))
