"""A small model guesses, the large one checks: the same text in fewer steps. With the demo and what comes with it, by
default; `tokenmill distill` makes a draft model or heads for any other model."""

from __future__ import annotations

import sys
from typing import Any

from tokenmill import LLM, SamplingParams

GUESSED_BY: tuple[dict[str, Any] | None, ...] = (
    None,
    {"model": "demo:draft", "num_speculative_tokens": 3},
    {"method": "medusa", "model": "demo:medusa", "num_speculative_tokens": 3},
)
QUESTIONS = ("What is the capital of France?", "Tell me a story about a miller and a fox.")


def answers(model: str, speculative: dict[str, Any] | None) -> list[str]:
    """The answers, and how many guesses were made for them and were right."""
    with LLM(model=model, speculative_config=speculative) as llm:
        talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=96))
        figures = [output.metrics for output in outputs if output.metrics is not None]
        drafted, accepted = sum(f.drafted_tokens for f in figures), sum(f.accepted_tokens for f in figures)
    print(f"{speculative}: {accepted} of {drafted} guesses were right")
    return [output.outputs[0].text for output in outputs]


def main(model: str = "demo") -> list[list[str]]:
    """The same texts, whoever guesses."""
    found = [answers(model, speculative) for speculative in GUESSED_BY]
    print(*found[0], sep="\n")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
