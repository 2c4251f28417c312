"""Both engines on the same files, side by side: llama.cpp and tokenmill, A and B in turn, medians and their ratio.

    python bench/cpu/against_llama.py --llama BUILD/bin --models FOLDER [--only decode prefill ...] [--repeat 3]
                                      [--json OUT] [--list]

FOLDER holds bf16.gguf, q8_0.gguf, q4_0.gguf, q4_k_m.gguf (one model in four types) and demo.gguf (the embedded model:
`tokenmill quantize demo FOLDER/demo.gguf --format gguf-bf16`); rows whose file is not there are left out and named.
Decode rates leave the prompt out on both sides. llama.cpp keeps K/V in f16 where ours is bf16, in q8_0 where ours is
int8. Each row states which format the output head has in the file and in our memory, and the bytes of all weights.
Plain reads of memory with all threads are timed right before and after every run, because a shared host gives more or
less of it within seconds: rows that decode one sequence of a large model say which share of it each engine took for its
weights, and what ratio an engine would reach that took all of it.
Wants a quiet machine: the load average is part of the output. All rows with --repeat 3 take about 12 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.config import calm_threads

calm_threads()

import torch  # noqa: E402

from tokenmill import LLM, SamplingParams  # noqa: E402
from tokenmill.checkpoint.gguf_file import open_gguf  # noqa: E402
from tokenmill.measure.ceilings import reading  # noqa: E402

KV = {16: ("f16", "auto"), 8: ("q8_0", "int8")}
"""Bits of K/V: llama.cpp's name, ours."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `tokens`: of a prefill, or decoded per sequence; depth: tokens that lie before them."""

    name: str
    file: str
    tokens: int
    goal: float
    batch: int = 0
    depth: int = 0
    kv: int = 16

    @property
    def prefill(self) -> bool:
        """Is it a prompt that is timed?"""
        return self.name.startswith("prefill")


ROWS = [
    Row("decode bf16", "bf16", 48, 1.1),
    Row("prefill bf16", "bf16", 512, 1.1),
    Row("decode 8 bit", "q8_0", 64, 1.5),
    Row("prefill 8 bit", "q8_0", 512, 1.9),
    Row("batch 32, 8 bit", "q8_0", 16, 2.0, batch=32),
    Row("decode Q4_K_M", "q4_k_m", 64, 1.3),
    Row("prefill Q4_K_M", "q4_k_m", 512, 1.4),
    Row("decode 4 bit", "q4_0", 64, 1.4),
    Row("prefill 4 bit", "q4_0", 512, 1.6),
    Row("batch 8, 4 bit", "q4_0", 32, 2.2, batch=8),
    Row("batch 32, 4 bit", "q4_0", 16, 2.0, batch=32),
    Row("decode at 8k, 4 bit, KV 16 bit", "q4_0", 32, 1.4, depth=8192),
    Row("decode at 8k, 4 bit, KV 8 bit", "q4_0", 32, 1.4, depth=8192, kv=8),
    Row("decode demo bf16", "demo", 512, 1.0),
]
PROMPT = 32


class Theirs:
    """llama-bench and llama-batched-bench of one build."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder, self.threads = folder, threads

    def rates(self, row: Row, file: Path, repeat: int) -> Iterator[float]:
        """Tokens per second, one run at a time; a long context is filled once for all its runs."""
        if row.depth:
            yield from self._bench(row, file, repeat)
            return
        for _ in range(repeat):
            yield self._batched(row, file) if row.batch else self._bench(row, file, 1)[0]

    def _bench(self, row: Row, file: Path, repeat: int) -> list[float]:
        kind = ["-p", str(row.tokens), "-n", "0"] if row.prefill else ["-p", "0", "-n", str(row.tokens)]
        kv = KV[row.kv][0]
        cache = ["-ctk", kv, "-ctv", kv, "-d", str(row.depth)] + (["-fa", "on"] if row.kv == 8 else [])
        (found,) = json.loads(self._run("llama-bench", file, [*kind, *cache, "-r", str(repeat), "-o", "json"]))
        return [float(rate) for rate in found["samples_ts"]]

    def _batched(self, row: Row, file: Path) -> float:
        context = row.batch * (PROMPT + row.tokens)
        sizes = ["-c", str(context), "-npp", str(PROMPT), "-ntg", str(row.tokens), "-npl", str(row.batch)]
        text = self._run("llama-batched-bench", file, [*sizes, "-b", "2048", "-ub", "512", "--output-format", "jsonl"])
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return float(lines[-1]["speed_tg"])

    def _run(self, program: str, file: Path, options: list[str]) -> str:
        command = [str(self.folder / program), "-m", str(file), "-t", str(self.threads), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout


class Ours:
    """One model in this process; its threads sleep while the other engine runs."""

    def __init__(self, file: Path, kv: int, depth: int, threads: int) -> None:
        begin = time.perf_counter()
        self.llm = LLM(
            model=str(file), max_model_len=max(4096, depth + 512) if file.stem != "demo" else 2048, max_num_seqs=32,
            threads=threads, skip_tokenizer_init=True, kv_cache_dtype=KV[kv][1],
        )  # fmt: skip
        self.load_s = time.perf_counter() - begin
        facts = self.llm.built.facts
        self.weight_bytes, self.vocabulary = facts.weight_bytes, facts.vocab_size
        self.random = random.Random(0)
        self.long: dict[int, list[int]] = {}
        self._seconds([self._prompt(8)], 2)

    def rate(self, row: Row) -> float:
        """Tokens per second of one run."""
        if row.prefill:
            return row.tokens / self._seconds([self._prompt(row.tokens)], 1)
        prompts = [self._prompt(PROMPT) for _ in range(max(row.batch, 1))]
        if row.depth:
            if row.depth not in self.long:
                self.long[row.depth] = self._prompt(row.depth)
                self._seconds([self.long[row.depth]], 1)
            prompts = [self.long[row.depth]]
        # What the prompts cost is measured first; then they are in the prefix cache both times.
        self._seconds(prompts, 1)
        short = self._seconds(prompts, 1)
        return len(prompts) * row.tokens / (self._seconds(prompts, row.tokens + 1) - short)

    def close(self) -> None:
        """Give the memory back."""
        self.llm.close()

    def _prompt(self, length: int) -> list[int]:
        return [self.random.randrange(1000, self.vocabulary - 1000) for _ in range(length)]

    def _seconds(self, prompts: list[list[int]], output: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin


def file_facts(file: Path) -> dict[str, Any]:
    """The head's type, and the bytes that a decode step reads (matrices; a separate embedding is not read)."""
    tensors = open_gguf(file).tensors
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    matrices = [t for t in tensors.values() if len(t.shape) > 1 and (t is head or t.name != "token_embd.weight")]
    return {"head": head.type.name, "file_bytes": sum(t.stop - t.start for t in matrices)}


def measure(rows: list[Row], models: Path, theirs: Theirs, repeat: int) -> list[dict[str, Any]]:
    """Every row, grouped so that each model is loaded once."""
    found = []
    loaded: tuple[object, Ours | None] = (None, None)
    for row in rows:
        file = models / f"{row.file}.gguf"
        key = (file, row.kv, row.depth)
        if loaded[0] != key:
            if loaded[1] is not None:
                loaded[1].close()
            loaded = key, Ours(file, row.kv, row.depth, theirs.threads)
        ours = loaded[1]
        assert ours is not None
        ours.rate(row)
        pairs, reads = [], [reading("cpu")]
        for rate in theirs.rates(row, file, repeat):
            reads.append(reading("cpu"))
            pairs.append((rate, ours.rate(row)))
            reads.append(reading("cpu"))
        a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
        facts = file_facts(file)
        found.append(
            {**asdict(row), **facts, "our_bytes": ours.weight_bytes, "our_load_s": round(ours.load_s, 2),
             "llama": round(a, 1), "tokenmill": round(b, 1), "ratio": round(b / a, 3), "runs": pairs,
             "reads": reads, **memory(row, (facts["file_bytes"], ours.weight_bytes), pairs, reads),
             "load_average": os.getloadavg()[0]}
        )  # fmt: skip
        print(line(found[-1]), flush=True)
    if loaded[1] is not None:
        loaded[1].close()
    return found


def memory(
    row: Row, sizes: tuple[int, int], pairs: list[tuple[float, float]], reads: list[float]
) -> dict[str, float | None]:
    """GB/s of the plain reads around each run (medians), the engines' shares of them, the ratio that all of them allow.

    Reads lie around the runs: read, theirs, read, ours, read, theirs, ... None where a step reads more than weights, or
    weights that fit into a cache.
    """
    if row.prefill or row.batch or row.depth or sizes[0] < 200e6:
        return {"read": round(statistics.median(reads) / 1e9, 1), "llama_share": None, "our_share": None, "most": None}
    around = [(a + b) / 2 for a, b in itertools.pairwise(reads)]
    rates = [rate for pair in pairs for rate in pair]
    shares = [rate * sizes[i % 2] / around[i] for i, rate in enumerate(rates)]
    ours = statistics.median(around[1::2])
    return {
        "read": round(statistics.median(around) / 1e9, 1),
        "llama_share": round(statistics.median(shares[::2]), 2),
        "our_share": round(statistics.median(shares[1::2]), 2),
        "most": round(ours / sizes[1] / statistics.median(rates[::2]), 2),
    }


HEADER = """| work | llama.cpp | tokenmill | ratio | goal | head | weights read, GB: file / ours | KV: llama / ours | \
plain reads, GB/s | shares of them: llama / ours | ratio at most |
|---|---|---|---|---|---|---|---|---|---|---|"""


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    theirs, ours = KV[found["kv"]]
    sizes = f"{found['file_bytes'] / 1e9:.3f} / {found['our_bytes'] / 1e9:.3f}"
    shares = f"{found['llama_share']} / {found['our_share']} | {found['most']}" if found["most"] else " | "
    return (
        f"| {found['name']} | {found['llama']} | {found['tokenmill']} | {found['ratio']:.2f} | {found['goal']} | "
        f"{found['head']} | {sizes} | {theirs} / {'bf16' if ours == 'auto' else ours} | {found['read']} | {shares} |"
    )


def main() -> None:
    """Choose rows, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, help="folder of llama-bench and llama-batched-bench")
    parser.add_argument("--models", type=Path, help="folder of the .gguf files")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name contains one of these")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or any(part in row.name for part in options.only)]
    if options.list:
        print("\n".join(row.name for row in rows))
        return
    if options.llama is None or options.models is None:
        parser.error("--llama and --models are needed")
    for row in rows:
        if not (options.models / f"{row.file}.gguf").is_file():
            print(f"left out, for want of {row.file}.gguf: {row.name}")
    rows = [row for row in rows if (options.models / f"{row.file}.gguf").is_file()]
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, load average {os.getloadavg()[0]:.2f}, medians of {options.repeat}; tokens/s")
    print(HEADER)
    found = measure(rows, options.models, Theirs(options.llama, options.threads), options.repeat)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
