"""llama-index against a running server: python tests/clients/llama_index_client.py URL KEY.

Run by tests/clients/run.py.
"""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="demo", api_base=sys.argv[1], api_key=sys.argv[2], is_chat_model=True, temperature=0.0, max_tokens=40,
    is_function_calling_model=True, max_retries=0,
)  # fmt: skip
talk = [ChatMessage(role="user", content="What is the capital of France?")]
whole = llm.chat(talk).message.content
assert "Paris" in whole
assert "".join(part.delta or "" for part in llm.stream_chat(talk)) == whole
assert llm.complete("What is the capital of France?").text == whole
assert "".join(part.delta or "" for part in llm.stream_complete("What is the capital of France?")) == whole
