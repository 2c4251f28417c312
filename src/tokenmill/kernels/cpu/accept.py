"""Verification of drafts in host memory. Owns: the reference's arithmetic in numpy, whose calls cost a third, and
for few rows in plain Python, which costs less still.

Must not know: where drafts come from, sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FEW = 8
"""Up to so many rows, Python's own integers are faster than numpy's calls."""


def accept_chains_(
    grants: Tensor, most: int, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> Tensor:
    """See kernels/accept.py."""
    if grants.shape[1] <= FEW:
        return _accept_few_(grants, marked, tokens, length, computed)
    row_ids, first, tried = grants.numpy()
    samples, words, lengths = marked.numpy(), tokens.numpy(), length.numpy()
    known, ahead = lengths[row_ids], np.arange(most)
    lines = np.minimum(first[:, None] + ahead, len(samples) - 1)
    places = np.minimum(known[:, None] + ahead, words.shape[1] - 1)
    same = (samples[lines] == words[row_ids[:, None], places]) & (ahead < tried[:, None])
    right = np.logical_and.accumulate(same, axis=1).sum(1)
    last = samples[first + right]
    words[row_ids, known + right] = np.where(last < 0, ~last, last)
    kept = right + ((last >= 0) | (right == 0))
    lengths[row_ids] = known + kept
    computed.numpy()[row_ids] = known + kept - 1
    return torch.from_numpy(kept)


def _accept_few_(grants: Tensor, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> Tensor:
    samples, kept = marked.tolist(), []
    words, lengths, done = tokens.numpy(), length.numpy(), computed.numpy()
    for row, first, tried in zip(*grants.tolist(), strict=True):
        known = int(lengths[row])
        said, right = samples[first : first + tried + 1], 0
        for draft in words[row, known : known + tried].tolist():
            if said[right] != draft:
                break
            right += 1
        last = said[right]
        words[row, known + right] = last if last >= 0 else ~last
        stand = right + (last >= 0 or not right)
        lengths[row], done[row] = known + stand, known + stand - 1
        kept.append(stand)
    return torch.tensor(kept)


def accept_trees_(
    grants: Tensor, most: int, parents: Tensor, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> tuple[Tensor, Tensor]:
    """See kernels/accept.py."""
    row_ids, first, drafts, longest = grants.numpy()
    samples, words, lengths, above = marked.numpy(), tokens.numpy(), length.numpy(), parents.numpy()
    known, each = lengths[row_ids], np.arange(above.shape[1])
    guessed = words[row_ids[:, None], np.minimum(known[:, None] + each, words.shape[1] - 1)]
    guessed = np.where(each < drafts[:, None], guessed, -1)
    path = np.zeros((len(row_ids), most + 1), dtype=np.int64)
    said = np.empty_like(path)
    said[:, 0], right = samples[first], np.zeros_like(first)
    for depth in range(most):  # at: the line that the walk has come to
        at, sample = path[:, depth], said[:, depth]
        same = (above == at[:, None]) & (guessed == sample[:, None]) & (sample >= 0)[:, None]
        goes = same.any(1) & (depth < longest) & (right == depth)
        right += goes
        path[:, depth + 1] = np.where(goes, same.argmax(1) + 1, at)
        said[:, depth + 1] = samples[first + path[:, depth + 1]]
    last = said[np.arange(len(right)), right]
    kept = right + ((last >= 0) | (right == 0))
    ahead = np.minimum(np.arange(most + 1), right[:, None])  # what does not stand: the last again
    new = np.take_along_axis(said, ahead, 1)
    words[row_ids[:, None], known[:, None] + ahead] = np.where(new < 0, ~new, new)
    lengths[row_ids] = known + kept
    computed.numpy()[row_ids] = known + kept - 1
    return torch.from_numpy(path), torch.from_numpy(kept)
