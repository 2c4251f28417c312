"""The first start on this GPU: seconds to the first token with empty caches, with and without compiling ahead.

python bench/gpu_start.py [GEOMETRY:FORMAT ...] [--repeat 3] [--json OUT]

Names are those of geometries.py and of gpu_geometries.py's OPTIONS. Each start is a process of its own with made-up
weights and caches in a new folder ("cold"), then once more with what that left ("warm"). Shown are the seconds from the
process's begin, how many kernels the engine's own process compiled or found, and what the engine says of those that
were compiled ahead. Any kernel that it compiled although all were compiled ahead: exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from geometries import GEOMETRIES  # noqa: E402

QUANTISED = ("fp8", "int8", "int4", "int4-g128")


def child(options: dict[str, Any], began: float) -> None:
    """One start: a JSON line."""
    import triton

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **told: hits.append(bool(told.get("cache_hit")))
    from tokenmill import LLM, SamplingParams

    imported = time.time() - began
    llm = LLM(**options)
    loaded, at_load = time.time() - began, len(hits)
    llm.generate([{"prompt_token_ids": list(range(128))}], [SamplingParams(max_tokens=1, ignore_eos=True)])
    found = {
        "imported": imported, "loaded": loaded, "first_token": time.time() - began, "compiled": hits.count(False),
        "cached": hits.count(True), "late": len(hits) - at_load,
        "reasons": [reason for reason in llm.built.facts.reasons if "ahead" in reason],
    }  # fmt: skip
    print(json.dumps(found))
    llm.close()


def start(case: str, caches: str, *, ahead: bool) -> dict[str, Any]:
    """A process with these caches."""
    geometry, _, form = case.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(GEOMETRIES[geometry]))
        options = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "compile_ahead": ahead}
        options |= {"quantization": form} if form in QUANTISED else {}
        environment = os.environ | {"TRITON_CACHE_DIR": f"{caches}/triton", "TOKENMILL_CACHE": caches}
        asked = json.dumps([options, time.time()])
        done = subprocess.run(
            [sys.executable, __file__, "--child", asked], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        return {"error": done.stderr[-800:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["llama-3-8b:bf16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(*json.loads(options.child))
        return
    rows, wrong = [], False
    for case in options.cases:
        for ahead in (True, False):
            for turn in range(options.repeat if ahead else 1):
                with tempfile.TemporaryDirectory() as caches:
                    for kind in ("cold", "warm"):
                        found = start(case, caches, ahead=ahead)
                        rows.append({"case": case, "ahead": ahead, "kind": kind, "turn": turn, **found})
                        print(json.dumps(rows[-1]), flush=True)
                        complete = any("were compiled ahead" in r and "not" not in r for r in found.get("reasons", []))
                        wrong |= "error" in found or (complete and found["compiled"] > 0)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
