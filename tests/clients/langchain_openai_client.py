"""langchain-openai against a running server: python tests/clients/langchain_openai_client.py URL [KEY]."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
model = "tiny" if len(sys.argv) < 4 else sys.argv[3]
common = {"base_url": url, "api_key": key, "model": model}
chat = ChatOpenAI(**common, max_tokens=8, temperature=0)
whole = chat.invoke([("system", "Be brief."), ("human", "Hello")])
assert whole.usage_metadata["output_tokens"] >= 1
assert "".join(c.content for c in chat.stream([("system", "Be brief."), ("human", "Hello")])) == whole.content
assert len(chat.batch(["One", "Two"])) == 2
assert isinstance(OpenAI(**common, max_tokens=4).invoke("One"), str)
vectors = OpenAIEmbeddings(**common, check_embedding_ctx_length=False).embed_documents(["a", "b"])
assert len(vectors) == 2
print("langchain-openai ok")
