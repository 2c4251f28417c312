"""Mirostat 1 and 2: sampling that keeps the surprise of its tokens near a target. Owns: truncation, and the state mu.

Surprise is -log2 of a token's probability among those that were left. After each token

    mu <- mu - eta * (surprise - tau),   mu = 2 tau at first

mu depends on logits that are gone, so it is state of the sequence: it lies in the row, a step's result carries it to
the host, and a row that begins again is given it. A draft's line takes mu as the line before it leaves it. A line with
one possible token leaves mu alone, so that tokens which a grammar forces count the same with and without a step of the
model. Must not know: plans, rows' other parameters.

    version 2   -log2 p <= mu
    version 1   the k likeliest, k = (e * 2^mu / (1 - V^-e))^(1 / s), e = s - 1; s: the slope of log p over log rank,
                fitted to the 100 likeliest
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.sampling.filters import keep_at_least_, ordered
from tokenmill.sampling.noise import noisy_
from tokenmill.sampling.stable import first_max, line_sums, wide

FITTED = 100


@dataclass(slots=True)
class Targets:
    """For n lines: version, tau and eta [n], noise keys [n]; and the tokens' bases [V]."""

    version: Tensor
    tau: Tensor
    eta: Tensor
    keys: Tensor
    bases: Tensor

    def of(self, lines: Tensor) -> Targets:
        """The targets of some of the lines."""
        return Targets(self.version[lines], self.tau[lines], self.eta[lines], self.keys[lines], self.bases)


def draw(s: Tensor, mu: Tensor, targets: Targets, first: bool) -> tuple[Tensor, Tensor]:
    """Scaled logits s [n, V] (the largest is 0; overwritten) and mu [n] -> ids [n] and the next mu [n]. first: some
    line has version 1."""
    several = line_sums((s > -math.inf).float()) > 1
    weights = s.exp()
    total = wide(line_sums(weights))
    least = (-wide(mu) * math.log(2.0) + total.log()).clamp(max=0.0).float()  # the likeliest token always stays
    if first:
        least = torch.where(targets.version == 1, _kth(s, mu, total), least)
    keep_at_least_(s, least)
    left = wide(line_sums(s.exp()))
    ids = first_max(noisy_(s.clone(), targets.keys, targets.bases))[1]
    surprise = (left.log() - wide(s.gather(1, ids[:, None])[:, 0])) / math.log(2.0)
    moved = (wide(mu) - wide(targets.eta) * (surprise - wide(targets.tau))).float()
    return ids, torch.where(several, moved, mu)


def _kth(s: Tensor, mu: Tensor, total: Tensor) -> Tensor:
    """The score of the last token that version 1 keeps."""
    size = s.shape[1]
    best = ordered(s)
    top = wide(best[:, : min(FITTED, size)])
    steps = wide(torch.arange(1, top.shape[1], device=s.device) + 1).log()
    steps = steps - wide(torch.arange(1, top.shape[1], device=s.device)).log()
    both = top[:, 1:] > -math.inf
    falls = torch.where(both, top[:, :-1] - top[:, 1:], 0.0)
    squares = torch.where(both, (steps * steps).expand_as(falls), 0.0)
    slope = line_sums(falls * steps) / line_sums(squares) if top.shape[1] > 1 else torch.ones_like(total)
    e = slope - 1
    near = e.abs() < 1e-9
    scale = torch.where(near, 1 / math.log(max(size, 2)), e / (1 - torch.pow(float(size), -e)))
    k = (scale * torch.exp2(wide(mu))).pow(1 / slope)
    k = torch.nan_to_num(k, nan=1.0, posinf=float(size)).clamp(1, size).floor().long()
    return best.gather(1, k[:, None] - 1)[:, 0]
