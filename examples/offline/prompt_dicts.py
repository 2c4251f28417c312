"""Prompts as text, as token ids, and as dicts of either."""

from __future__ import annotations

import sys

from tokenmill import LLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt


def main(model: str = "demo") -> list[RequestOutput]:
    """All forms of one prompt continue alike."""
    llm = LLM(model=model)
    text = "The capital of France is"
    ids = llm.get_tokenizer()(text).input_ids
    prompts = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=ids), {"prompt": text, "cache_salt": "me"}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
    for output in outputs:
        print(f"{output.prompt!r} {output.prompt_token_ids} -> {output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
