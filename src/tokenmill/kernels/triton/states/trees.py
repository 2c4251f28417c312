"""Behind the verification of draft trees. Owns: the walk down each row's tree, and moving keys and values of the path
that stands, in one launch each.

Must not know: what a tree's nodes see (attention/paging.py), what rows belong to, sampling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.forward import KVView
from tokenmill.kernels.stored_kv import page_parts
from tokenmill.kernels.triton.common import pow2

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_BLOCK = 256


@triton.jit(do_not_specialize=["count", "most", "parents_stride"])
def _accept_tree_kernel(
    grant_ptr, parent_ptr, marked_ptr, tokens_ptr, length_ptr, computed_ptr, path_ptr, kept_ptr,
    count, most, parents_stride, tokens_stride, NODES: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row, first = tl.load(grant_ptr + i), tl.load(grant_ptr + count + i)
    drafts, longest = tl.load(grant_ptr + 2 * count + i), tl.load(grant_ptr + 3 * count + i)
    known = tl.load(length_ptr + row)
    node, step = tl.arange(0, NODES), tl.arange(0, DEEP)
    words, samples = tokens_ptr + row * tokens_stride + known, marked_ptr + first
    real = node < drafts
    word = tl.load(words + node, mask=real, other=0).to(tl.int64)
    above = tl.load(parent_ptr + i * parents_stride + node, mask=real, other=-1)
    at = tl.zeros((), dtype=tl.int64)  # the line that the walk has come to
    right = tl.zeros((), dtype=tl.int64)
    sample = tl.load(samples)
    path = tl.zeros((DEEP,), dtype=tl.int64)
    said = tl.where(step == 0, sample, 0)
    for depth in range(0, most):
        found = tl.min(tl.where((above == at) & (word == sample) & real, node, NODES), axis=0).to(tl.int64)
        goes = (found < NODES) & (depth < longest) & (right == depth)
        at = tl.where(goes, found + 1, at)
        right += goes.to(tl.int64)
        sample = tl.load(samples + at)
        path = tl.where(step == depth + 1, at, path)
        said = tl.where(step == depth + 1, sample, said)
    last = tl.sum(tl.where(step == right, said, 0), axis=0)
    kept = right + tl.where((last >= 0) | (right == 0), 1, 0)
    tl.debug_barrier()  # drafts are read: what is known now lies where they lay
    tl.store(words + step, tl.where(said < 0, -1 - said, said).to(tl.int32), mask=step <= right)
    tl.store(path_ptr + i * (most + 1) + step, path, mask=step <= most)
    tl.store(length_ptr + row, known + kept)
    tl.store(computed_ptr + row, known + kept - 1)
    tl.store(kept_ptr + i, kept)


def accept_trees_(
    grants: Tensor, most: int, parents: Tensor, marked: Tensor, tokens: Tensor, length: Tensor, computed: Tensor
) -> tuple[Tensor, Tensor]:
    """See kernels/accept.py."""
    count = grants.shape[1]
    path = torch.empty((count, most + 1), dtype=torch.int64, device=grants.device)
    kept = torch.empty(count, dtype=torch.int64, device=grants.device)
    nodes, deep = max(64, pow2(parents.shape[1])), max(32, pow2(most + 1))  # one kernel for all that is usual
    _accept_tree_kernel[(count,)](
        grants, parents, marked, tokens, length, computed, path, kept,
        count, most, parents.stride(0), tokens.stride(0), NODES=nodes, DEEP=deep, num_warps=1,
    )  # fmt: skip
    return path, kept


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of some layers' pages, to be moved together. table [n, 6]: of each its address, words in all, words
    of a head, and how many words blocks, heads and rows are apart; size: positions of a block; word: its bytes."""

    layers: tuple[KVView, ...]
    table: Tensor
    largest: int
    size: int
    word: int

    def are_of(self, kv: list[KVView]) -> bool:
        """Is it these layers' pages that they were made of?"""
        return len(kv) == len(self.layers) and kv[0] is self.layers[0]


def parts_of(kv: list[KVView]) -> Parts:
    """What `move_kv_` must know of these layers; it is made once."""
    tensors = [part for view in kv for part in page_parts(view)]
    found = [_bytes_of(part) for part in tensors]
    word = next(n for n in _WORDS if not any(value % n for values in found for value in values))
    table = [[values[0], *(value // word for value in values[1:])] for values in found]
    sent = torch.tensor(table, dtype=torch.int64).to(tensors[0].device)
    return Parts(tuple(kv), sent, max(values[1] for values in table), tensors[0].shape[2], word)


def _bytes_of(part: Tensor) -> Iterable[int]:
    """part [blocks, heads, positions, D]: its line of the table, in bytes."""
    heads, wide = part.shape[1], part.shape[3] * part.element_size()
    return part.data_ptr(), heads * wide, wide, *(n * part.element_size() for n in part.stride()[:3])


@triton.jit(do_not_specialize=["width", "row_stride"])
def _move_kernel(
    src_ptr, dst_ptr, part_ptr, width, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * row_stride
    part = part_ptr + tl.program_id(1) * 6
    base = tl.load(part).to(tl.pointer_type(WORD))
    every, wide = tl.load(part + 1), tl.load(part + 2)
    blocks, heads, rows = tl.load(part + 3), tl.load(part + 4), tl.load(part + 5)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    spot = base + word // wide * heads + word % wide
    for k in range(0, width):
        src, dst = tl.load(src_ptr + line + k), tl.load(dst_ptr + line + k)
        if src != dst:
            x = tl.load(spot + src // SIZE * blocks + src % SIZE * rows, mask=word < every)
            tl.store(spot + dst // SIZE * blocks + dst % SIZE * rows, x, mask=word < every)


def move_kv_(parts: Parts, src: Tensor, dst: Tensor) -> None:
    """See ReferenceKernels.move_kv_. A program moves its share of each position of a row in turn."""
    count, width = src.shape
    grid = count, parts.table.shape[0], triton.cdiv(parts.largest, _BLOCK)
    _move_kernel[grid](
        src, dst, parts.table, width, src.stride(0), SIZE=parts.size, BLOCK=_BLOCK, WORD=_WORDS[parts.word],
        num_warps=2,
    )  # fmt: skip
