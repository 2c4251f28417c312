"""Answers that match a choice, a pattern, a schema or a grammar."""

from __future__ import annotations

import sys

from tokenmill import LLM, SamplingParams, StructuredOutputsParams

CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 12},
        "kind": {"type": "string", "enum": ["sedan", "suv", "truck"]},
    },
    "required": ["brand", "kind"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "name" | "age"\ntable ::= "people" | "cars"\n'
STRUCTURES = {
    "Is this good or bad? It is wonderful!": StructuredOutputsParams(choice=["good", "bad"]),
    "An address of Alan's: ": StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com"),
    "A car as JSON: ": StructuredOutputsParams(json=CAR, whitespace_pattern=" ?"),
    "A query for names: ": StructuredOutputsParams(grammar=GRAMMAR),
}


def main(model: str = "demo") -> list[str]:
    """All four in one batch."""
    llm = LLM(model=model)
    params = [SamplingParams(max_tokens=80, structured_outputs=structure) for structure in STRUCTURES.values()]
    outputs = llm.generate(list(STRUCTURES), params)
    texts = [output.outputs[0].text for output in outputs]
    for prompt, text in zip(STRUCTURES, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:])
