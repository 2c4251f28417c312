"""Tokens per second of public geometries on this GPU, and how far from the floor: one table.

python bench/gpu_geometries.py [GEOMETRY:FORMAT ...] [--workloads single,batch32] [--seeds N] [--source DIR ...]

Names are those of geometries.py and of gpu_compile.py's FORMATS. Each case is a process of its own with made-up
weights. --source: the `src` folder of a tree to measure; several are measured in turn. The floor of a step is all bytes
of the weights (the table of embeddings left out where it is not the head, too) at 4.40 TB/s, what an H200 reads.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from geometries import GEOMETRIES  # noqa: E402

READS = 4.40e12
DEFAULT = (
    "llama-3-8b:bf16", "qwen3-8b:bf16", "qwen2.5-7b:bf16", "llama-3.2-3b:bf16", "gemma-2-9b:bf16", "qwen3-8b:fp8",
    "qwen3-8b:int4",
)  # fmt: skip
OPTIONS = {
    "bf16": [], "fp8": ["--quantization", "fp8"], "int8": ["--quantization", "int8"],
    "int4": ["--quantization", "int4"], "int4-g128": ["--quantization", "int4-g128"],
    "w4a8": ["--quantization", "w4a8"], "int4-f16": ["--quantization", "int4-g128", "--dtype", "float16"],
    "kv-fp8": ["--kv-cache-dtype", "fp8"], "mxfp4": [], "states16": ["--mamba-ssm-cache-dtype", "float16"],
}  # fmt: skip
STORED = {"mxfp4": {"quantization_config": {"quant_method": "mxfp4"}}}
"""What config.json says of weights that files hold so (gpt-oss's experts)."""
BITS = {"fp8": 8, "int8": 8, "int4": 4.5, "int4-g128": 4.125, "int4-f16": 4.125, "w4a8": 4.125}
Workload = list[tuple[list[int], int]]


def workload(name: str, seed: int) -> Workload:
    """Prompt ids and how many tokens to make."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 25000) for _ in range(count)]

    if name == "single":
        return [(ids(128), 256)]
    if name == "batch32":
        return [(ids(128), 256) for _ in range(32)]
    if name == "mixed":
        return [(ids(rng.randint(128, 1024)), rng.randint(64, 512)) for _ in range(512)]
    if name == "long":
        return [(ids(16_000), 128) for _ in range(16)]
    if name == "prefix":
        shared = ids(2048)
        return [(shared + ids(128), 64) for _ in range(256)]
    raise KeyError(name)


def measure(source: pathlib.Path, case: str, workloads: list[str], seeds: int) -> dict[str, Any]:
    """One case of one tree: {workload: the best run}, start-up."""
    geometry, form = case.split(":")
    config = GEOMETRIES[geometry] | STORED.get(form, {})
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        (at / "config.json").write_text(json.dumps(config))
        command = [
            sys.executable, "-c", "from tokenmill.cli.main import main; main()", "bench", "throughput", folder,
            "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "512",
            "--max-model-len", str(min(32768, config["max_position_embeddings"])), "--json", str(at / "out.json"),
            *OPTIONS[form],
        ]  # fmt: skip
        for name in workloads:
            for seed in range(seeds if name in ("single", "batch32") else 1):
                lines = [json.dumps({"prompt_token_ids": p, "max_tokens": n}) for p, n in workload(name, seed)]
                (at / f"{name}-{seed}.jsonl").write_text("\n".join(lines))
                command += ["--workload", str(at / f"{name}-{seed}.jsonl")]
        began = time.perf_counter()
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-600:]}
        found = json.loads((at / "out.json").read_text())
    result: dict[str, Any] = {"startup_s": found.get("startup_s"), "process_s": time.perf_counter() - began}
    for run in found.get("runs", [found]):
        name = pathlib.Path(str(run.get("workload", ""))).name.split("-")[0] or workloads[0]
        result.setdefault(name, []).append(run["output_tokens_per_s"])
    kernels = found.get("kernels", {})
    result["fallbacks"] = {op: n["fallbacks"] for op, n in kernels.items() if n.get("fallbacks")}
    return result


def weight_bytes(case: str) -> float | None:
    """Of a dense model with gated layers: what a step reads; None: of another kind."""
    geometry, form = case.split(":")
    c = GEOMETRIES[geometry]
    if "num_experts" in c or "num_local_experts" in c or "head_dim" not in c:
        return None
    hidden, heads = c["hidden_size"], c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    layer = hidden * c["head_dim"] * (heads + c["num_attention_heads"]) + 3 * hidden * c["intermediate_size"]
    numbers = c["num_hidden_layers"] * layer + hidden * c["vocab_size"]
    return float(numbers * BITS.get(form, 16) / 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--workloads", default="single,batch32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", type=pathlib.Path, action="append")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    names, sources = options.workloads.split(","), options.source or [ROOT.parent / "src"]
    rows = []
    for case in options.cases or DEFAULT:
        read = weight_bytes(case)
        for source in sources:
            found = measure(source.resolve(), case, names, options.seeds)
            rows.append({"case": case, "source": str(source), **found})
            parts = [f"{case:22} {source.parent.name:8}"]
            for name in names:
                speeds = found.get(name)
                if speeds:
                    rows_of = {"single": 1, "batch32": 32}.get(name)
                    share = f" ({max(speeds) * read / rows_of / READS:.2f})" if read and rows_of else ""
                    parts.append(f"{name} {max(speeds):8.1f}{share} {[round(s, 1) for s in speeds]}")
            parts.append(f"start {found.get('startup_s') or 0:.1f} s {found.get('fallbacks') or ''}")
            print("  ".join(parts), found.get("error", ""), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
