"""The cache of compiled grammars under many distinct schemas: what it counts, and what the process really takes.

    python bench/structured/cache.py [--schemas 10000] [--vocabulary 128000 | --tokenizer FILE] [--json OUT]

Each schema is compiled and its first tokens are walked. `grown` is the process's resident memory over what it was with
a vocabulary and one grammar; the cache's own count should not be below it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from schemas import schema
from speed import walk
from vocabulary import from_file, made_up

from tokenmill.structured.compile import CACHE_BYTES, Compiler
from tokenmill.structured.constraint import GrammarConstraint


def resident() -> int:
    """Bytes of this process that lie in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vocabulary = from_file(options.tokenizer) if options.tokenizer else made_up(options.vocabulary)
    compiler = Compiler(lambda: vocabulary)
    compiler.prepare({"json": schema(10**6)}).result()
    rng, before, began = random.Random(0), resident(), time.perf_counter()
    rows: list[dict[str, float]] = []
    for seed in range(options.schemas):
        spec = {"json": {"title": f"number {seed}", **schema(seed)}}
        constraint = compiler.constraint(spec)
        assert isinstance(constraint, GrammarConstraint)
        walk(constraint, rng, 4)
        if (seed + 1) % max(1, options.schemas // 10) == 0:
            rows.append(
                {
                    "schemas": seed + 1, "seconds": round(time.perf_counter() - began, 1),
                    "cache_mb": round(compiler.bytes / 2**20, 1), "grown_mb": round((resident() - before) / 2**20, 1),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    compiler.close()
    print(f"bound: {CACHE_BYTES >> 20} MB; largest count {max(r['cache_mb'] for r in rows)} MB, "
          f"largest growth {max(r['grown_mb'] for r in rows)} MB")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
