"""Times two models that take turns on a CPU, each asleep while the other answers: JSON on stdout.

    python bench/cpu/swap.py [MODEL MODEL] [--quantization int4] [--turns 6] [--folder DIR]

Without models, two of a 1B geometry with dummy weights. A turn puts one to sleep, wakes the other, and asks it for a
token; the first round, which writes the file, is told apart. What is aimed at: at most 0.5 s from the system's cache of
files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from geometries import GEOMETRIES
from tokenmill import LLM, SamplingParams

PROMPT = {"prompt_token_ids": list(range(5, 21))}


def timed(work: Callable[..., object], *given: object) -> float:
    """Seconds."""
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


def first_token(llm: LLM) -> list[int]:
    """One greedy token."""
    found = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), False)
    return list(found[0].outputs[0].token_ids)


def rss() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Take turns; print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--geometry", default="llama-3.2-1b", choices=sorted(GEOMETRIES))
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--folder")
    given = parser.parse_args()
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20, "device": "cpu",
        "enable_sleep_mode": True, "sleep_folder": given.folder, "quantization": given.quantization,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRIES[given.geometry]))
        named = given.models or [folder, folder]
        models, first_sleep, freed = [], [], []
        for seed, name in enumerate(named):
            more = {} if given.models else {"load_format": "dummy", "seed": seed}
            models.append(LLM(model=name, **options, **more))
            first_token(models[-1])
            held = rss()
            first_sleep.append(timed(models[-1].sleep))
            freed.append(held - rss())
        models[0].wake_up()
        turns: list[dict[str, float]] = []
        for turn in range(given.turns):
            old, new = models[turn % 2], models[(turn + 1) % 2]
            parts = {"sleep": timed(old.sleep), "wake": timed(new.wake_up)}
            parts["first_token"] = timed(first_token, new)
            turns.append({**parts, "all": sum(parts.values())})
        medians = {name: round(statistics.median(turn[name] for turn in turns[1:]), 3) for name in turns[0]}
        print(json.dumps({
            "weights_mb": models[0].built.facts.weight_bytes / 1e6, "freed_mb": [each / 1e6 for each in freed],
            "first_sleep_s": [round(each, 3) for each in first_sleep], "swap_s": medians,
            "load_average": os.getloadavg()[0],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
