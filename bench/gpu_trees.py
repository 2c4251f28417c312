"""What draft trees are worth on a GPU: tokens per second and per step of the demo model with its own Medusa heads,
without drafts, with chains and with trees. JSON on stdout.

python bench/gpu_trees.py [ROWS ...]     (default 1 8; about two minutes)

All drafts are made and tried. Each figure is the median of five runs behind one that warms up; engines follow one
another, so that a pair of them is compared on one machine in one state.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.core.drafting import AllOfThem

HEADS = pathlib.Path(__file__).parents[1] / "src/tokenmill/demo/medusa"
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "chain of 3": {"num_speculative_tokens": 3},
    "best 3": {"num_speculative_tokens": 3, "speculative_token_tree": "best"},
    "best 8": {"num_speculative_tokens": 8, "speculative_token_tree": "best"},
    "best 16": {"num_speculative_tokens": 16, "speculative_token_tree": "best"},
    "best 32": {"num_speculative_tokens": 32, "speculative_token_tree": "best"},
}
TELL = "<|im_start|>user\nTell me a story about a {}.<|im_end|>\n<|im_start|>assistant\n"
WHO = ("dog", "king", "ship", "mill", "cat", "girl", "robot", "tree")
LENGTH = 192
PARAMS = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)


def measure(llm: LLM, rows: int) -> dict[str, float]:
    """So many requests at once."""
    prompts, counters = [TELL.format(WHO[i % len(WHO)]) for i in range(rows)], llm.engine.scheduler.counters
    found, steps = [], 1
    for _ in range(6):
        before, start = counters.steps, time.perf_counter()
        made = sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, PARAMS, use_tqdm=False))
        found.append(made / (time.perf_counter() - start))
        steps = counters.steps - before
    return {
        "tokens_per_second": round(statistics.median(found[1:]), 1),
        "tokens_per_row_and_step": round(LENGTH / steps, 3),
    }


def main(counts: list[int]) -> None:
    """One engine after the other."""
    for name, drafts in DRAFTS.items():
        config = None if drafts is None else {"method": "medusa", "model": str(HEADS), **drafts}
        with LLM("demo", device="cuda", max_model_len=2048, max_num_seqs=32, speculative_config=config) as llm:
            scheduler = llm.engine.scheduler
            if drafts is not None:
                scheduler.ahead.control = AllOfThem(scheduler.limits.max_guesses)
            for rows in counts:
                print(json.dumps({"drafts": name, "rows": rows, **measure(llm, rows)}), flush=True)


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [1, 8])
