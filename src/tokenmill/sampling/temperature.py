"""How sharp a distribution is. Owns: temperature (fixed, or by entropy) and quadratic smoothing, where they are steps.

A fixed temperature in the usual place is not a step: sampler.py multiplies by its inverse at once. Scaled logits s
[n, V] have 0 as their largest before and after. Must not know: rows, filters.

    fixed      s / T
    dynamic    s / (low + (high - low) * (entropy / log(number of tokens left)) ^ exponent); low, high = T -+ range
    smoothing  -k s^2 + c s^3 with k = factor * (3 - curve) / 2 and c = factor * (curve - 1) / 2
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.sampling.filters import spread_of
from tokenmill.sampling.stable import line_sums, wide

COLDEST = 1e-5


def temperature_(s: Tensor, temperature: Tensor, reach: Tensor, exponent: Tensor) -> None:
    """Divide by a temperature [n]; a reach > 0 lets it follow the entropy."""
    t, reach = wide(temperature), wide(reach)
    low, high = (t - reach).clamp(min=0.0), t + reach
    count = wide(line_sums((s > -math.inf).float()))
    most = count.log()
    evenness = (wide(spread_of(s).entropy) / most).clamp(0.0, 1.0).pow(wide(exponent))
    dynamic = torch.where(count > 1, low + (high - low) * evenness, 1.0)
    found = torch.where(reach > 0, dynamic, t)
    s.div_(found.clamp(min=COLDEST).float()[:, None])


def smoothing_(s: Tensor, factor: Tensor, curve: Tensor) -> None:
    """Bend the logits: move those near the largest closer to it, and lower those far below it."""
    square, cube = (factor * (3 - curve) / 2)[:, None], (factor * (curve - 1) / 2)[:, None]
    known = s.clamp(min=-1e9)  # avoids zero times infinity; no finite logit is that low
    bent = torch.where(s > -math.inf, known * known * (cube * known - square), -math.inf)
    s.copy_(bent.sub_(bent.amax(-1, keepdim=True)))
