"""huggingface_hub's InferenceClient against a running server: python tests/clients/huggingface_client.py URL KEY.

Run by tests/clients/run.py.
"""

from __future__ import annotations

import sys

from huggingface_hub import InferenceClient

url, key = sys.argv[1], sys.argv[2]
root = InferenceClient(url.removesuffix("/v1"), token=key)
PROMPT = "The capital of France is"
assert root.text_generation(PROMPT, max_new_tokens=6).strip().startswith("Paris")
found = root.text_generation(PROMPT, max_new_tokens=6, details=True)
assert found.details.generated_tokens == len(found.details.tokens)
parts = list(root.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True))
assert parts[-1].generated_text == found.generated_text
client = InferenceClient(base_url=url, api_key=key)
talk = [{"role": "user", "content": "What is 17 + 25?"}]
whole = client.chat_completion(talk, model="demo", temperature=0, max_tokens=30).choices[0].message.content
assert "42" in whole
stream = client.chat_completion(talk, model="demo", temperature=0, max_tokens=30, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole
host = url.removesuffix("/v1")  # TEI's endpoints
vectors = InferenceClient(f"{host}/embed", token=key).feature_extraction(["a mill", "a river"])
assert vectors.shape[0] == 2 and abs(float((vectors[0] ** 2).sum()) - 1) < 1e-3
near = InferenceClient(f"{host}/similarity", token=key).sentence_similarity(
    "a mill", other_sentences=["a mill", "a river"]
)
assert abs(near[0] - 1) < 1e-3 and near[1] < near[0]
print("huggingface_hub ok, with TEI's endpoints")
