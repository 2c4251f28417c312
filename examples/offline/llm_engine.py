"""An engine that is stepped by hand: requests come while others are answered."""

from __future__ import annotations

import argparse
import sys

from tokenmill import EngineArgs, LLMEngine, RequestOutput, SamplingParams

REQUESTS = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, max_tokens=6)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=6)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=6)),
]


def main(model: str = "demo") -> list[RequestOutput]:
    """Add a request before each of the first steps; -> the finished outputs."""
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(["--model", model])))
    waiting, finished = list(enumerate(REQUESTS)), []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                print(f"{output.prompt!r} -> {[out.text for out in output.outputs]}")
                finished.append(output)
    engine.close()
    return finished


if __name__ == "__main__":
    main(*sys.argv[1:])
