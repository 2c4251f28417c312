"""What each optimisation is worth on this machine's CPU, and pictures of such results. Wants a quiet machine.

python bench/ablate.py run PART... --out FOLDER      (parts: demo, kernels, speculation, 1b; each writes PART.json)
python bench/ablate.py draw FILE.json... --plot OUT.png      the parts' rows, or those of bench/gpu_ablate.py, together

demo: half of 40 requests share a system prompt (prefix cache); a quarter are long prompts with short answers beside
others' short prompts with long answers (chunked prefill, continuous batching); lengths differ, and memory is short
(pages). kernels: four of them, because plain torch is slow. speculation: continuing text of this project's pages.
1b: a 1B Llama geometry in 4 bits with 8-bit keys and values.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from tokenmill.core.config import calm_threads

calm_threads()

sys.path.insert(0, str(pathlib.Path(__file__).parent / "cpu"))

from geometry import GEOMETRY  # noqa: E402

from tokenmill.measure.ablate import ablate  # noqa: E402
from tokenmill.measure.plots import plot  # noqa: E402
from tokenmill.measure.workloads import FileWorkload, Uniform, Workload  # noqa: E402

DEMO = {"model": "demo", "max_num_seqs": 8, "max_model_len": 2560, "kv_cache_memory_bytes": 32 << 20}
PAGES = pathlib.Path(__file__).parents[1] / "docs"
USUAL = ("worth", "worth_ttft", "worth_itl_p99")


def mixed(count: int = 40, vocabulary: int = 6000) -> FileWorkload:
    """Requests of three kinds, the same every time."""
    source = random.Random(0)

    def ids(length: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(length)]

    system = ids(768)
    lines: list[tuple[list[int] | str, int]] = []
    for i in range(count):
        if i % 2 == 0:
            lines.append((system + ids(source.randint(16, 64)), source.randint(48, 160)))
        elif i % 4 == 1:
            lines.append((ids(source.randint(1200, 1900)), source.randint(8, 32)))
        else:
            lines.append((ids(source.randint(16, 64)), source.randint(96, 256)))
    return FileWorkload(f"{count} requests, half with a shared prefix", lines)


def pages() -> FileWorkload:
    """The beginnings of pages, to be continued."""
    texts = [path.read_text()[:1500] for path in sorted(PAGES.glob("*.md"))[:6]]
    return FileWorkload(f"{len(texts)} texts to continue", [(text, 96) for text in texts])


def part(name: str, folder: pathlib.Path) -> tuple[dict[str, Any], Workload, list[str], int]:
    """Options, workload, what is switched off (empty: everything), and how often it runs."""
    if name == "demo":
        options = {**DEMO, "max_num_batched_tokens": 512}
        names = ["prefix cache", "batching", "continuous batching", "paged K/V", "chunked prefill", "recorded steps"]
        return options, mixed(), names, 3
    if name == "kernels":
        return {**DEMO, "max_num_batched_tokens": 512}, mixed(4), ["fast kernels"], 1
    if name == "speculation":
        return {**DEMO, "max_num_seqs": 1, "speculative_config": {"method": "ngram"}}, pages(), ["speculation"], 3
    (folder / "config.json").write_text(json.dumps(GEOMETRY))
    options = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "quantization": "int4",
        "kv_cache_dtype": "int8", "max_num_seqs": 4, "max_model_len": 4096, "kv_cache_memory_bytes": 512 << 20,
    }  # fmt: skip
    return options, Uniform(4, 512, 32), ["quantised weights", "K/V type"], 1


def run(name: str, out: pathlib.Path) -> None:
    """One part, and its rows on stdout."""
    with tempfile.TemporaryDirectory() as folder:
        options, workload, only, repeat = part(name, pathlib.Path(folder))
        found = ablate(options, workload, repeat=repeat, only=only)
    (out / f"{name}.json").write_text(json.dumps(found) + "\n")
    show(found["options"], found["workload"])


def show(rows: list[dict[str, Any]], workload: str, kinds: Iterable[str] = USUAL) -> None:
    """Lines of a table in Markdown."""
    for row in rows:
        shown = " | ".join("-" if row.get(k) is None else f"{row[k]:.2f}" for k in kinds)
        print(
            f"| {row['name']} | {row.get('load', workload)} | {shown} |"
            + (f" {row['error']}" if row.get("error") else "")
        )


def joined(files: list[pathlib.Path]) -> dict[str, Any]:
    """One result with the rows of all."""
    results = [json.loads(path.read_text()) for path in files]
    if isinstance(results[0], list):
        return of_gpu(results)
    rows = [{**row, "load": found["workload"]} for found in results for row in found["options"]]
    rows.sort(key=lambda row: row["worth"] or 0.0, reverse=True)
    return {**results[0], "workload": "workloads as in the table", "options": rows}


def of_gpu(files: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What bench/gpu_ablate.py wrote: seconds by workload; here, how many times as long it takes without.

    Each file's rows are compared with its own first one: cards differ."""
    options = []
    for whole, *others in files:
        loads = [name for name in whole if name not in ("without", "off", "start", "itl_p99_ms")]
        for row in others:
            worths = {load: round(row[load] / whole[load], 4) for load in loads if load in row}
            options.append({"name": row["without"], "worth": worths[loads[0]], **worths})
    kinds = {load: pathlib.Path(load).stem.removesuffix("-0") for load in loads}
    head = {"bench": "ablate", "workload": "seconds", "model": "8B", "device_name": "NVIDIA H200"}
    return {**head, "kinds": kinds, "options": options}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("run", "draw"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path())
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("ablate.png"))
    args = parser.parse_args()
    if args.verb == "run":
        for name in args.names:
            run(name, args.out)
    else:
        found = joined([pathlib.Path(name) for name in args.names])
        show(found["options"], found["workload"], found.get("kinds", USUAL))
        plot(found, args.plot)


if __name__ == "__main__":
    main()
