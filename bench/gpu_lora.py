"""Times adapters on an NVIDIA GPU: 32 rows of an 8B geometry with dummy weights, rank 16 on all seven matrices.

python bench/gpu_lora.py [--geometry NAME] [--rows 32] [--rank 16] [--tokens 256] [--runs 5] [--json OUT]

In turn: an engine without --enable-lora; one with it and requests that name no adapter; then 1, 8 and 32 distinct
adapters, and 100 under Zipf's law (32 slots, the others in host memory). Shares are of the first engine's speed,
medians of several runs. Also shown: how much longer the start took, and the longest step of 32 running requests: when
nobody comes, when a request comes, and when one comes whose adapter is read and loaded meanwhile. The last two are told
of a first and of a second newcomer, since the first one's step may have to be recorded, with an adapter or without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from geometries import GEOMETRIES
from tokenmill import LLM, LoRARequest, SamplingParams

DISTINCT = (1, 8, 32)
ZIPF, SLOTS = 100, 32


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The seven matrices of a layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    wide, narrow = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (wide, hidden), "self_attn.k_proj": (narrow, hidden), "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def write_adapters(root: Path, config: dict[str, Any], rank: int) -> list[LoRARequest]:
    """One set of random files under many names: each is an adapter of its own to the engine."""
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in shapes(config).items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, columns) * 0.01).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(rows, rank) * 0.01).bfloat16()
    one = root / "one"
    one.mkdir(parents=True)
    save_file(tensors, one / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (one / "adapter_config.json").write_text(json.dumps(said))
    found = []
    for number in range(ZIPF):
        path = root / f"a{number}"
        path.symlink_to(one)
        found.append(LoRARequest(path.name, number + 1, str(path)))
    return found


def chosen(adapters: list[LoRARequest], kind: str, rows: int) -> list[LoRARequest | None]:
    """An adapter for each row."""
    if kind == "none":
        return [None] * rows
    if kind == "zipf":
        weights = [1 / (i + 1) for i in range(ZIPF)]
        return list(random.Random(0).choices(adapters, weights, k=rows))
    return [adapters[i % int(kind)] for i in range(rows)]


def timed(llm: LLM, rows: int, tokens: int, adapters: list[LoRARequest | None], runs: int) -> float:
    """Median output tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = []
    for run in range(runs + 1):
        made = random.Random(run)
        prompts = [{"prompt_token_ids": [made.randrange(1000) for _ in range(128)]} for _ in range(rows)]
        began = time.perf_counter()
        llm.generate(prompts, params, False, lora_request=adapters)
        found.append(rows * tokens / (time.perf_counter() - began))
    return statistics.median(found[1:])


def longest_gap(llm: LLM, rows: int, newcomer: LoRARequest | None, comes: bool = True) -> float:
    """Milliseconds of the longest step while requests run and, in mid-way, another one comes; newcomer: its adapter,
    which is read first."""
    engine, adapters = llm.llm_engine, llm.built.adapters
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    for i in range(rows - 1):
        engine.add_request(f"r{i}", {"prompt_token_ids": [5 + i] * 64}, params)
    gaps, step, reading = [], 0, None
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        if step >= 40:
            gaps.append(1e3 * (time.perf_counter() - began))
        step += 1
        if newcomer is not None and step == 80:
            reading = adapters.begin(adapters.note(newcomer))
        if comes and step > 80 and (reading is None or reading.done()):
            engine.add_request("new", {"prompt_token_ids": [7] * 64}, params, lora_request=newcomer)
            comes = False
    return max(gaps)


def main() -> None:
    """Print a table; write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="llama-3-8b", choices=sorted(GEOMETRIES))
    for name, default in (("rows", 32), ("rank", 16), ("tokens", 256), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quantization")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    config = GEOMETRIES[given.geometry]
    found: dict[str, Any] = {"rows": given.rows, "rank": given.rank, "tokens_per_s": {}, "startup_s": {}}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps(config))
        adapters = write_adapters(root, config, given.rank)
        fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 64,
                 "enable_prefix_caching": False, "quantization": given.quantization}  # fmt: skip
        for kinds, options in (
            (("off",), {}),
            (("none", *map(str, DISTINCT), "zipf"), {"enable_lora": True, "max_loras": SLOTS}),
        ):
            began = time.perf_counter()
            with LLM(model=str(root), max_lora_rank=given.rank, **fixed, **options) as llm:
                found["startup_s"]["with" if options else "without"] = time.perf_counter() - began
                for kind in kinds:
                    named = "none" if kind == "off" else kind
                    rows = chosen(adapters, named, given.rows)
                    found["tokens_per_s"][kind] = timed(llm, given.rows, given.tokens, rows, given.runs)
                if options:
                    gaps = {"nobody": longest_gap(llm, given.rows, None, comes=False)}
                    for turn in ("first", "second"):
                        (root / turn).symlink_to(root / "one")
                        gaps[f"{turn} newcomer"] = longest_gap(llm, given.rows, None)
                        adapter = LoRARequest(turn, ZIPF + len(gaps), str(root / turn))
                        gaps[f"{turn} newcomer with an adapter"] = longest_gap(llm, given.rows, adapter)
                    found["longest_step_ms"] = gaps
            torch.cuda.empty_cache()
    base = found["tokens_per_s"]["off"]
    found["share"] = {kind: speed / base for kind, speed in found["tokens_per_s"].items()}
    for kind, speed in found["tokens_per_s"].items():
        print(f"{kind:>6} {speed:10.0f} tokens/s  {found['share'][kind]:6.3f}")
    print(f"start {found['startup_s']}  longest step {found['longest_step_ms']}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
