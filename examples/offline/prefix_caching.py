"""Prompts that begin alike: what they share is computed once."""

from __future__ import annotations

import sys

from tokenmill import LLM, RequestOutput, SamplingParams

PREFIX = "You are an expert in schools. You have many years of experience. " * 4
PROMPTS = [f"{PREFIX}{question}" for question in ("Who are you?", "What do you do?", "Where are you?")]


def main(model: str = "demo") -> list[RequestOutput]:
    """The same answers with the cache as without it, and how much was found there."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    plain = LLM(model=model, enable_prefix_caching=False)
    wanted = plain.generate(PROMPTS, params)
    llm = LLM(model=model, enable_prefix_caching=True)
    llm.generate(PROMPTS[:1], params)  # fills the cache
    outputs = llm.generate(PROMPTS, params)
    for before, output in zip(wanted, outputs, strict=True):
        same = before.outputs[0].text == output.outputs[0].text
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached; the same text: {same}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
