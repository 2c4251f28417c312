"""The trainer of the main model. Owns: the clock-driven loop, checkpoints and the export. Evaluation is evaluate.py."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from model import Decoder, cross_entropy, document_mask, hf_config, hf_state, load_decoder, unpack
from optim import Optimiser, schedule
from pack import Feed, Stream
from safetensors.torch import save_file
from shapes import MAIN, TINY, Shape
from tokenizer_build import copy_files

HERE = Path(__file__).parent
LONG_FROM = 0.72
"""From this share of the time on, long sequences."""


@dataclass(frozen=True)
class Plan:
    """One training run; it ends after `seconds`, or after `steps` when that is set."""

    out: Path
    seconds: float
    corpus: str | None = None
    workers: int = 15
    batch: int = 131072
    short: int = 1024
    long: int = 8192
    muon: float = 0.02
    seed: int = 1
    steps: int = 0
    shape: Shape = MAIN
    resume: tuple[Path, float] | None = None
    """Go on from this model folder, with this share of the full learning rates."""


def losses(model: Decoder, ids, targets, weights, positions, mask, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The training loss (with z-loss) of packed rows, and the plain balance term."""
    hidden, balance, _ = model(ids, positions, mask, dtype)
    logits = hidden @ model.embed.to(dtype).T
    return cross_entropy(logits, targets, weights, 1e-4) + 0.01 * balance, balance


class Runner:
    """Device, compiled loss and one training step."""

    def __init__(self, plan: Plan) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model = load_decoder(str(plan.resume[0]), plan.shape) if plan.resume else Decoder(plan.shape, plan.seed)
        self.model = model.to(self.device)
        self.optimiser = Optimiser(self.model, plan.muon)
        self.loss = torch.compile(losses, dynamic=False) if self.device == "cuda" else losses

    def backward(self, block) -> torch.Tensor:
        """Loss and gradients of one block of rows."""
        rows = torch.from_numpy(block.astype("int32")).to(self.device, non_blocking=True)
        ids, targets, weights, positions, document = unpack(rows)
        loss, _ = self.loss(self.model, ids, targets, weights, positions, document_mask(document), self.dtype)
        loss.backward()
        return loss.detach()


def export(model: Decoder, folder: Path, tokenizer: Path, meta: dict[str, str]) -> None:
    """Write config, bf16 weights, tokenizer and generation defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_state(model), folder / "model.safetensors", metadata={"format": "pt", **meta})
    (folder / "config.json").write_text(json.dumps(hf_config(model.shape), indent=1) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    copy_files(tokenizer, folder)


def fit(plan: Plan) -> dict:
    """Run one plan; returns the figures of the report."""
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = HERE / "tokenizer"
    feed = Feed(str(tokenizer / "tokenizer.json"), plan.corpus, plan.short, plan.batch // plan.short, False, plan.seed)
    scratch = f"/dev/shm/tokenmill-demo-{plan.seed}"
    begin = time.time()
    # The long rows are made first, while the GPU compiles; both streams fill up in the background.
    short = Stream(feed, plan.workers, scratch + "/short")
    long_workers = plan.workers and max(1, plan.workers // 4)
    long = Stream(
        replace(feed, length=plan.long, rows=plan.batch // plan.long, long=True),
        long_workers,
        scratch + "/long",
        ahead=400,
    )
    runner = Runner(plan)
    if plan.workers:
        for stream in (short, long):
            runner.backward(stream.next())
            runner.optimiser.adam.zero_grad(set_to_none=True)
            for p in runner.optimiser.everything:
                p.grad = None
    print(f"ready after {time.time() - begin:.1f} s", flush=True)
    report = _loop(plan, runner, short, long)
    short.close()
    long.close()
    from corpus import load_corpus

    meta = {
        "seed": str(plan.seed),
        "corpus_manifest_sha256": load_corpus(plan.corpus).manifest or "none",
        "steps": str(report["steps"]),
    }
    export(runner.model, plan.out, tokenizer, meta)
    (plan.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _loop(plan: Plan, runner: Runner, short: Stream, long: Stream) -> dict:
    start, step, tokens, saved, log = time.time(), 0, 0, False, []
    marks = {}
    while True:
        fraction = step / plan.steps if plan.steps else (time.time() - start) / plan.seconds
        if fraction >= 1:
            break
        is_long = fraction >= LONG_FROM
        if is_long and "short_tokens" not in marks:
            marks |= {"short_tokens": tokens, "short_seconds": time.time() - start}
        loss = runner.backward((long if is_long else short).next())
        runner.optimiser.step((plan.resume[1] if plan.resume else 1.0) * schedule(fraction))
        step += 1
        tokens += plan.batch
        if step % 50 == 0 or step == 1:
            value = loss.item()
            if not math.isfinite(value):
                raise RuntimeError(f"loss is {value} at step {step}")
            seconds = time.time() - start
            log.append((step, round(value, 4), round(seconds, 1)))
            print(
                f"step {step} loss {value:.3f} {tokens / seconds / 1e6:.2f} M tokens/s {seconds:.0f} s",
                flush=True,
            )
        if fraction > 0.6 and not saved and not plan.steps:
            save_file(hf_state(runner.model), plan.out.with_name(plan.out.name + "-60.safetensors"))
            saved = True
    seconds = time.time() - start
    short_rate = marks.get("short_tokens", tokens) / max(marks.get("short_seconds", seconds), 1e-9)
    # 6 operations a parameter and token, attention left out.
    mfu = 6 * sum(p.numel() for p in runner.model.parameters()) * short_rate / 790e12
    return {
        "steps": step,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second_short": round(short_rate),
        "mfu_of_790_tflops": round(mfu, 4),
        "waited_for_data": round(short.waited + long.waited, 1),
        "loss": log,
        "seed": plan.seed,
        "muon": plan.muon,
        "batch": plan.batch,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=390)
    parser.add_argument("--corpus")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--muon", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=131072)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="go on from this model folder")
    parser.add_argument("--peak", type=float, default=1.0, help="share of the full learning rates, for --start")
    parser.add_argument("--tiny", action="store_true", help="a 20-step run at width 64 on the CPU")
    parser.add_argument(
        "--smoke", action="store_true", help="four small steps of the real shape, for a check on the CPU"
    )
    args = parser.parse_args()
    plan = Plan(args.out, args.seconds, args.corpus, args.workers, args.batch, muon=args.muon, seed=args.seed)
    plan = replace(plan, resume=(args.start, args.peak) if args.start else None)
    if args.tiny:
        plan = replace(plan, workers=0, batch=2048, short=256, long=1024, steps=20, shape=TINY)
    if args.smoke:
        plan = replace(plan, workers=0, batch=2048, short=256, long=1024, steps=4)
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    fit(plan)


if __name__ == "__main__":
    main()
