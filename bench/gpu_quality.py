"""What quantised weights and K/V lose: logits against the unquantised model, and right answers of the demo model.

python bench/gpu_quality.py [--model demo] [--count 60] [--forms fp8,int8] [--json OUT]

Runs on the GPU where there is one. Logits are those of every position of the golden prompts and answers; the suites
are those that the demo model was evaluated on, in wordings that it was not trained on (train/demo/suites.py). Limits:
8 bits may lose 1 point on average, int4 5. The exit status says whether they hold. --count 0 leaves the suites out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenmill import LLM, SamplingParams
from tokenmill.demo import demo_dir
from tokenmill.kernels.fp8 import BLOCK, FP8, LARGEST

BLOCKS = "fp8 in blocks"
FORMS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8"},
    BLOCKS: {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-g128": {"quantization": "int4-g128"},
    "fp8 K/V": {"kv_cache_dtype": "fp8"},
    "int8 K/V": {"kv_cache_dtype": "int8"},
    "fp8, fp8 K/V": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
ALLOWED = {form: 5.0 if form.startswith("int4") else 1.0 for form in FORMS}
"""Points that a form may lose on average."""
ROOM: dict[str, int] = {"kv_cache_memory_bytes": 1 << 30}


def in_blocks(source: Path, folder: Path) -> None:
    """The model with its layers' weights in float8, a scale per 128 x 128 block, as DeepSeek stores them."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    out: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            out[name] = weight
            continue
        rows, columns = weight.shape
        high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
        filled = torch.zeros(high * BLOCK, wide * BLOCK)
        filled[:rows, :columns] = weight.float()
        tiles = filled.view(high, BLOCK, wide, BLOCK)
        scales = (tiles.abs().amax((1, 3)) / LARGEST).clamp_min(1e-12)
        rounded = (tiles / scales[:, None, :, None]).to(FP8).view(torch.uint8).reshape(filled.shape)
        out[name] = rounded[:rows, :columns].contiguous().view(FP8)
        out[f"{name}_scale_inv"] = scales
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})


def logits(model: str, options: dict[str, str], prompts: list[list[int]]) -> Tensor:
    """Logits [positions of all prompts, vocabulary], one prompt after the other."""
    found: list[Tensor] = []
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model=model, max_model_len=1024, max_num_seqs=8, enforce_eager=True, **ROOM, **options) as llm:
        network = llm.engine.executor.runner.model
        plain = network.logits

        def kept(hidden: Tensor, ctx: object) -> Tensor:
            y: Tensor = plain(hidden, ctx)
            found.append(y.float().cpu())
            return y

        network.logits = kept
        for ids in prompts:
            llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
    return torch.cat(found)


def compare(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Cosine of logits (mean and least) and share of positions with the same likeliest token."""
    alike = torch.nn.functional.cosine_similarity(found, exact)
    top = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    return {"cosine": float(alike.mean()), "least": float(alike.min()), "top-1": float(top)}


def main() -> None:
    """Print a line per form; exit 1 where one loses more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="the demo model, or one of its folders")
    parser.add_argument("--count", type=int, default=60, help="questions per suite")
    parser.add_argument("--prompts", type=int, default=1000, help="golden prompts whose logits are compared")
    parser.add_argument("--forms", default=",".join(f for f in FORMS if "," not in f), help="beside bfloat16")
    parser.add_argument("--all", action="store_true", help="every form")
    parser.add_argument("--json")
    args = parser.parse_args()
    folder = demo_dir() if args.model == "demo" else Path(args.model)
    golden = [json.loads(line) for line in (folder / "golden.jsonl").read_text().splitlines()]
    prompts = [(g["prompt_ids"] + g["output_ids"])[:500] for g in golden[: args.prompts]]
    wanted = list(FORMS) if args.all else ["bfloat16", *(f for f in args.forms.split(",") if f != "bfloat16")]
    sys.path.insert(0, str(Path(__file__).parent.parent / "train" / "demo"))
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as made:
        in_blocks(folder, Path(made))
        exact = logits(str(folder), {}, prompts)
        print(f"{len(exact)} positions on {'a GPU' if torch.cuda.is_available() else 'a CPU'}")
        for form in wanted:
            model = made if form == BLOCKS else str(folder)
            line = compare(logits(model, FORMS[form], prompts), exact)
            if args.count:
                line |= answered(model, form, args.count)
                line["lost"] = report.get("bfloat16", line)["right"] - line["right"]
            report[form] = line
            print(f"{form:14}", *(f"{name} {value:.4f}" for name, value in line.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    wrong = [form for form, line in report.items() if line.get("lost", 0.0) > ALLOWED[form]]
    if wrong:
        raise SystemExit(f"more points lost than allowed: {', '.join(wrong)}")


def answered(model: str, form: str, count: int) -> dict[str, float]:
    """Percent of right answers over all suites."""
    from quantised import results
    from suites import SUITES

    options = {**FORMS[form], **ROOM}
    got = results(model, options, [name for name in SUITES if name != "story"], count, 20)
    shares = [share for name, share in got.items() if name != "exact"]
    return {"right": sum(shares) / len(shares)}


if __name__ == "__main__":
    main()
