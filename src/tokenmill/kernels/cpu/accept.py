"""Verification of drafts in host memory. Owns: the reference's arithmetic in numpy, whose calls cost a third.

Must not know: where drafts come from, sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def accept_(grants: Tensor, most: int, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> Tensor:
    """See ReferenceKernels.accept_."""
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
