"""Two trees on one CPU, step by step in turn: a 1B Llama geometry with random weights. One line a figure.

python bench/cpu/in_turn.py OLD_PYTHON NEW_PYTHON [int8|int4|none]

Each is the Python of an environment in which one tree is installed. Both load their model once and wait; then one
measures while the other sleeps, a second or two each, so that what a shared host does meanwhile meets both. Shown are
medians, the median of the pairs' ratios (new over old), and the best of each.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys

CHILD = """
import json, pathlib, sys, tempfile
sys.path.insert(0, sys.argv[2])
import geometry
from tokenmill import LLM
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(geometry.GEOMETRY))
quantization = None if sys.argv[1] == "none" else sys.argv[1]
llm = LLM(model=str(folder), quantization=quantization, device="cpu", load_format="dummy", max_model_len=4096,
          max_num_seqs=32)
timer, geometry.RUNS = geometry.Timer(llm), 1
timer.seconds(1, 8, 2), timer.seconds(32, 8, 3)
print("ready", flush=True)
for line in sys.stdin:
    count, output = map(int, line.split())
    print(timer.decode(count, output) if output else 512 / timer.seconds(1, 512, 1), flush=True)
"""
FIGURES = (("decode 1", 1, 32, 14), ("decode 8", 8, 16, 10), ("decode 32", 32, 12, 10), ("prefill 512", 1, 0, 10))
"""Name, sequences, tokens (0: a prompt alone), how often."""


def start(python: str, quantization: str) -> subprocess.Popen[str]:
    """One tree's process, its model loaded."""
    command = [python, "-c", CHILD, quantization, str(pathlib.Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def ask(process: subprocess.Popen[str], count: int, output: int) -> float:
    """One figure of it, in tokens per second."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{count} {output}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    old, new, *more = sys.argv[1:]
    quantization = more[0] if more else "int4"
    both = [start(python, quantization) for python in (old, new)]
    for name, count, output, times in FIGURES:
        found: tuple[list[float], list[float]] = ([], [])
        for turn in range(times):
            for which in (0, 1) if turn % 2 else (1, 0):
                found[which].append(ask(both[which], count, output))
        ratio = statistics.median(b / a for a, b in zip(*found, strict=True))
        medians = " ".join(f"{statistics.median(each):.1f}" for each in found)
        print(f"{quantization} {name}: {medians}, ratio {ratio:.3f}, best {max(found[0]):.1f} {max(found[1]):.1f}")
    for process in both:
        process.kill()


if __name__ == "__main__":
    main()
