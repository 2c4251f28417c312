"""What n-grams are worth on a GPU, for texts that do and do not repeat themselves.

python bench/gpu_lookup.py [--rows 1,8,32] [--most 4] [--layers N] [--cases CASE,...] [--json OUT]

Cases: `nothing repeats` (an 8B with invented weights), `two words` and `one word` (the same, which may say no others:
its texts repeat what they said in part, and always), `demo` (the embedded model goes on with texts that repeat).
Shown are tokens per second of the same requests with and without n-grams, their ratio, tokens per step and row, and how
many plans were in flight on average when one was committed.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import tempfile
import time
from typing import Any

import torch

from geometries import GEOMETRIES, few_layers
from tokenmill import LLM, SamplingParams

WORDS: dict[str, list[int] | None] = {"nothing repeats": None, "two words": [271, 512], "one word": [271]}
TEXTS = (
    "The mill turns by the river. The wheel turns by the river. " * 4,
    "a b c d e f g a b c d e f g a b c d e f g a b c d e f g ",
    '{"name": "Tom", "age": 7}\n{"name": "Ann", "age": 8}\n{"name": "Ben", "age": 9}\n' * 2,
    "one, two, three, four, one, two, three, four, one, two, three, four, ",
)


def count_flying(llm: LLM) -> list[int]:
    """Plans in flight at each commit from now on, the one that is committed included."""
    engine, seen = llm.engine, []
    honest = engine.scheduler.commit

    def commit(result: Any) -> Any:
        seen.append(1 + len(engine.flying))
        return honest(result)

    engine.scheduler.commit = commit
    return seen


def measure(llm: LLM, prompts: list[Any], params: SamplingParams, seen: list[int]) -> dict[str, float]:
    """The best of three runs; the first one warms up, and has the control find its depth."""
    counters, best = llm.engine.scheduler.counters, {"tokens_per_s": 0.0}
    for _ in range(4):
        before, start = counters.steps, time.perf_counter()
        del seen[:]
        made = sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False))
        seconds = time.perf_counter() - start
        if made / seconds > best["tokens_per_s"]:
            steps = counters.steps - before
            best = {
                "tokens_per_s": made / seconds,
                "per_step_and_row": made / len(prompts) / steps,
                "in_flight": sum(seen) / len(seen),
            }
    return best


def requests(case: str, rows: int, tokens: int) -> tuple[list[Any], SamplingParams]:
    """Prompts of a case, and how they go on."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    if case == "demo":
        return [TEXTS[i % len(TEXTS)] for i in range(rows)], SamplingParams(**params)
    if WORDS[case] is not None:
        params["allowed_token_ids"] = WORDS[case]
    return [
        {"prompt_token_ids": [(7 * i + 31 * n + n * n) % 4099 for n in range(128)]} for i in range(rows)
    ], SamplingParams(**params)


def run(model: str, cases: list[str], options: argparse.Namespace, more: dict[str, Any]) -> dict[str, Any]:
    """All cases of one model: plain, then with n-grams."""
    found: dict[str, Any] = {}
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": options.most}):
        with LLM(model=model, dtype="bfloat16", max_num_seqs=64, speculative_config=drafts, **more) as llm:
            seen = count_flying(llm)
            for case in cases:
                for rows in options.rows:
                    made = measure(llm, *requests(case, rows, options.tokens), seen)
                    entry = found.setdefault(f"{case}, {rows}", {})
                    entry["plain" if drafts is None else "n-grams"] = made
                    if drafts is not None:
                        entry["ratio"] = made["tokens_per_s"] / entry["plain"]["tokens_per_s"]
                        print(case, rows, json.dumps(entry), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["demo", *WORDS])
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if "demo" in options.cases:
        found |= run("demo", ["demo"], options, {"max_model_len": 1024})
    if large := [case for case in options.cases if case != "demo"]:
        with tempfile.TemporaryDirectory() as name:
            config = few_layers(GEOMETRIES["llama-3-8b"], options.layers)
            (pathlib.Path(name) / "config.json").write_text(json.dumps(config))
            invented = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
            found |= run(name, large, options, invented | {"gpu_memory_utilization": 0.6})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
