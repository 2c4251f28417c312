"""text-generation (TGI's client) against a running server: python tests/clients/text_generation_client.py URL KEY.

Run by tests/clients/run.py.
"""

from __future__ import annotations

import sys

from text_generation import Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType

client = Client(sys.argv[1].removesuffix("/v1"), headers={"Authorization": f"Bearer {sys.argv[2]}"})
PROMPT = "The capital of France is"
whole = client.generate(PROMPT, max_new_tokens=8)
assert whole.generated_text.strip().startswith("Paris") and whole.details.tokens[0].logprob < 0
parts = list(client.generate_stream(PROMPT, max_new_tokens=8))
assert parts[-1].generated_text == whole.generated_text
assert "".join(p.token.text for p in parts if not p.token.special) == whole.generated_text
assert parts[-1].details.generated_tokens == whole.details.generated_tokens == len(parts)
rich = client.generate(
    PROMPT, do_sample=True, max_new_tokens=8, best_of=2, temperature=0.9, top_p=0.9, top_k=20, repetition_penalty=1.1,
    decoder_input_details=True, return_full_text=True, top_n_tokens=2, stop_sequences=["."], truncate=64,
)  # fmt: skip
assert rich.generated_text.startswith(PROMPT) and len(rich.details.best_of_sequences) == 1
assert len(rich.details.prefill) >= 3 and len(rich.details.top_tokens[0]) == 2
sampled = [client.generate(PROMPT, do_sample=True, seed=7, temperature=2.0, max_new_tokens=8) for _ in range(2)]
assert sampled[0].generated_text == sampled[1].generated_text and sampled[0].details.seed == 7
digits = client.generate(PROMPT, max_new_tokens=8, grammar=Grammar(type=GrammarType.Regex, value="[0-9]{3}"))
assert digits.generated_text.isdigit() and len(digits.generated_text) == 3
assert client.generate(PROMPT, max_new_tokens=1).details.finish_reason.value == "length"
try:
    client.generate(PROMPT, max_new_tokens=100_000)
except ValidationError as error:
    assert "context" in str(error)
else:
    raise AssertionError("more tokens than fit were accepted")
