"""Medusa heads on the frozen main model. Owns: three heads of two residual blocks over the shared output matrix."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import Decoder, cross_entropy, document_mask, load_decoder, unpack
from pack import Feed, Stream, wait_for
from safetensors.torch import save_file
from shapes import MAIN
from torch import Tensor, nn
from train import HERE

HEADS, BLOCKS = 3, 2


class Heads(nn.Module):
    """Residual blocks per head; they start as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HEADS, BLOCKS, dim, dim))
        self.bias = nn.Parameter(torch.zeros(HEADS, BLOCKS, dim))

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """States [.., dim] of one head."""
        for block in range(BLOCKS):
            w, b = self.weight[head, block].to(hidden.dtype), self.bias[head, block].to(hidden.dtype)
            hidden = hidden + F.silu(hidden @ w.T + b)
        return hidden


def loss_of(
    heads: Heads, main: Decoder, ids: Tensor, weights: Tensor, positions: Tensor, document: Tensor, mask: object
) -> Tensor:
    """Mean cross entropy of the heads for the tokens two to four ahead."""
    with torch.no_grad():
        dtype = torch.bfloat16 if ids.is_cuda else torch.float32
        hidden, _, _ = main(ids, positions, mask, dtype)
    matrix = main.embed.to(hidden.dtype)
    total = torch.zeros((), device=ids.device)
    for head in range(HEADS):
        ahead = head + 2
        same = torch.roll(document, -ahead, 1) == document
        w = torch.roll(weights, -ahead, 1) * same
        w = torch.cat((w[:, :-ahead], torch.zeros_like(w[:, -ahead:])), 1)
        total = total + cross_entropy(heads(hidden, head) @ matrix.T, torch.roll(ids, -ahead, 1), w, 0.0)
    return total / HEADS


def main() -> None:
    """Train and write the heads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--main", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--corpus")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two small steps, for a check on the CPU")
    args = parser.parse_args()
    torch.manual_seed(3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(MAIN).to(device).requires_grad_(False)
    heads = Heads(MAIN.dim).to(device)
    optimiser = torch.optim.AdamW(
        heads.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95), fused=device == "cuda"
    )
    stream = Stream(
        Feed(str(HERE / "tokenizer/tokenizer.json"), args.corpus, 1024, 1 if args.smoke else 64, False, 3),
        0 if args.smoke else args.workers,
        "/dev/shm/tokenmill-medusa",
    )
    run = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of

    def one() -> Tensor:
        rows = torch.from_numpy(stream.next().astype("int32")).to(device)
        ids, words = rows[:, 0].long(), rows[:, 1].long()
        _, _, _, positions, document = unpack(rows)
        loss = run(heads, model, ids, (words % 256).float() / 10, positions, document, document_mask(document))
        loss.backward()
        return loss.detach()

    one()
    optimiser.zero_grad(set_to_none=True)
    wait_for(Path(args.main) / "training.json")
    model.load_state_dict(load_decoder(args.main, MAIN).state_dict())
    start, step, loss = time.time(), 0, None
    while step < 2 if args.smoke else time.time() - start < args.seconds:
        loss = one()
        fraction = (time.time() - start) / args.seconds
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, 2 * max(0.0, 1 - fraction))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
    stream.close()
    state = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            state[f"blocks.{head}.layers.{block}.weight"] = heads.weight[head, block].detach().bfloat16().cpu().clone()
            state[f"blocks.{head}.layers.{block}.bias"] = heads.bias[head, block].detach().bfloat16().cpu().clone()
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(state, args.out / "model.safetensors", metadata={"format": "pt", "steps": str(step)})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": MAIN.dim,
        "vocab_size": MAIN.vocab,
        "num_heads": HEADS,
        "num_hidden_layers": BLOCKS,
        "original_lm_head": True,
        "medusa_fc_bias": True,
        "truncated_vocab_size": MAIN.vocab,
        "dtype": "bfloat16",
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print("medusa", step, "steps, loss", round(loss.item(), 3), flush=True)


if __name__ == "__main__":
    main()
