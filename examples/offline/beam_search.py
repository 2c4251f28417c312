"""The likeliest continuations, searched with several beams."""

from __future__ import annotations

import sys

from tokenmill import LLM, BeamSearchOutput, BeamSearchParams


def main(model: str = "demo") -> list[BeamSearchOutput]:
    """Search, and print the beams of each prompt, best first."""
    llm = LLM(model=model)
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    outputs = llm.beam_search([{"prompt": "The sea is"}, {"prompt": "The mill"}], params)
    for output in outputs:
        for beam in output.sequences:
            print(f"{beam.cum_logprob:8.2f}  {beam.text!r}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
