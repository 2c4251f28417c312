"""Verification of drafts in plain torch: the specification. Owns: which drafts stand, and where rows are afterwards.

Nothing here waits for a device. Must not know: where drafts come from, sampling, what computes the samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_chains_(
    grants: Tensor, most: int, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> Tensor:
    """See ReferenceKernels.accept_; -> how many samples stand."""
    row_ids, first, tried = grants
    known = length[row_ids]
    ahead = torch.arange(most, device=marked.device)
    lines = (first[:, None] + ahead).clamp_(max=marked.shape[0] - 1)
    places = (known[:, None] + ahead).clamp_(max=tokens.shape[1] - 1)
    same = (marked[lines] == tokens[row_ids[:, None], places]) & (ahead < tried[:, None])
    right = same.long().cumprod(1).sum(1)
    last = marked[first + right]
    tokens[row_ids, known + right] = torch.where(last < 0, ~last, last).to(torch.int32)
    kept = right + ((last >= 0) | (right == 0))
    length[row_ids] = known + kept
    computed[row_ids] = known + kept - 1
    return kept


def accept_trees_(
    grants: Tensor, most: int, parents: Tensor, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> tuple[Tensor, Tensor]:
    """The same down trees; -> the lines of the samples that may stand, and how many do."""
    row_ids, first, drafts, longest = grants
    known, device = length[row_ids], marked.device
    each = torch.arange(parents.shape[1], device=device)
    real = each < drafts[:, None]
    words = tokens[row_ids[:, None], (known[:, None] + each).clamp_(max=tokens.shape[1] - 1)]
    at, right = torch.zeros_like(first), torch.zeros_like(first)
    path, said = [at], [marked[first]]
    for depth in range(most):  # at: the line that the walk has come to
        same = real & (parents == at[:, None]) & (words == said[-1][:, None])
        goes = same.any(1) & (depth < longest) & (right == depth)
        at = torch.where(goes, same.long().argmax(1) + 1, at)
        right = right + goes
        path.append(at)
        said.append(marked[first + at])
    found, samples = torch.stack(path, 1), torch.stack(said, 1)
    last = samples.gather(1, right[:, None])[:, 0]
    kept = right + ((last >= 0) | (right == 0))
    ahead = torch.arange(samples.shape[1], device=device).minimum(right[:, None])  # what does not stand: the last again
    new = samples.gather(1, ahead)
    tokens[row_ids[:, None], known[:, None] + ahead] = torch.where(new < 0, ~new, new).to(torch.int32)
    length[row_ids] = known + kept
    computed[row_ids] = known + kept - 1
    return found, kept
