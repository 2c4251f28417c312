"""What test_server_chat.py and other tests share."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.pure.server.conftest import Served


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=served.client, max_retries=0)


def events(text: str) -> list[Any]:
    """The JSON of each event; the stream must end with [DONE]."""
    parts = text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") and "\n" not in part for part in parts[:-1])
    return [json.loads(part[6:]) for part in parts[:-2]]
