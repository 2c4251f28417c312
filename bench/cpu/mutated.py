"""Mutated GGUF files by the million: none may crash the reader, and how long the slowest refusal takes.

    python bench/cpu/mutated.py [--count 1000000] [--seed 20]

The same files that the tests mutate, parsed as far as loading goes before it reads a tensor: metadata, tensors, config,
names, and one in 200 its tokenizer. Anything but a ModelError ends the run with its seed. Times are CPU time of this
thread, so that neighbours do not count; the three slowest are read again, because a garbage collection may hit any.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.gguf_config import read_config
from tokenmill.checkpoint.gguf_file import parse_gguf
from tokenmill.checkpoint.gguf_names import name_table
from tokenmill.core.errors import ModelError
from tokenmill.text.gguf import tokenizer_from_gguf

FOLDER = Path(__file__).parents[2] / "tests/cpu/gguf"


def tests() -> Any:
    """The tests' module, which makes the file and mutates it."""
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("test_gguf_engine", FOLDER / "test_gguf_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(data: bytes, tokenizer: bool) -> bool:
    """Is the file readable? Whatever it says lies within it."""
    try:
        metadata, tensors = parse_gguf(data, "m.gguf")
        assert all(0 <= info.start <= info.stop <= len(data) for info in tensors.values())
        config = read_config(metadata, tensors, lambda name: None, "m.gguf")
        name_table(str(metadata["general.architecture"]), tensors, config)
        if tokenizer:
            tokenizer_from_gguf(metadata, "m.gguf")
    except ModelError:
        return False
    return True


def seconds(data: bytes, tokenizer: bool) -> tuple[float, bool]:
    """CPU time of reading a file, and whether it was readable."""
    begin = time.thread_time()
    readable = read(data, tokenizer)
    return time.thread_time() - begin, readable


def main() -> None:
    """Mutate, read, report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    module, source = tests(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = module.fuzz_file(Path(folder) / "m.gguf")
    readable, slowest, total = 0, [(0.0, b"", False)] * 3, 0.0
    for _ in range(options.count):
        changed, tokenizer = module.mutate(data, source), source.randrange(200) == 0
        took, whole = seconds(changed, tokenizer)
        readable, total = readable + whole, total + took
        if not whole and took > slowest[-1][0]:
            slowest = sorted([*slowest[:-1], (took, changed, tokenizer)], key=lambda found: -found[0])
    gc.collect()
    print(json.dumps({
        "files": options.count, "bytes": len(data), "readable": readable, "refused": options.count - readable,
        "crashes": 0, "mean_us": round(1e6 * total / options.count, 1),
        "slowest_refusals_ms": [round(1e3 * took, 2) for took, _, _ in slowest],
        "the_same_again_ms": [round(1e3 * min(seconds(d, t)[0] for _ in range(5)), 2) for _, d, t in slowest],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
