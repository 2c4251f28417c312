"""Lines whose mask leaves few tokens. Owns: finding them, and choosing among those tokens only.

Most masks of a grammar allow a handful of tokens. On a CPU noise is made for those alone; the bits are the ones that
the whole line would have given. Arrays of a few hundred numbers are numpy's: a call of torch costs several times more.
Must not know: other edits, filters, results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenmill.sampling.noise import few_exponentials

Array = npt.NDArray[Any]
MOST_WORDS = 24
"""The most 64-bit words of a mask with an allowed token in them. With more, the whole line is read."""


@dataclass(slots=True)
class FewAllowed:
    """Lines with few allowed tokens: their `numbers` [m]; the ids [k] of all their allowed tokens, ascending within a
    line; the line that each id belongs to [k]; and where each line's ids begin [m]. No line is empty."""

    numbers: list[int]
    ids: Array
    line: Array
    starts: Array


def find_few_allowed(numbers: Sequence[int], masks: Sequence[bytes], size: int) -> FewAllowed | None:
    """The lines of `numbers` whose packed mask, over `size` tokens, allows few tokens but at least one; None: no
    line."""
    used, whole = (size + 7) // 8, (size + 63) // 64 * 8
    data = np.frombuffer(bytearray().join([m[:used].ljust(whole, b"\0") for m in masks]), dtype=np.uint8)
    if size % 8:
        data[used - 1 :: whole] &= (1 << size % 8) - 1
    words = data.view(np.uint64).reshape(len(masks), whole // 8)
    counts = np.count_nonzero(words, axis=1)
    few = np.flatnonzero((counts > 0) & (counts <= MOST_WORDS))
    if not len(few):
        return None
    kept = words[few]
    at = np.flatnonzero(kept)
    found = np.flatnonzero(np.unpackbits(kept.reshape(-1)[at].view(np.uint8), bitorder="little").view(np.bool_))
    line, place = np.divmod(at, whole // 8)
    line, ids = line[found >> 6], (place[found >> 6] << 6) + (found & 63)
    return FewAllowed([numbers[i] for i in few.tolist()], ids, line, np.searchsorted(line, np.arange(len(few))))


def choose_allowed_(
    logits: Tensor,
    allowed: FewAllowed,
    inverse_temperature: Tensor,
    noise: tuple[Tensor, Tensor, list[bool]] | None,
    out: tuple[Tensor, Tensor],
) -> None:
    """logits [n, V] -> for the lines of `allowed` the largest allowed logits and the chosen ids, written into out [n],
    [n].

    inverse_temperature [m]. noise: the lines' keys [n], the tokens' bases [V], and which lines are sampled [m]; other
    lines take the most likely token."""
    line, ids, starts, at = allowed.line, allowed.ids, allowed.starts, np.array(allowed.numbers)
    number = at[line]
    x = logits.numpy()[number, ids]
    largest = np.maximum.reduceat(x, starts)
    with np.errstate(invalid="ignore"):  # a line of infinities is reported as bad; its result is not used
        scores = x - largest[line]
        scores *= inverse_temperature.numpy()[line]
        if noise is not None:
            keys, bases, sampled = noise
            added = few_exponentials(keys.numpy()[number], bases.numpy()[ids])
            scores -= added if all(sampled) else added * np.array(sampled)[line]
    best = np.maximum.reduceat(scores, starts)[line]
    places = np.where(scores == best, np.arange(len(ids)), len(ids) - 1)
    out[0].numpy()[at] = largest
    out[1].numpy()[at] = ids[np.minimum.reduceat(places, starts)]
