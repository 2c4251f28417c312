"""Decode steps and prompts of hybrids and mixtures on an NVIDIA GPU, and where their time goes.

python bench/gpu_families.py NAME[:LAYERS]... [--profile]

NAME is one of geometries.py's PUBLISHED, with its first LAYERS if the whole does not fit. Weights are dummies in
bfloat16. Shown are milliseconds of a step of one row and of 32 after 128 tokens, of 8,000 prompt tokens, and what fell
back to the reference; with --profile the longest kernels of each, too (gpu_profile.py). Each model is a process.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

from geometries import PUBLISHED, published_config
from gpu_profile import add, profile
from tokenmill import LLM, SamplingParams

ROWS = 32
TOKENS = 96


def generate(llm: LLM, rows: int, prompt: int, tokens: int, ids: random.Random) -> float:
    """Seconds for so many random prompts and answers. ids: a source that goes on, as the prefix cache would know the
    prompts of an earlier call."""
    prompts = [{"prompt_token_ids": [ids.randrange(1000, 25000) for _ in range(prompt)]} for _ in range(rows)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


def measure(name: str, layers: int, *, profiled: bool) -> None:
    """One model: a line, and its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(published_config(name, layers)))
        start = time.perf_counter()
        llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=ROWS, max_model_len=4000
        )  # fmt: skip
        ready, ids = time.perf_counter() - start, random.Random(1)
        for rows, prompt in ((1, 128), (ROWS, 128), (4, 2000)):
            generate(llm, rows, prompt, 4, ids)
        steps = {
            n: (generate(llm, n, 128, 1 + TOKENS, ids) - generate(llm, n, 128, 1, ids)) / TOKENS for n in (1, ROWS)
        }
        prompts = min(generate(llm, 4, 2000, 1, ids) for _ in range(2))
        counts = llm.engine.executor.runner.kernels.counters()
        fell = {op: count["fallbacks"] for op, count in counts.items() if count["fallbacks"]}
        print(f"{name}: ready after {ready:.1f} s; step of 1 row {steps[1] * 1e3:.3f} ms, of {ROWS} "
              f"{steps[ROWS] * 1e3:.3f} ms; prompts of 8,000 tokens {prompts * 1e3:.0f} ms; fallbacks {fell}",
              flush=True)  # fmt: skip
        for rows, prompt, output in ((1, 128, 24), (ROWS, 128, 24), (4, 2000, 2)) if profiled else ():
            add(llm, rows, prompt, 0, output, most=25000)
            for _ in range(12 if output > 2 else 0):
                llm.engine.step()
            profile(llm, 4 if output > 2 else 1)
            while llm.engine.has_work:
                llm.engine.step()


def main() -> None:
    """Each model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME[:LAYERS]")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for model in given.models:
        name, _, layers = model.partition(":")
        if name not in PUBLISHED:
            parser.error(f"no model is named {name}: {', '.join(PUBLISHED)}")
        if given.here:
            measure(name, int(layers or 0), profiled=given.profile)
        else:
            subprocess.run([sys.executable, __file__, model, "--here", *["--profile"] * given.profile], check=False)


if __name__ == "__main__":
    main()
