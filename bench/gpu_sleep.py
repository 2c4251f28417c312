"""Times sleep on an NVIDIA GPU: two models of an 8B geometry with dummy weights take turns on one device.

python bench/gpu_sleep.py [--geometry NAME] [--kv-gib 4] [--turns 6] [--json OUT]

Each turn puts one to sleep, wakes the other, and asks it for a token: seconds of each part, medians without the first
round, which pins host memory (told apart). Also shown: the device's memory that a sleeping model gives back against its
weights and cache, level 2, and that no recording was made again. What is aimed at: at most 0.8 s to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geometries import GEOMETRIES
from tokenmill import LLM, SamplingParams

AIM_S = 0.8
PROMPT = {"prompt_token_ids": list(range(5, 69))}


def timed(work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Seconds until the device has done it, and what came of it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    made = work(*given)
    torch.cuda.synchronize()
    return time.perf_counter() - began, made


def first_token(llm: LLM) -> list[int]:
    """One greedy token."""
    found = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), False)
    return list(found[0].outputs[0].token_ids)


def main() -> None:
    """Print what each part takes; write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="llama-3-8b", choices=sorted(GEOMETRIES))
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--quantization")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_seqs": 64,
        "enable_sleep_mode": True, "kv_cache_memory_bytes": int(given.kv_gib * (1 << 30)),
        "quantization": given.quantization,
    }  # fmt: skip
    found: dict[str, Any] = {"geometry": given.geometry, "turns": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEOMETRIES[given.geometry]))
        models = []
        for seed in (0, 1):
            began = time.perf_counter()
            models.append(LLM(model=folder, seed=seed, **options))
            found.setdefault("load_s", []).append(time.perf_counter() - began)
            said = first_token(models[-1])
            free = torch.cuda.mem_get_info()[0]
            found.setdefault("first_sleep_s", []).append(timed(models[-1].sleep, 1)[0])
            found.setdefault("given_back", []).append(torch.cuda.mem_get_info()[0] - free)
            models[-1].wake_up()
            assert first_token(models[-1]) == said, "another answer than before"
            models[-1].sleep(1)
        facts = models[0].built.facts
        found["weights"], found["cache"] = facts.weight_bytes, int(facts.kv_block_bytes * sum(facts.num_blocks))
        models[0].wake_up()
        answers: list[Any] = [None, None]
        for turn in range(given.turns):
            old, new = turn % 2, (turn + 1) % 2
            parts = {"sleep": timed(models[old].sleep, 1)[0], "wake": timed(models[new].wake_up)[0]}
            parts["first_token"], token = timed(first_token, models[new])
            assert answers[new] in (None, token), "another answer than before"
            answers[new] = token
            found["turns"].append({**parts, "all": sum(parts.values())})
        now = given.turns % 2
        found["level_2_s"] = [timed(models[now].sleep, 2)[0], timed(models[now].wake_up)[0]]
        assert first_token(models[now]) == answers[now]
    found["median"] = {name: statistics.median(turn[name] for turn in found["turns"][1:]) for name in found["turns"][0]}
    print(json.dumps({key: value for key, value in found.items() if key != "turns"}, indent=2))
    print(f"request to first token of a sleeping model: {found['median']['all']:.3f} s (aim: {AIM_S} s)")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
