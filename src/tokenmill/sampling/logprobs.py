"""Log-probabilities. Owns: what the host is told about likely tokens, measured on the device and read later.

Must not know: sampling parameters, rows. `measure` and `look_up` only queue device work; `read` and
`Measured.candidates` wait for it.
A log-probability is (logit - largest logit) - log(sum of exp(logit - largest logit)), its last steps in float64 on
the host. A token's rank counts the tokens before it in the order (more likely, then lower id), from 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.core.step import RowLogprobs
from tokenmill.sampling.stable import line_sums, top_tokens


@dataclass(slots=True)
class Measured:
    """For n lines: the largest logit [n], the sum of exp(logit - largest) [n], the k best tokens' logits and ids [n,
    k]."""

    largest: Tensor
    total: Tensor
    values: Tensor
    ids: Tensor

    def candidates(self) -> list[list[tuple[int, float]]]:
        """For each line (token, logprob) of the k best tokens, best first; forbidden tokens (-inf) are left out."""
        shifts = _shifts(self.largest.tolist(), self.total.tolist())
        lines = zip(self.ids.tolist(), self.values.tolist(), shifts, strict=True)
        return [[(i, v - s) for i, v in zip(ids, values, strict=True) if v > -math.inf] for ids, values, s in lines]


@dataclass(slots=True)
class Chosen:
    """For n lines: the chosen token's id, logit and rank, all [n]."""

    ids: Tensor
    values: Tensor
    ranks: Tensor


def _shifts(largest: list[float], totals: list[float]) -> list[float]:
    return [m + math.log(t) if t > 0 else math.nan for m, t in zip(largest, totals, strict=True)]


def measure(x: Tensor, k: int) -> Measured:
    """x [n, V] float32 -> the k most likely tokens of each line, on the device."""
    largest = x.amax(-1)
    total = line_sums((x - largest[:, None]).exp_())
    values, ids = top_tokens(x, k) if k else (x[:, :0], x.new_empty((x.shape[0], 0), dtype=torch.int64))
    return Measured(largest, total, values, ids)


def look_up(x: Tensor, ids: Tensor) -> Chosen:
    """x [n, V], ids [n] int64 -> logit and rank of one token per line, on the device."""
    values = x.gather(1, ids[:, None])
    places = torch.arange(x.shape[1], device=x.device)
    ahead = (x > values) | ((x == values) & (places < ids[:, None]))
    return Chosen(ids, values[:, 0], ahead.sum(-1) + 1)


def read_logprobs(measured: Measured, chosen: Chosen, counts: list[int]) -> list[RowLogprobs]:
    """Read to the host: for each line the chosen token, then the `counts[i]` most likely tokens."""
    shifts = _shifts(measured.largest.tolist(), measured.total.tolist())
    taken = zip(chosen.ids.tolist(), chosen.values.tolist(), chosen.ranks.tolist(), strict=True)
    tops = zip(measured.ids.tolist(), measured.values.tolist(), strict=True)
    rows: list[RowLogprobs] = []
    for (token, value, rank), (ids, values), shift, k in zip(taken, tops, shifts, counts, strict=True):
        rows.append(RowLogprobs([token, *ids[:k]], [value - shift, *(v - shift for v in values[:k])], rank))
    return rows


def token_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[RowLogprobs]:
    """logits [n, V] float32, targets [n] -> logprobs of target i under logits i, then of its k most likely tokens."""
    if logits.shape[0] == 0:
        return []
    targets = targets.to(device=logits.device, dtype=torch.int64)
    return read_logprobs(measure(logits, k), look_up(logits, targets), [k] * logits.shape[0])
