"""How far drafts take a step, as chains and as trees: tokens per step on prompts that the demo was not trained on,
counted, not timed. JSON on stdout.

python bench/cpu/trees.py [PROMPTS PER SKILL]     (default 2; about five minutes on two cores)

The demo's own Medusa heads guess; every draft is made and tried, so a step's tokens say what its nodes are worth. Texts
are checked to be the same with all of them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from tokenmill.core.config import calm_threads

calm_threads()
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "train/demo"))

from render import case_prompt  # noqa: E402
from suites import SUITES, items  # noqa: E402

from tokenmill import LLM, SamplingParams  # noqa: E402
from tokenmill.core.drafting import AllOfThem  # noqa: E402

HEADS = ROOT / "src/tokenmill/demo/medusa"
SHAPES: dict[str, Any] = {
    "chain of 3": None,
    "10 nodes": [[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]],
    "best 4": 4,
    "best 8": 8,
    "best 16": 16,
    "best 32": 32,
    "best 64": 64,
}
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=64),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=1, max_tokens=64),
}


def config(shape: Any) -> dict[str, Any]:
    """--speculative-config."""
    found: dict[str, Any] = {"method": "medusa", "model": str(HEADS)}
    if shape is None:
        return found | {"num_speculative_tokens": 3}
    if isinstance(shape, int):
        return found | {"speculative_token_tree": "best", "num_speculative_tokens": shape}
    return found | {"speculative_token_tree": shape}


def main(count: int) -> None:
    """One engine after the other, one prompt at a time; the step of the prompt counts, too."""
    prompts = {suite: [case_prompt(case) for case in items(suite, True, count)] for suite in SUITES}
    texts: dict[tuple[str, str], list[list[int]]] = {}
    for name, shape in SHAPES.items():
        with LLM("demo", max_model_len=2048, max_num_seqs=8, speculative_config=config(shape)) as llm:
            scheduler = llm.engine.scheduler
            scheduler.ahead.control = AllOfThem(scheduler.limits.max_guesses)
            for kind, params in KINDS.items():
                gained: dict[str, float] = {}
                for suite, cases in prompts.items():
                    tokens, steps = scheduler.counters.output_tokens, scheduler.counters.steps
                    said = [llm.generate([case], params, use_tqdm=False)[0].outputs[0].token_ids for case in cases]
                    steps = scheduler.counters.steps - steps
                    gained[suite] = (scheduler.counters.output_tokens - tokens) / steps
                    assert texts.setdefault((kind, suite), said) == said, (name, kind, suite)
                mean = sum(gained.values()) / len(gained)
                each = {suite: round(value, 2) for suite, value in gained.items()}
                print(json.dumps({"drafts": name, "kind": kind, "tokens_per_step": round(mean, 3), "by_skill": each}))
                sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
