"""Choosing where every rank has the logits of some words only. Owns: what ranks tell each other in place of logits.

A token's noise is a function of seed, index and token (noise.py), so each rank can draw among its own words; then the
best of all is found from one pair of each rank:

    the largest logit and its id            8 bytes a line and rank: all that a greedy line needs
    with top-k: the k largest scores        4 k bytes
    the largest noisy score and its id      8 bytes

Every number is computed as one rank alone would: nothing is added up over words, and equal scores go to the lowest id,
because ranks have their words in order. What needs a sum over all words (top-p, log-probabilities) or sees logits that
were edited gathers them: `takes` says so. Must not know: models, plans, processes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.compute.model import Group, Words
from tokenmill.sampling import filters
from tokenmill.sampling import table as features
from tokenmill.sampling.edits import pick, take
from tokenmill.sampling.noise import noisy_, position_keys
from tokenmill.sampling.sampler import Pending, Sampled
from tokenmill.sampling.stable import first_max
from tokenmill.sampling.steps import BY_NAME
from tokenmill.sampling.table import SamplingTable

Best = tuple[Tensor, Tensor, Tensor]
"""What `Kernels.greedy` returns."""
MIN_P, TOP_K = BY_NAME["min_p"].bit, BY_NAME["top_k"].bit
ALONE = features.SAMPLED | MIN_P | TOP_K
"""The features that lines may use if ranks are to choose among their own words."""
WANTS = features.CHOICES | features.FILTERS | features.LOGPROBS


def takes(rows: list[int], table: SamplingTable, words: Words) -> bool:
    """Can ranks choose for these rows among their own words, with less communication than for all logits?"""
    used = most = 0
    for row in rows:
        used |= table.bits[row]
        if table.bits[row] & TOP_K:
            most = max(most, table.params[row].top_k)
    return not used & WANTS & ~ALONE and most < words.count


def find_largest(part: Tensor, words: Words, kernels: Kernels) -> Best:
    """part [n, words.count] -> the same as Kernels.greedy over all words. It uses few torch operations, which tapes can
    record."""
    _, marked, largest = kernels.greedy(part)
    best, marked = _best_of_all(
        largest, torch.where(marked < 0, marked - words.first, marked + words.first), words.group
    )
    return torch.where(marked < 0, -1 - marked, marked), marked, best


def _best_of_all(scores: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Each rank's best score [n] float32 and id [n] -> the best of all ranks; of equal scores the lowest rank's. Ids
    are sent as floats, which can represent every integer below 2^24."""
    told = group.all_gather(torch.stack((scores, ids.to(torch.float32)), -1)).view(len(scores), group.size, 2)
    at = told[:, :, 0].argmax(-1, keepdim=True)
    return told[:, :, 0].gather(1, at)[:, 0], told[:, :, 1].gather(1, at)[:, 0].to(torch.int64)


def choose_among_own(
    part: Tensor, rows: list[int], at: tuple[Tensor, Tensor], table: SamplingTable, kernels: Kernels, words: Words
) -> tuple[Sampled, Tensor]:
    """part [n, words.count] of `rows`, which `takes` has accepted -> a token per line; also its id, or ~id if it is
    bad. at: row ids and positions of the lines' last known tokens [n] int64."""
    ids, marked, largest = find_largest(part, words, kernels)
    sampled = [i for i, row in enumerate(rows) if table.bits[row] & features.SAMPLED]
    if sampled:
        picked = pick(sampled, len(rows), part.device)
        lines = take(at[0], picked), take(at[1], picked) + 1
        drawn = _draw(take(part, picked), take(largest, picked), [rows[i] for i in sampled], lines, table, words)
        ids = drawn if picked is None else ids.index_copy(0, picked, drawn)
        marked = torch.where(largest.isfinite(), ids, ~ids)
    return Sampled(ids, marked < 0, Pending(largest, largest)), marked


def _draw(
    part: Tensor, largest: Tensor, rows: list[int], lines: tuple[Tensor, Tensor], table: SamplingTable, words: Words
) -> Tensor:
    """Draw ids [m] as sampler.py does. largest [m]: over all words. lines: row ids and lengths [m]."""
    row_ids, lengths = lines
    s = (part.float() - largest[:, None]).mul_(table.inverse_temperature[row_ids][:, None])
    for bit, cut_ in ((MIN_P, _min_p), (TOP_K, _top_k)):
        users = [i for i, row in enumerate(rows) if table.bits[row] & bit]
        if users:
            picked = pick(users, len(rows), s.device)
            least = cut_(take(s, picked), take(row_ids, picked), [rows[i] for i in users], table, words)
            bounds = s.new_full((len(rows),), -math.inf)
            filters.keep_at_least_(s, least if picked is None else bounds.index_copy_(0, picked, least))
    keys = position_keys(table.stream[row_ids], lengths - table.num_prompt[row_ids])
    own = table.bases[words.first : words.first + words.count]
    best, ids = first_max(noisy_(s, keys, own))
    return _best_of_all(best, ids + words.first, words.group)[1]


def _min_p(s: Tensor, row_ids: Tensor, rows: list[int], table: SamplingTable, words: Words) -> Tensor:
    """The least score that is kept [m]."""
    return table.log_min_p[row_ids]


def _top_k(s: Tensor, row_ids: Tensor, rows: list[int], table: SamplingTable, words: Words) -> Tensor:
    """The k-th largest score of all words [m]: among the k largest of each rank."""
    most = max(table.params[row].top_k for row in rows)
    told = words.group.all_gather(s.topk(most, dim=1).values)
    values = told.topk(most, dim=1).values
    return values.gather(1, table.top_k[row_ids][:, None] - 1)[:, 0]
