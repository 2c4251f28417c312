"""Continue several prompts at once."""

from __future__ import annotations

import sys

from tokenmill import LLM, RequestOutput, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def main(model: str = "demo") -> list[RequestOutput]:
    """Generate, and print each prompt with its text."""
    llm = LLM(model=model)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
