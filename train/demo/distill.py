"""Small decoders taught by the main model: draft, MoE, text part of the vision model. Owns: the distillation."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Decoder, cross_entropy, document_mask, load_decoder, unpack
from optim import Optimiser, schedule
from pack import Feed, Stream, wait_for
from shapes import DRAFT, MAIN, MOE, TEXT, TINY
from torch import Tensor
from train import HERE, export

SHAPES = {"draft": DRAFT, "moe": MOE, "text": TEXT, "tiny": TINY}
# Rows per kind: the draft follows the main model to its full context, the others only to 2,048 positions.
LENGTHS = {"draft": (1024, 8192), "moe": (2048,), "text": (2048,), "tiny": (256,)}


def teach(
    student: Decoder,
    teacher: Decoder,
    ids: Tensor,
    targets: Tensor,
    weights: Tensor,
    positions: Tensor,
    mask: object,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence from the teacher plus 0.3 cross entropy plus the balance loss; and the last two."""
    with torch.no_grad():
        hidden, _, _ = teacher(ids, positions, mask, dtype)
        goal = (hidden @ teacher.embed.to(dtype).T).float().log_softmax(-1)
    hidden, balance, load = student(ids, positions, mask, dtype)
    logits = hidden @ student.embed.to(dtype).T
    divergence = F.kl_div(logits.float().log_softmax(-1), goal, log_target=True, reduction="none").sum(-1)
    kl = (weights * divergence).sum() / weights.sum().clamp(min=1)
    return kl + 0.3 * cross_entropy(logits, targets, weights, 1e-4) + 0.01 * balance, kl.detach(), load


BATCH = 65536
"""Tokens of one step."""


@dataclass(frozen=True)
class Effort:
    """How long (or how many steps), on what, with how much."""

    seconds: float
    corpus: str | None
    workers: int
    seed: int
    steps: int = 0
    batch: int = BATCH


def fit(
    kind: str,
    main: str,
    out: Path,
    effort: Effort,
    *,
    after: Path | None = None,
) -> dict:
    """Train one student and export it; it compiles at once and begins when main is finished and `after` exists."""
    seconds, corpus, workers = effort.seconds, effort.corpus, effort.workers
    seed, steps, batch = effort.seed, effort.steps, effort.batch
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = SHAPES[kind]
    teacher = Decoder(MAIN if kind != "tiny" else TINY).to(device).requires_grad_(False)
    student = Decoder(shape, seed).to(device)
    optimiser = Optimiser(student)
    run = torch.compile(teach, dynamic=False) if device == "cuda" else teach
    tokenizer = str(HERE / "tokenizer" / "tokenizer.json")
    lengths = [n for n in LENGTHS[kind] if n <= batch] or [batch]
    feeds = [Feed(tokenizer, corpus, n, batch // n, n > 2048, seed) for n in lengths]
    streams = [
        Stream(f, workers if i == 0 else workers and 2, f"/dev/shm/tokenmill-{kind}-{seed}-{i}")
        for i, f in enumerate(feeds)
    ]

    def one(stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.from_numpy(stream.next().astype("int32")).to(device)
        ids, targets, weights, positions, document = unpack(rows)
        loss, kl, load = run(student, teacher, ids, targets, weights, positions, document_mask(document), dtype)
        loss.backward()
        return loss.detach(), kl, load

    for stream in streams:
        one(stream)
        for p in optimiser.everything:
            p.grad = None
    if kind != "tiny":
        wait_for(Path(main) / "training.json")
        teacher.load_state_dict(load_decoder(main, MAIN).state_dict())
    if after:
        wait_for(after)
    print(f"{kind} begins", flush=True)
    start, step, load, kl = time.time(), 0, None, None
    while True:
        fraction = step / steps if steps else (time.time() - start) / seconds
        if fraction >= 1:
            break
        long = len(streams) > 1 and fraction > 0.6 and step % 2 == 0
        _, kl, load = one(streams[1] if long else streams[0])
        optimiser.step(schedule(fraction))
        step += 1
        if step % 200 == 0:
            rate = step * batch / (time.time() - start) / 1e6
            print(
                f"{kind} step {step} divergence {kl.item():.3f} {rate:.2f} M tokens/s",
                flush=True,
            )
    for stream in streams:
        stream.close()
    report = {"steps": step, "tokens": step * batch, "divergence": round(kl.item(), 4), "seed": seed}
    if shape.experts:
        report["expert_load_by_layer"] = [[round(v, 3) for v in row] for row in load.tolist()]
    export(student, out, HERE / "tokenizer", {"seed": str(seed), "steps": str(step)})
    (out / "training.json").write_text(json.dumps(report) + "\n")
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(SHAPES))
    parser.add_argument("--main", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--corpus")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--after", type=Path, help="begin only when this file exists")
    parser.add_argument("--smoke", action="store_true", help="two small steps, for a check on the CPU")
    args = parser.parse_args()
    small = {"steps": 2, "batch": 1024} if args.smoke else {}
    effort = Effort(args.seconds, args.corpus, 0 if args.smoke else args.workers, args.seed, **small)
    done = fit(args.kind, args.main, args.out, effort, after=args.after)
    print(done, flush=True)


if __name__ == "__main__":
    main()
