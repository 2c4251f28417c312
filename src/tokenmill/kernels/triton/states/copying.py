"""Copies of rows in many tensors. Owns: one launch for all of them.

A kept state of a model with thirty recurrent layers is sixty tensors' rows, which torch would copy in 120 launches.
Must not know: what lies in the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_BLOCK = 4096
"""Words that a program copies."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """Pairs of tensors between which rows are copied. table [n, 3]: the addresses of both, and how many words a
    row has; widest: the most words of a row; word: its bytes."""

    table: Tensor
    widest: int
    word: int


def row_table(pairs: Sequence[tuple[Tensor, Tensor]]) -> RowTable:
    """What `copy_rows_` must know of these pairs; it is made once."""
    sizes = [source[0].nbytes for source, _ in pairs]
    every = [number for source, target in pairs for number in (source.data_ptr(), target.data_ptr())]
    word = next(n for n in _WORDS if not any(number % n for number in (*sizes, *every)))
    lines = [[*every[2 * n : 2 * n + 2], size // word] for n, size in enumerate(sizes)]
    table = torch.tensor(lines, dtype=torch.int64).to(pairs[0][0].device)
    return RowTable(table, max(sizes) // word, word)


@triton.jit(do_not_specialize_on_alignment=["from_ptr", "to_ptr"])
def _copy_kernel(table_ptr, from_ptr, to_ptr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    line = table_ptr + tl.program_id(1) * 3
    words = tl.load(line + 2)
    source, target = tl.load(from_ptr + tl.program_id(2)), tl.load(to_ptr + tl.program_id(2))
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if (source != target) | (tl.load(line) != tl.load(line + 1)):
        old = tl.load(line).to(tl.pointer_type(WORD)) + source * words
        new = tl.load(line + 1).to(tl.pointer_type(WORD)) + target * words
        tl.store(new + word, tl.load(old + word, mask=word < words), mask=word < words)


def copy_rows_(rows: RowTable, froms: Tensor, tos: Tensor) -> None:
    """See ReferenceKernels.copy_rows_."""
    grid = triton.cdiv(rows.widest, _BLOCK), rows.table.shape[0], froms.shape[0]
    _copy_kernel[grid](rows.table, froms, tos, WORD=_WORDS[rows.word], BLOCK=_BLOCK, num_warps=4)
