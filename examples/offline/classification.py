"""Which label fits a text? The language model chooses; models with a head of their own are not built yet."""

from __future__ import annotations

import sys

from tokenmill import LLM, ClassificationRequestOutput

LABELS = ["weather", "sports", "cooking"]
PROMPTS = ["It rained all day.", "She scored in the last minute."]


def main(model: str = "demo") -> list[ClassificationRequestOutput]:
    """Classify, and print the likeliest label."""
    llm = LLM(model=model)
    outputs = llm.classify(PROMPTS, labels=LABELS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        probs = output.outputs.probs
        print(f"{prompt!r}: {LABELS[probs.index(max(probs))]} ({max(probs):.2f} of {output.outputs.num_classes})")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
