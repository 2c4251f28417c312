"""Several GPUs: are the answers right, and how fast are they? One table.

python bench/gpu_parallel.py [--parts check,sums,8b,8b-mixed,dp,...] [--devices 2] [--limit SECONDS]

`check`: small models with made-up weights on all devices against one: logprobs in float32, the same ids with
--deterministic, recorded and eager steps. The others are geometries of geometries.py with made-up weights. A part is
a process of its own that ends after --limit; what one part does not survive costs the others nothing. Parts: check,
sums (gpu_sums.py), pp, ep, states, drafts and long (are stages, whole experts, layers with states, drafts and long
sums right?), and the names of PARTS below.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

from geometries import GEOMETRIES  # noqa: E402
from gpu_geometries import workload  # noqa: E402

PARTS: dict[str, tuple[str, str, list[str]]] = {
    "8b": ("llama-3-8b", "tensor", ["single", "batch32"]),
    "8b-mixed": ("llama-3-8b", "tensor", ["mixed"]),
    "dp": ("llama-3-8b", "data", ["mixed"]),
    "dp-prefix": ("llama-3-8b", "data", ["prefix"]),
    "70b": ("llama-3-70b", "tensor", ["single", "batch32"]),
    "70b-mixed": ("llama-3-70b", "tensor", ["mixed"]),
    "30b": ("qwen3-30b-a3b", "tensor", ["single", "batch32", "mixed"]),
    "8b-pp": ("llama-3-8b", "pipeline", ["single", "batch32"]),
    "30b-ep": ("qwen3-30b-a3b", "expert", ["single", "batch32", "mixed"]),
    "one": ("llama-3-8b", "", ["single", "batch32"]),
}
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTURE = {
    **SMALL, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip

SPACE = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 4,
    "num_heads": 32, "head_dim": 64, "n_groups": 2, "state_size": 64, "conv_kernel": 4, "expand": 2,
    "vocab_size": 4096, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


Answers = list[tuple[list[int], list[float]]]


def answers(folder: str, *, long: bool = False, **options: Any) -> Answers:
    """Ids and logprobs of twenty prompts (long: of a thousand tokens each) by a small model with made-up weights."""
    from tokenmill import LLM, SamplingParams

    options = {"num_gpu_blocks_override": 1600 if long else 800, "max_num_seqs": 32, **options}
    began = time.perf_counter()
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, **options) as llm:
        rng = random.Random(1)
        prompts = [
            {"prompt_token_ids": [rng.randrange(4096) for _ in range(990 if long else 5 + 37 * i % 400)]}
            for i in range(20)
        ]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
        found = llm.generate(prompts, params, use_tqdm=False)
        moved = getattr(getattr(llm.engine, "balance", None), "moved", 0)
        print(f"  {options}: {time.perf_counter() - began:.1f} s, {moved} experts moved", flush=True)
        return [
            (o.outputs[0].token_ids, [next(iter(x.values())).logprob for x in o.outputs[0].logprobs]) for o in found
        ]


def compare(name: str, one: Answers, many: Answers, most: float) -> None:
    """Raises where the first logprobs are further apart than that."""
    worst = max(abs(a[1][0] - b[1][0]) for a, b in zip(one, many, strict=True))
    same = sum(a[0] == b[0] for a, b in zip(one, many, strict=True))
    print(f"CHECK {name}: {same} of {len(one)} alike, first logprobs differ by {worst:.2g}", flush=True)
    assert worst < most, "several devices give something else"


def check_some(part: str, devices: int) -> None:
    """Stages (pp) of a dense model, whole experts (ep) of a mixture, the same while they move (eplb), layers with
    states over ranks (states), a draft model over ranks and in stages (drafts),
    sums of long steps (long)."""
    if part in ("drafts", "long"):
        (check_drafts if part == "drafts" else check_long)(devices)
        return
    config, several = {
        "pp": (SMALL, {"pipeline_parallel_size": devices}),
        "ep": (MIXTURE, {"tensor_parallel_size": devices, "enable_expert_parallel": True}),
        "eplb": (
            MIXTURE,
            {
                **{"tensor_parallel_size": devices, "enable_expert_parallel": True, "enable_eplb": True},
                "eplb_config": {"window_size": 8, "step_interval": 8, "num_redundant_experts": devices},
            },
        ),
        "states": (SPACE, {"tensor_parallel_size": devices}),
    }[part]
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
        one = answers(folder, dtype="float32")
        compare(f"{part} recorded", one, answers(folder, dtype="float32", **several), 2e-3)
        compare(f"{part} eager", one, answers(folder, dtype="float32", enforce_eager=True, **several), 2e-3)
        if part in ("pp", "states"):
            exact = {"dtype": "bfloat16", "deterministic": True}
            same = answers(folder, **exact) == answers(folder, **exact, **several)
            print(f"CHECK {part} --deterministic: {'the same bytes' if same else 'OTHER BYTES'}", flush=True)


def check_long(devices: int) -> None:
    """Raises where sums long enough to go in pieces (8192 rows of 8 kB) differ from those that are made at once."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(SMALL | {"hidden_size": 4096}))
        several = {"tensor_parallel_size": devices}
        one, many = answers(folder, long=True), answers(folder, long=True, **several)
        compare("exchanged", one, many, 0.1)
        compare("without", answers(folder, long=True, disable="exchange", **several), many, 0.1)


def check_drafts(devices: int) -> None:
    """Raises where guesses of a draft model change what several devices say."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(SMALL))
        drafts = {"speculative_config": {"model": folder, "num_speculative_tokens": 3}}
        one = answers(folder, dtype="float32")
        for way in ("tensor", "pipeline"):
            several = {f"{way}_parallel_size": devices}
            compare(f"drafts {way}", one, answers(folder, dtype="float32", **several, **drafts), 2e-3)


def check(devices: int) -> None:
    """Raises where several devices do not give what one gives."""
    for name, config in (("dense", SMALL), ("mixture", MIXTURE)):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
            several = {"tensor_parallel_size": devices}
            for options in ({"dtype": "float32"}, {"dtype": "float32", "enforce_eager": True}, {"dtype": "bfloat16"}):
                one, many = answers(folder, **options), answers(folder, **options, **several)
                compare(f"{name} {options}", one, many, 0.1 if options["dtype"] == "bfloat16" else 2e-3)
            exact = {"dtype": "bfloat16", "deterministic": True}
            if name == "dense":
                one, many = answers(folder, **exact), answers(folder, **exact, **several)
                print(f"CHECK {name} --deterministic: {'the same bytes' if one == many else 'OTHER BYTES'}", flush=True)
            one, many = answers(folder), answers(folder, data_parallel_size=devices)
            same = sum(a[0] == b[0] for a, b in zip(one, many, strict=True))
            print(f"CHECK {name} data parallel: {same} of {len(one)} alike", flush=True)


def spread(how: str, devices: int) -> list[str]:
    """The flags of a way to use so many devices."""
    if how == "expert":
        return ["--tensor-parallel-size", str(devices), "--enable-expert-parallel"]
    return [f"--{how}-parallel-size", str(devices)] if how else []


def measure(part: str, devices: int, seeds: int, disable: str | None) -> None:
    """Print tokens per second of one part."""
    geometry, how, names = PARTS[part]
    config = GEOMETRIES[geometry]
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        (at / "config.json").write_text(json.dumps(config))
        command = [
            sys.executable, "-c", "from tokenmill.cli.main import main; main()", "bench", "throughput", folder,
            "--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "512", "--max-model-len", "4096",
            "--json", str(at / "out.json"), *spread(how, devices), *(["--disable", disable] if disable else []),
        ]  # fmt: skip
        for name in names:
            for seed in range(1 if name in ("mixed", "prefix") else seeds):
                lines = [json.dumps({"prompt_token_ids": p, "max_tokens": n}) for p, n in workload(name, seed)]
                (at / f"{name}-{seed}.jsonl").write_text("\n".join(lines))
                command += ["--workload", str(at / f"{name}-{seed}.jsonl")]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {
            "PYTHONPATH": f"{ROOT.parent / 'src'}:{os.environ.get('PYTHONPATH', '')}"})  # fmt: skip
        if done.returncode:
            print(f"FAILED {part}: {(done.stdout + done.stderr)[-3000:]}", flush=True)
            return
        found = json.loads((at / "out.json").read_text())
    best: dict[str, dict[str, Any]] = {}
    for run in found["runs"]:
        name = pathlib.Path(str(run["workload"])).name.split("-")[0]
        if run["output_tokens_per_s"] > best.get(name, {}).get("output_tokens_per_s", 0.0):
            best[name] = run
    for name, run in best.items():
        figures = {key: run[key] for key in ("output_tokens_per_s", "seconds", "mbu", "mfu", "steps")}
        print(f"RESULT {part} {geometry} {how} {devices} {name} {json.dumps(figures)}", flush=True)
    print(f"RESULT {part} startup_s {found['startup_s']:.1f} process_s {time.perf_counter() - began:.1f}", flush=True)
    print(f"  notes {found['notes']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="check,sums,8b,8b-mixed,dp,70b")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=170.0)
    parser.add_argument("--disable", help="what the engines of measured parts leave out")
    parser.add_argument("--only", help="run this part here (what each process is told)")
    options = parser.parse_args()
    if options.only == "check":
        return check(options.devices)
    if options.only in ("pp", "ep", "eplb", "states", "drafts", "long"):
        return check_some(options.only, options.devices)
    if options.only:
        return measure(options.only, options.devices, options.seeds, options.disable)
    for part in options.parts.split(","):
        again = [sys.executable, str(ROOT / "gpu_sums.py"), "--devices", str(options.devices)]
        if part != "sums":
            again = [sys.executable, __file__, "--only", part, *again[2:], "--seeds", str(options.seeds)]
            again += ["--disable", options.disable] if options.disable else []
        child = subprocess.Popen(again, start_new_session=True)
        try:
            status = child.wait(options.limit)
            print(f"PART {part}: {'done' if status == 0 else f'ended with {status}'}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"PART {part}: not done within {options.limit:.0f} s", flush=True)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


if __name__ == "__main__":
    main()
