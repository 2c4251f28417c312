"""Which tokens may be sampled. Owns: min-p, top-k, top-p and typical-p, each as a threshold on scaled logits.

Must not know: rows, noise. All take scaled logits s [n, V] (temperature applied, the largest of each line is 0, so
exp(s) never overflows) and parameters [n], and write -inf over what falls out. Equally likely tokens share a fate:
all that tie with the last kept token are kept, so a result never depends on how a sort breaks ties.

    min-p      s >= log(min_p)
    top-k      s >= the k-th largest s
    top-p      the probability of all strictly likelier tokens is < top_p (the likeliest token always stays)
    typical-p  with surprise = |-log p - entropy|: the probability of all strictly less surprising tokens is
               < typical_p; the largest that stays is 0 again
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenmill.sampling.stable import line_sums, wide, widest_float

FIRST_LOOK = 1024


def min_p_(s: Tensor, log_min_p: Tensor) -> None:
    """Drop tokens less likely than min_p times the likeliest."""
    s.masked_fill_(s < log_min_p[:, None], -math.inf)


def keep_at_least_(s: Tensor, least: Tensor) -> None:
    """Drop tokens that score less than `least` [n]."""
    s.masked_fill_(s < least[:, None], -math.inf)


def top_k_(s: Tensor, k: Tensor, largest_k: int) -> None:
    """Keep the k [n] likeliest tokens of each line; `largest_k` bounds k on the host."""
    values = s.topk(min(largest_k, s.shape[1]), dim=1).values
    s.masked_fill_(s < values.gather(1, k[:, None] - 1), -math.inf)


def top_p_(s: Tensor, p: Tensor) -> None:
    """Keep the likeliest tokens that together reach probability p [n]."""
    bound = wide(p) * wide(line_sums(s.exp()))
    size = s.shape[1]
    if s.device.type != "cpu" or size <= 2 * FIRST_LOOK:
        threshold, _ = _mass_threshold(ordered(s), bound)
    else:
        # Most distributions reach p within few tokens: only lines that do not are sorted whole. Prefix sums are
        # added one by one in float64, so both ways give the same threshold.
        threshold, reached = _mass_threshold(s.topk(FIRST_LOOK, dim=1).values, bound)
        rest = (~reached).nonzero()[:, 0]
        if rest.numel():
            threshold[rest], _ = _mass_threshold(ordered(s[rest]), bound[rest])
    s.masked_fill_(s < threshold[:, None], -math.inf)


def ordered(s: Tensor) -> Tensor:
    """s with each line sorted. numpy's sort is vectorised; torch's takes ten times as long on a CPU."""
    if s.device.type == "cpu":
        return torch.from_numpy(-np.sort(-s.numpy(), axis=1))
    return s.sort(dim=1, descending=True).values


def _ascending_order(x: Tensor) -> Tensor:
    """The indexes that sort each line of x. Ties come in any order, but in the same order for equal lines."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.argsort(x.numpy(), axis=1))
    return x.argsort(dim=1, stable=True)


def _mass_threshold(ordered: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest kept score of each line of `ordered` (descending), and whether its mass reaches the bound."""
    mass = ordered.exp().cumsum(dim=1, dtype=widest_float(ordered.device.type))
    last = (mass < bound[:, None]).sum(-1)
    threshold = ordered.gather(1, last.clamp(max=ordered.shape[1] - 1)[:, None])[:, 0]
    return threshold, last < ordered.shape[1]


@dataclass(slots=True)
class Spread:
    """For each line: weights exp(s) [n, V], their sum [n] float64, -log p [n, V], and the entropy [n] in nats."""

    weights: Tensor
    total: Tensor
    information: Tensor
    entropy: Tensor


def spread_of(s: Tensor) -> Spread:
    """Compute how each line's probability is spread."""
    weights = s.exp()
    total = wide(line_sums(weights))
    information = total.log().float()[:, None] - s
    weighted = torch.where(weights > 0, weights * information, 0.0)
    return Spread(weights, total, information, (wide(line_sums(weighted)) / total).float())


def typical_p_(s: Tensor, p: Tensor) -> None:
    """Keep the tokens whose surprise is closest to the entropy, as many as together reach probability p [n]."""
    spread = spread_of(s)
    surprise = (spread.information - spread.entropy[:, None]).abs_()
    order = _ascending_order(surprise)
    mass = spread.weights.gather(1, order).cumsum(dim=1, dtype=widest_float(s.device.type))
    last = (mass < (wide(p) * spread.total)[:, None]).sum(-1)
    border = order.gather(1, last.clamp(max=s.shape[1] - 1)[:, None])
    s.masked_fill_(surprise > surprise.gather(1, border), -math.inf)
    s.sub_(s.amax(-1, keepdim=True))  # the likeliest may be too little of a surprise
