"""Making long conversations short. Owns: the request to the model for this, and the object that comes back.

What the model writes becomes a `compaction` item, whose text is not encrypted. Must not know: HTTP, what is kept.
"""

from __future__ import annotations

import time
from typing import Any

from tokenmill.server.responses.answers import usage_object
from tokenmill.server.responses.conversation_items import Item, Messages, full_items
from tokenmill.server.responses.schemas import TalkRequest
from tokenmill.text.messages.message import Message

MOST_TOKENS = 2048
"""Most tokens of a summary."""
ASK = (
    "Summarise this conversation so that it can be continued without its text. Keep what the user wants, decisions, "
    "names, numbers, file paths, results of tools, and what is still to do. Write the summary only."
)


def fields_for_summary(body: TalkRequest, messages: Messages, room: int) -> dict[str, Any]:
    """The chat request that writes the summary."""
    if messages and messages[-1]["role"] == "user":
        last = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{ASK}"}
        messages = [*messages[:-1], last]
    else:
        messages = [*messages, {"role": "user", "content": ASK}]
    return {**body.fields(messages), "max_completion_tokens": max(1, min(MOST_TOKENS, room))}


def compacted(name: str, items: list[Item], said: Message, usage: dict[str, Any]) -> dict[str, Any]:
    """The answer: instructions among the items stay as they are, and everything else is in the summary."""
    kept = [item for item in items if item.get("role") in ("system", "developer")]
    summary = {"type": "compaction", "encrypted_content": (said.content or said.reasoning).strip()}
    return {
        "id": name,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": full_items([*kept, summary]),
        "usage": usage_object(usage),
        "image": None,
    }
