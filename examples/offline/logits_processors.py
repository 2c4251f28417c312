"""A function that changes logits, of one request alone. It runs in Python for every token: slow, and counted."""

from __future__ import annotations

import sys

from torch import Tensor

from tokenmill import LLM, Counter, RequestOutput, SamplingParams


def only(token: int) -> object:
    """A processor after which nothing but this token is possible."""

    def change(output_ids: list[int], logits: Tensor) -> Tensor:
        return logits.new_full(logits.shape, float("-inf")).index_fill(0, logits.new_tensor([token]).long(), 0.0)

    return change


def main(model: str = "demo") -> list[RequestOutput]:
    """One prompt with a processor beside one without."""
    llm = LLM(model=model)
    token = llm.get_tokenizer().encode("a", add_special_tokens=False)[-1]
    forced = SamplingParams(temperature=0.0, max_tokens=5, logits_processors=[only(token)])
    free = SamplingParams(temperature=0.0, max_tokens=5)
    outputs = llm.generate(["Hello, my name is"] * 2, [forced, free])
    counted = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    print(f"{counted['tokenmill:logits_processor_tokens']:g} tokens waited for a processor")
    for output in outputs:
        print(f"{output.outputs[0].token_ids} {output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
