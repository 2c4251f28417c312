"""Files that a person names while a verb runs. Owns: writing them whole, reading JSON of bounded size, and reading
conversations and tools in the forms that OpenAI's API has.

Whoever else wrote such a file may have put anything into it. Must not know: terminals, engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenmill.core.errors import ModelError, ParameterError, why
from tokenmill.core.files import in_home, open_regular
from tokenmill.core.whole_file import write_whole

if TYPE_CHECKING:
    from pydantic import BaseModel

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_BYTES = 16 << 20
MOST_NAME = 1000
"""Most characters of a file's name in a message."""


def write_named(path: Path, text: str) -> None:
    """Write a file completely or not at all. The old contents stay until the new ones are on the disk."""
    try:
        if path.exists() and not path.is_file():  # a terminal, a pipe
            path.write_text(text, encoding="utf-8")
            return
        write_whole(path.resolve(), text.encode())  # a link stays a link
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, or a name that no file can have
        raise ParameterError(f"{str(path)[:MOST_NAME]} cannot be written: {_why(error)}.") from error


def read_json(name: str) -> Any:
    """Read a JSON file."""
    path, name = in_home(name), name[:MOST_NAME]
    try:
        if path.is_dir():
            raise ParameterError(f"{name} cannot be read: it is a folder.")
        path.stat()
        with open_regular(path, MOST_BYTES) as file:
            data = file.read(MOST_BYTES + 1)
    except ModelError:  # that error speaks of model folders
        raise ParameterError(f"{name} is not a readable file of at most {MOST_BYTES >> 20} MiB.") from None
    except (OSError, ValueError) as error:
        raise ParameterError(f"{name} cannot be read: {_why(error)}.") from error
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{name} is not JSON.") from error


def read_conversation(name: str) -> list[dict[str, Any]]:
    """Read messages from a file, in the form of chat templates: a JSON list, or an object with `messages`."""
    from tokenmill.server.openai.chat import template_message
    from tokenmill.server.openai.schemas import ChatRequest, Message

    found = read_json(name)
    if isinstance(found, dict):
        found = found.get("messages")
    if not isinstance(found, list):
        raise ParameterError(f"{name} holds no conversation: a JSON list of messages with role and content.")
    if not found:
        return []
    body = {"messages": found}
    _refuse_unread(name, body, ChatRequest)
    messages = [template_message(cast(Message, each)) for each in _checked(name, body, ChatRequest).messages]
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise ParameterError(f"{name}: messages.{number}.role must be one of {', '.join(ROLES)}.")
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if found[number].get("content") is None and not message.get("tool_calls"):
            raise ParameterError(f"{name}: messages.{number} has neither content nor tool calls.")
        message.setdefault("content", "")
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        for place, call in enumerate(message.get("tool_calls", ())):
            call.setdefault("id", f"call_{number}_{place}")
    return messages


def read_tools(name: str) -> list[dict[str, Any]]:
    """Read tools from a file: one or a list, each a function or a tool with a function."""
    from tokenmill.server.openai.schemas import ChatRequest

    found = read_json(name)
    tools = found if isinstance(found, list) else [found]
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise ParameterError(f"{name} holds no list of tools: each needs a function with a name.")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    body = {"messages": [{"role": "user", "content": ""}], "tools": wrapped}
    _refuse_unread(name, body, ChatRequest)
    made = [tool.model_dump(exclude_none=True) for tool in _checked(name, body, ChatRequest).tools or ()]
    names = [tool["function"]["name"] for tool in made]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise ParameterError(f"{name} has two tools that are called {twice}.")
    return made


def _checked(name: str, body: dict[str, Any], schema: type[BaseModel]) -> Any:
    """Check this as a request's schema would."""
    from pydantic import ValidationError

    from tokenmill.server.findings import first_finding

    for text in _texts(body):
        if not is_text(text):
            raise ParameterError(f"{name} holds half a character (\\ud800 to \\udfff), which is not text.")
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise ParameterError(f"{name}: {': '.join(first_finding(error))}") from None


def _refuse_unread(name: str, body: dict[str, Any], schema: type[BaseModel]) -> None:
    """Refuse by name what would be ignored."""
    from tokenmill.core.unread_names import Unknown, judge_names, refuse_unknown
    from tokenmill.server.inputs.schema_names import schema_name
    from tokenmill.server.request_rules import make_request_rules

    unknown = Unknown()
    try:
        judge_names(body, make_request_rules()[schema_name(schema)], unknown)
        refuse_unknown(unknown)
    except ParameterError as error:
        raise ParameterError(f"{name}: {error}") from None


def is_text(text: str) -> bool:
    """Can this text be written as UTF-8? A name in another encoding arrives as halves of characters."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _texts(value: Any) -> Iterator[str]:
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list):
            rest += value


def _why(error: Exception) -> str:
    return why(error) if isinstance(error, OSError | UnicodeDecodeError) else str(error)
