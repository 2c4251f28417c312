"""Prompts as vectors."""

from __future__ import annotations

import sys

from tokenmill import LLM, EmbeddingRequestOutput, PoolingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def main(model: str = "demo") -> list[EmbeddingRequestOutput]:
    """Embed, and print the vectors' beginnings."""
    llm = LLM(model=model, runner="pooling")
    outputs = llm.embed(PROMPTS)
    outputs += llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=16))  # the first 16 numbers, of length 1
    for output in outputs:
        vector = output.outputs.embedding
        print(f"{output.outputs.hidden_size} numbers: {[round(x, 3) for x in vector[:4]]} ...")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
