"""More filters by a threshold on one line's probabilities; none of them sorts. Owns: top-n-sigma, epsilon, eta, top-a.

As in filters.py: scaled logits s [n, V] whose largest is 0, parameters [n], -inf over what falls out, the likeliest
token always stays. Must not know: rows, noise.

    top-n-sigma     s >= largest - n * sigma: sigma is the standard deviation of the logits that are not -inf
    epsilon         p >= epsilon / 10,000
    eta             p >= min(eta, sqrt(eta) * exp(-entropy)) with eta in units of 1 / 10,000
    top-a           p >= a * (probability of the likeliest token)^2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.sampling.filters import Spread, spread_of
from tokenmill.sampling.stable import line_sums, wide

UNIT = 1e-4
"""The unit of both cut-offs, as in text-generation-webui."""


def top_n_sigma_(s: Tensor, n: Tensor) -> None:
    """Keep logits within n [n] standard deviations of the largest."""
    finite = s > -math.inf
    known = torch.where(finite, s, 0.0)
    count = wide(line_sums(finite.float()))
    mean = (wide(line_sums(known)) / count).float()[:, None]
    away = torch.where(finite, s - mean, 0.0)
    sigma = (wide(line_sums(away * away)) / count).sqrt()
    s.masked_fill_(s < -(wide(n) * sigma).float()[:, None], -math.inf)


def epsilon_cutoff_(s: Tensor, epsilon: Tensor) -> None:
    """Keep tokens of at least this probability."""
    _keep_(s, spread_of(s), wide(epsilon) * UNIT)


def eta_cutoff_(s: Tensor, eta: Tensor) -> None:
    """Keep tokens of at least this probability; for a flat distribution the bound is lower."""
    spread = spread_of(s)
    bound = wide(eta) * UNIT
    _keep_(s, spread, torch.minimum(bound, bound.sqrt() * (-wide(spread.entropy)).exp()))


def top_a_(s: Tensor, a: Tensor) -> None:
    """Keep tokens whose probability is at least a times the square of the largest."""
    spread = spread_of(s)
    _keep_(s, spread, wide(a) / (spread.total * spread.total))


def _keep_(s: Tensor, spread: Spread, least: Tensor) -> None:
    bound = (least * spread.total).clamp(max=1.0).float()[:, None]
    s.masked_fill_(spread.weights < bound, -math.inf)
