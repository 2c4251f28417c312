"""Throughput with a grammar over without one, in turns: a batch of sequences held to a JSON schema, and free.

    python bench/structured/throughput.py [demo|1b|8b|FOLDER] [--quantization int4] [--count 32] [--tokens 64]
                                          [--batches 1] [--rounds 3] [--compact] [--tokenizer FILE] [--json OUT]

1b and 8b are Llama geometries with random weights and a vocabulary of 128k: FILE, or one that is made up. `ratio` is
tokens a second, held over free; `ratio of steps` does not count the tokens that the grammar gave without a step.
With one batch the sequences that were given most tokens end first, and the last steps are not full; with more batches
others take their places, as in a server that is busy.
Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from schemas import schema
from vocabulary import byte_letters, pieces

from tokenmill.core.config import calm_threads

calm_threads()

from tokenmill import LLM, SamplingParams  # noqa: E402

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "eos_token_id": 128000, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
GEOMETRY = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
           "tie_word_embeddings": False},
}  # fmt: skip


def held_to(number: int, switches: dict[str, Any]) -> dict[str, Any]:
    """Records of a schema as people write them, each sequence its own; it does not end before the tokens do."""
    return {**switches, "json": {"type": "array", "items": schema(number), "minItems": 200}}


def write_model(folder: Path, name: str, tokenizer: Path | None) -> Path:
    """A folder with the geometry's configuration and a tokenizer of 128,001 tokens."""
    (folder / "config.json").write_text(json.dumps({**COMMON, **GEOMETRY[name]}))
    letters = {byte: letter for letter, byte in byte_letters().items()}
    if tokenizer is not None:
        made = json.loads(tokenizer.read_text())
    else:
        vocab = {"".join(letters[b] for b in piece): i for i, piece in enumerate(pieces(128_000))}
        bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        made = {
            "version": "1.0", "normalizer": None, "pre_tokenizer": bytewise, "decoder": bytewise,
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True},
        }  # fmt: skip
    end = {"id": 128_000, "content": "<end>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    made["added_tokens"] = [{**end, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def one(llm: LLM, count: int, tokens: int, switches: dict[str, Any] | None) -> dict[str, float]:
    """Seconds, tokens and steps of one batch."""
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, ignore_eos=True, structured_outputs=structure)
        for i, structure in enumerate(None if switches is None else held_to(i, switches) for i in range(count))
    ]
    steps = llm.engine.scheduler.counters.steps
    began = time.perf_counter()
    outputs = llm.generate(["Records: "] * len(params), params, use_tqdm=False)
    spent = time.perf_counter() - began
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert all(o.outputs[0].finish_reason == "length" for o in outputs), "an answer ended before its tokens did"
    return {"seconds": spent, "tokens": made, "steps": llm.engine.scheduler.counters.steps - steps}


def measure(llm: LLM, count: int, tokens: int, rounds: int, switches: dict[str, Any]) -> dict[str, Any]:
    """Free and held in turns; medians and their ratios."""
    kinds = {"free": None, "held": switches}
    for kind in kinds.values():
        one(llm, count, tokens, kind)  # compiles, and records steps
    runs: dict[str, list[dict[str, float]]] = {"free": [], "held": []}
    for _ in range(rounds):
        for title, kind in kinds.items():
            runs[title].append(one(llm, count, tokens, kind))
    found: dict[str, Any] = {}
    for title, all_runs in runs.items():
        rates = [run["tokens"] / run["seconds"] for run in all_runs]
        steps = [1e3 * run["seconds"] / run["steps"] for run in all_runs]
        found[title] = {
            "tokens_per_s": statistics.median(rates), "all": [round(r, 1) for r in rates],
            "ms_per_step": statistics.median(steps), "steps": all_runs[0]["steps"],
        }  # fmt: skip
    found["ratio"] = found["held"]["tokens_per_s"] / found["free"]["tokens_per_s"]
    found["ratio of steps"] = found["free"]["ms_per_step"] / found["held"]["ms_per_step"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=1, help="requests, as so many times COUNT; COUNT run at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compact", action="store_true", help="JSON without white space (disable_any_whitespace)")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made_up = options.model in GEOMETRY
        model = str(write_model(Path(folder), options.model, options.tokenizer)) if made_up else options.model
        more: dict[str, Any] = {"load_format": "dummy", "max_model_len": 4096} if made_up else {}
        with LLM(model, max_num_seqs=options.count, quantization=options.quantization, **more) as llm:
            switches = {"disable_any_whitespace": True} if options.compact else {}
            found = measure(llm, options.count * options.batches, options.tokens, options.rounds, switches)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
