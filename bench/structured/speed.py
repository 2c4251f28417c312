"""Compiling and masks: p50 and p99 over many schemas, per sequence, at a large vocabulary.

python bench/structured/speed.py [--vocabulary 128000 | --tokenizer FILE] [--schemas 300] [--json OUT]

FILE: a byte-level tokenizer.json (bench/structured/vocabulary.py trains one). Without it a vocabulary is made up, whose
tokens are longer than a trained one's. `batch` steps sequences together, as an engine does: milliseconds a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from schemas import schema
from vocabulary import from_file, made_up

from tokenmill.structured.compile import Compiler
from tokenmill.structured.constraint import GrammarConstraint
from tokenmill.structured.mask_pool import MaskPool


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in microseconds."""
    ordered = sorted(seconds)
    return {
        "p50": 1e6 * statistics.median(ordered),
        "p99": 1e6 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": 1e6 * ordered[-1],
    }


def walk(constraint: GrammarConstraint, rng: random.Random, most: int) -> list[float]:
    """Seconds of each mask on a random way through a grammar."""
    spent = []
    for _ in range(most):
        if constraint.finished():
            break
        began = time.perf_counter()
        mask = constraint.mask()
        spent.append(time.perf_counter() - began)
        constraint.accept([choose(mask, rng)])
    return spent


def choose(mask: bytes, rng: random.Random) -> int:
    """One of the first forty allowed tokens."""
    bits = int.from_bytes(mask, "little")
    skip = rng.randrange(40)
    while skip and bits & (bits - 1):
        bits &= bits - 1
        skip -= 1
    return (bits & -bits).bit_length() - 1


def batches(compiler: Compiler, rng: random.Random, count: int, steps: int) -> list[float]:
    """Seconds of the masks of `count` sequences, step by step."""
    fresh = itertools.count(5000)

    def begin() -> GrammarConstraint:
        made = compiler.constraint({"json": schema(next(fresh))})
        assert isinstance(made, GrammarConstraint)
        return made

    pool, open_, spent = MaskPool(), [begin() for _ in range(count)], []
    for _ in range(steps):
        began = time.perf_counter()
        pool.fill(open_)
        masks = [constraint.mask() for constraint in open_]
        spent.append(time.perf_counter() - began)
        for i, (constraint, mask) in enumerate(zip(open_, masks, strict=True)):
            constraint.accept([choose(mask, rng)])
            if constraint.finished():
                open_[i] = begin()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vocabulary = from_file(options.tokenizer) if options.tokenizer else made_up(options.vocabulary)
    compiler = Compiler(lambda: vocabulary)
    compiler.constraint({"json": schema(10**6)})
    direct, behind, masks = [], [], []
    rng = random.Random(1)
    for seed in range(options.schemas):
        spec: dict[str, Any] = {"json": schema(seed)}
        began = time.perf_counter()
        constraint = compiler.constraint(spec)
        direct.append(time.perf_counter() - began)
        assert isinstance(constraint, GrammarConstraint)
        masks += walk(constraint, rng, options.tokens)
    served = Compiler(lambda: vocabulary)
    served.prepare({"json": schema(10**6)}).result()
    for seed in range(options.schemas):
        began = time.perf_counter()
        served.prepare({"json": schema(seed)}).result()
        behind.append(time.perf_counter() - began)
    served.close()
    found = {
        "compile_us": quantiles(direct),
        "compile_in_a_process_us": quantiles(behind),
        "mask_us": quantiles(masks),
        "masks": len(masks),
        f"masks_of_{options.batch}_us": quantiles(batches(compiler, rng, options.batch, 200)),
        "cache_bytes": served.bytes,
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
