"""Optimisers. Owns: Muon for stacked matrices beside AdamW, and the clock-driven schedule."""

from __future__ import annotations

import torch
from model import Decoder
from torch import Tensor


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate orthogonal factor of matrices [N, rows, columns] by Newton-Schulz steps."""
    x = g.bfloat16()
    turned = x.shape[-2] > x.shape[-1]
    if turned:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if turned else x


class Optimiser:
    """Muon on the block matrices, AdamW on embedding, norms and router."""

    def __init__(
        self, model: Decoder, muon: float = 0.02, embed: float = 4e-3, other: float = 3e-3, decay: float = 0.1
    ) -> None:
        self.matrices = model.matrices()
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.muon, self.decay = muon, decay
        fused = model.embed.device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [
                {"params": [model.embed], "lr": embed, "weight_decay": 0.01},
                {"params": model.others(), "lr": other, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=fused,
        )
        self.base = [group["lr"] for group in self.adam.param_groups]
        self.everything = [*self.matrices, model.embed, *model.others()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` of the full learning rates; gradients are cleared."""
        torch.nn.utils.clip_grad_norm_(self.everything, 1.0)
        for p, buffer in zip(self.matrices, self.momentum, strict=True):
            buffer.lerp_(p.grad, 0.05)
            g = p.grad.lerp(buffer, 0.95)
            rows, columns = p.shape[-2:]
            update = orthogonal(g.reshape(-1, rows, columns)).reshape(p.shape)
            rate = self.muon * scale
            p.mul_(1 - rate * self.decay).add_(update.to(p.dtype), alpha=-rate * max(1, rows / columns) ** 0.5)
            p.grad = None
        for group, base in zip(self.adam.param_groups, self.base, strict=True):
            group["lr"] = base * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def schedule(fraction: float, hold: float = 0.65, warm: float = 0.02) -> float:
    """Scale of the learning rate at a fraction of the time: warmup, constant, linear to zero."""
    if fraction < warm:
        return max(fraction / warm, 0.01)
    return 1.0 if fraction < hold else max(0.0, (1 - fraction) / (1 - hold))
