"""How speed follows the cores: one thread against all in prefill, and all of them beside a busy neighbour.

    python bench/cpu/sharing.py MODEL [--tokens 512] [--runs 3]

The neighbour is a process that computes without end on one of the cores. "proportional" is what remains if that core
gave half of itself; JSON on stdout; wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

from tokenmill.core.config import calm_threads

calm_threads()

from tokenmill import LLM, SamplingParams  # noqa: E402

NEIGHBOUR = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def rates(llm: LLM, tokens: int, runs: int, source: random.Random) -> dict[str, float]:
    """Median prefill and decode rates of one sequence; prompts that `source` has not made before."""
    prefill, decode = [], []
    size = llm.built.facts.vocab_size
    for _ in range(runs):
        prompt = {"prompt_token_ids": [source.randrange(100, size - 100) for _ in range(tokens)]}
        took = []
        for output in (1, 1, 33):  # the second and third find the prompt in the prefix cache
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            begin = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            took.append(time.perf_counter() - begin)
        prefill.append(tokens / took[0])
        decode.append(32 / (took[2] - took[1]))
    return {"prefill": round(statistics.median(prefill), 1), "decode": round(statistics.median(decode), 1)}


def main() -> None:
    """All three settings, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, dict[str, float]] = {}
    source = random.Random(0)
    with LLM(model=options.model, skip_tokenizer_init=True, max_model_len=options.tokens + 64) as llm:
        from tokenmill import _native

        for name, threads in (("one thread", 1), ("all threads", len(cores))):
            _native.set_threads(threads)
            rates(llm, 64, 1, source)
            found[name] = rates(llm, options.tokens, options.runs, source)
        neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(cores[-1])])
        try:
            found["busy neighbour"] = rates(llm, options.tokens, options.runs, source)
        finally:
            neighbour.kill()
            neighbour.wait()
    left = (len(cores) - 0.5) / len(cores)
    whole = found["all threads"]
    print(json.dumps({
        **found, "threads": len(cores),
        "prefill_scaling": round(whole["prefill"] / found["one thread"]["prefill"], 2),
        "left_beside_neighbour": {key: round(found["busy neighbour"][key] / whole[key], 2) for key in whole},
        "proportional": left, "load_average": os.getloadavg()[0],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
