"""One way from logits to a token. Owns: which implementation chooses a call's lines, and that all give the same.

What lines want is known from their rows' feature bits, masks and processors; `way` says who does it, in one
place, and every way leaves ids, the same with ~ where a line is bad, and what is read later:

    LARGEST  the largest logit and nothing else: the backend's `greedy`, which a recorded step has made already
    BACKEND  masks, draws by temperature and, if it can, of what min-p, top-k and top-p leave, logprobs: the backend's
             `choose` (quick.py), if it takes these lines
    GENERAL  everything (sampler.py): edits, steps, draw; on a CPU it looks at few tokens where masks leave few

Ranks that have the logits of some words each choose among these where that is exact (shards.py), and gather them
otherwise: what follows is the same.

Must not know: plans, requests, how steps are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels, Paths
from tokenmill.compute.model import Words
from tokenmill.sampling import shards
from tokenmill.sampling import table as features
from tokenmill.sampling.edits import Lines, line_masks
from tokenmill.sampling.quick import PLAIN, choose_quickly
from tokenmill.sampling.sampler import Pending, Sampled, sample
from tokenmill.sampling.steps import CUTS
from tokenmill.sampling.table import SamplingTable

Best = tuple[Tensor, Tensor, Tensor]
"""What `Kernels.greedy` returns."""


class Way(Enum):
    """Which code chooses the tokens."""

    LARGEST = auto()
    BACKEND = auto()
    GENERAL = auto()


@dataclass(slots=True)
class Ask:
    """What is to be chosen: a token for each line, where `rows` has the row of each line. masks, processors, paths: as
    in edits.Lines. places: the row ids and positions of the lines' last known tokens [n] int64, on the device. longest:
    as in edits.Lines. Both of these are functions, called only if they are needed. tokens: the rows' token buffer."""

    rows: list[int]
    tokens: Tensor
    places: Callable[[], tuple[Tensor, Tensor]]
    longest: Callable[[], int]
    masks: dict[int, bytes | list[bytes]] = field(default_factory=dict)
    processors: dict[int, Any] = field(default_factory=dict)
    paths: Callable[[], Paths | None] = lambda: None


def way(
    rows: list[int], extra: tuple[Mapping[int, Any], Mapping[int, Any]], table: SamplingTable, *, cuts: bool = False
) -> Way:
    """The fastest way that does everything these rows' lines want. extra: masks and processors by row. cuts: the
    backend's draw can itself drop unlikely tokens."""
    masks, processors = extra
    used, bits = 0, table.bits
    for row in rows:
        used |= bits[row]
    if not (masks or processors or used & (features.CHOICES | features.LOGPROBS)):
        return Way.LARGEST
    if processors or used & (features.CHOICES | features.FILTERS) & ~(PLAIN | CUTS if cuts else PLAIN):
        return Way.GENERAL
    return Way.BACKEND


def take_largest(best: Best) -> tuple[Sampled, Tensor]:
    """The result of `Kernels.greedy` as a choice. Only the ~ marks a bad line: a comparison on the device would cost
    more than the rest of the choice."""
    ids, marked, largest = best
    return Sampled(ids, marked, Pending(largest, largest)), marked


def find_largest(logits: Tensor, kernels: Kernels, words: Words | None) -> Best:
    """The same as Kernels.greedy, over all words; logits [n, V], or those of `words`."""
    return kernels.greedy(logits) if words is None else shards.find_largest(logits, words, kernels)


def choose(
    logits: Tensor, ask: Ask, table: SamplingTable, kernels: Kernels, words: Words | None = None
) -> tuple[Sampled, Tensor]:
    """logits [n, V], or those of `words`; they may be overwritten -> a token per line; also its id, or ~id if it is
    bad."""
    if words is not None:
        if not (ask.masks or ask.processors) and shards.takes(ask.rows, table, words):
            return shards.choose_among_own(logits, ask.rows, ask.places(), table, kernels, words)
        logits = words.group.all_gather(logits)
    found = way(ask.rows, (ask.masks, ask.processors), table, cuts=kernels.chooses)
    if found is Way.LARGEST:
        return take_largest(kernels.greedy(logits))
    places = ask.places()
    if found is Way.BACKEND:
        masks = line_masks(ask.rows, ask.masks) if ask.masks else {}
        quick = choose_quickly(logits, ask.rows, places, masks, table, kernels)
        if quick is not None:
            return quick
    row_ids, positions = places
    lines = Lines(ask.rows, row_ids, positions + 1, ask.tokens, ask.masks, ask.processors, ask.longest(), ask.paths())
    cutting = kernels if kernels.chooses else None
    sampled = sample(logits.float(), lines, table, consume=True, kernels=cutting)
    return sampled, torch.where(sampled.bad, ~sampled.ids, sampled.ids)
