"""How well do texts go together?"""

from __future__ import annotations

import sys

from tokenmill import LLM, ScoringRequestOutput

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def main(model: str = "demo") -> list[ScoringRequestOutput]:
    """Score one text with two others, by their vectors and by the model's judgement."""
    llm = LLM(model=model, runner="pooling")
    outputs = llm.score(QUERY, DOCUMENTS)
    outputs += llm.score(QUERY, DOCUMENTS, method="likelihood")
    for document, output in zip(DOCUMENTS * 2, outputs, strict=True):
        print(f"{document!r}: {output.outputs.score:.3f}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
