"""Choosing tokens natively. Owns: passing the arguments of `Kernels.choose` to the native call. Must not know:
parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import Draws


def choose(
    logits: Tensor, kind: int, words: Tensor | None, masks: Tensor | None, draws: Draws | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """See Kernels.choose. None: two draws of a line are nearly equal, and the exact logarithms have to decide."""
    rows, width = logits.shape
    ids, marked = torch.empty((2, rows), dtype=torch.int64)
    largest = torch.empty(rows, dtype=torch.float32)
    given = (
        0 if words is None else words.data_ptr(),
        0 if masks is None else masks.data_ptr(),
        0 if masks is None else masks.shape[0],
        0 if masks is None else masks.shape[1],
    )
    drawn: list[int] = []
    if draws is not None:
        by_row = draws.streams, draws.num_prompt, draws.inverse_temperature
        drawn = [t.data_ptr() for t in (draws.row_ids, draws.positions, *by_row)]
        drawn += [draws.streams.shape[0], draws.streams.stride(0), draws.inverse_temperature.stride(0)]
    out = ids.data_ptr(), marked.data_ptr(), largest.data_ptr()
    certain = _native.choose_tokens(logits.data_ptr(), rows, width, logits.stride(0), kind, given, drawn, out)
    return (ids, marked, largest) if certain else None


def greedy(logits: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """As Kernels.greedy."""
    rows, width = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    marked = torch.empty_like(ids)
    largest = torch.empty(rows, dtype=torch.float32)
    _native.greedy(
        logits.data_ptr(), rows, width, logits.stride(0), kind, ids.data_ptr(), marked.data_ptr(), largest.data_ptr()
    )
    return ids, marked, largest
