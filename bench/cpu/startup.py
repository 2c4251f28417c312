"""Start-up and memory of one model file above what `import torch` takes: JSON on stdout.

    python bench/cpu/startup.py MODEL [--runs 3] [--ids] [--kv-mib 256]

Each run is a process of its own that loads the model, answers one token, and tells its wall time since torch was there
and its peak memory (the system's ru_maxrss) less what it was then. Weights and K/V in use are told beside it: the rest
is what the engine itself takes. --ids leaves the tokenizer out. The first run warms the file cache and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

CHILD = """
import time
import torch
start = time.perf_counter()
import json, resource, sys
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from tokenmill.core.config import calm_threads
calm_threads()
from tokenmill import LLM, SamplingParams
imported = time.perf_counter()
model, ids, kv = sys.argv[1], sys.argv[2] == "ids", int(sys.argv[3]) << 20
llm = LLM(model=model, skip_tokenizer_init=ids, max_model_len=2048, kv_cache_memory_bytes=kv)
loaded = time.perf_counter()
prompt = {"prompt_token_ids": [100, 200, 300]} if ids else "Hello there"
llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = llm.built.facts.weight_bytes
print(json.dumps({"import_s": imported - start, "load_s": loaded - imported, "first_token_s": done - start,
                  "peak_mb": (peak - base) / 1e3, "weights_mb": weights / 1e6,
                  "beside_weights_mb": (peak - base) / 1e3 - weights / 1e6}))
"""


def main() -> None:
    """Run the child, show the median of each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ids", action="store_true", help="no tokenizer: token ids in and out")
    parser.add_argument("--kv-mib", type=int, default=256)
    options = parser.parse_args()
    found = []
    for _ in range(options.runs + 1):
        command = [sys.executable, "-c", CHILD, options.model, "ids" if options.ids else "text", str(options.kv_mib)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {key: round(statistics.median(run[key] for run in found[1:]), 3) for key in found[0]}
    print(json.dumps({**medians, "runs": options.runs, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
