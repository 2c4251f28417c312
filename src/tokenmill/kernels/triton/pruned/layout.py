"""Matrices in which at least two of every four numbers are zero (2:4). Owns: their layout in memory, and packing.

    stored  [N, K / 2], the two numbers of each four that are kept, in order; where cuSPARSELt multiplies them, its own
            form [N, K / 2 + more]: the same numbers first, row by row, then where they belong in its own way
    places  where they belong, four bits for each four columns: the column of the first number, then that of the second.
            int32 [N / 16, blocks, words], in the order in which sparse_cores.py takes them, a word for each thread: 32
            for a block of 64 columns of 16 bits, 64 for one of 128 columns of 8 (`_found`)
Must not know: kernels, layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.triton.common import INTERPRETED, capability
from tokenmill.kernels.triton.pruned.library import compress, is_usable
from tokenmill.kernels.triton.quantised.narrow import pack8

ROWS, COLUMNS = 32, 128
"""Both sizes of a matrix are multiples of these."""
TILE = 16
"""Rows that are multiplied together."""
_TRIED = 8
"""Rows that are looked at first: nearly every matrix has four neighbours there that are not zero."""
_PIECE = 4096
"""Rows that are packed at a time."""
NUMBERS = {"dense": "numbers", "fp8": "codes"}
"""Kinds of stored matrices that are held so, and the part that has their numbers."""


@dataclass(frozen=True, slots=True)
class PrunedMatrix:
    """A packed matrix. scales: float32 [N], of float8; else None."""

    stored: Tensor
    places: Tensor
    scales: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.stored.dtype

    @property
    def in_library(self) -> bool:
        """Does cuSPARSELt take it?"""
        return self.stored.shape[1] > self.shape[1] // 2

    @property
    def kept(self) -> Tensor:
        """The numbers [N, K / 2] that may not be zero."""
        rows, columns = self.shape
        return self.stored.view(-1)[: rows * columns // 2].view(rows, columns // 2)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Dense rows [n, K]."""
        ids = ids.to(self.places.device)
        found = self._numbers(ids)
        return found.to(dtype) if self.scales is None else (found.float() * self.scales[ids, None]).to(dtype)

    def _numbers(self, ids: Tensor) -> Tensor:
        """Rows with their zeros, as they are stored."""
        small = self.stored.element_size() == 1
        bits = torch.uint8 if small else self.dtype  # not every device gathers float8
        kept = self.kept.view(bits)[ids].view(len(ids), -1, 2)
        four = torch.arange(self.shape[1] // 4, device=ids.device)
        word, shift = _found(ids[:, None] % TILE, four, small=small)
        code = (self.places[ids // TILE].flatten(1).gather(1, word) >> shift) & 15
        code = code.flatten(1).long()
        found = torch.zeros(*code.shape, 4, dtype=bits, device=kept.device)
        found.scatter_(2, torch.stack((code & 3, code >> 2), dim=2), kept)
        return found.flatten(1).view(self.dtype)

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]]:
        """Those of the matrix with its zeros: experts are stacked so."""
        whole = self._numbers(torch.arange(self.shape[0], device=self.places.device))
        if self.scales is None:
            return "dense", {"table": whole, "bias": self.bias}
        return pack8(whole, self.scales[:, None], self.bias).pieces()

    def bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(t.nbytes for t in (self.kept, self.places, self.scales, self.bias) if t is not None)


def _found(row: Tensor, four: Tensor, *, small: bool) -> tuple[Tensor, Tensor]:
    """The word that says where a four of a row of a tile belongs, counted from the tile's first one, and by how much it
    is shifted there. A thread reads 16 bytes of a row, which are neighbours, so that what is next to each other in
    memory is not what is next to each other within a multiplication. (Computed, because a recorded step that reads rows
    may copy no table to the device.)"""
    fours = 8 if small else 4  # of a thread
    part = four % fours
    word = four // (4 * fours) * (8 * fours) + part // 4 * 32 + row % 8 * 4 + part % 4
    return word, 4 * (four % (4 * fours) // fours + row // 8 * 4)


def two_of_four(mask: Tensor) -> bool:
    """Are at most two of every four entries [N, K] true?"""
    some = mask[:: max(1, len(mask) // _TRIED)]
    return all(bool((part.unflatten(1, (-1, 4)).sum(2) <= 2).all()) for part in (some, mask))


def pack_pruned(matrix: StoredMatrix) -> PrunedMatrix | None:
    """The matrix, if it has such zeros and a kernel takes its type and size; else None."""
    name = NUMBERS.get(matrix.kind)
    if name is None or matrix.shape[0] % ROWS or matrix.shape[1] % COLUMNS:
        return None
    numbers, scales = matrix.part(name), matrix.find("scales")
    small = numbers.element_size() == 1
    types = (torch.float8_e4m3fn,) if matrix.kind == "fp8" else (torch.bfloat16, torch.float16)
    if matrix.dtype not in (None, numbers.dtype):  # it would be given its zeros again for every product
        return None
    if numbers.dtype not in types or (scales is not None and scales.shape[1] > 1) or not _has_cores(numbers):
        return None
    bits = numbers.view(torch.uint8) if small else numbers
    mask = (bits & 127) != 0 if small else numbers != 0
    if not two_of_four(mask):
        return None
    pieces = [_packed(*piece) for piece in zip(bits.split(_PIECE), mask.split(_PIECE), strict=True)]
    kept, code = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    kept = kept.view(numbers.dtype)
    places = _words(code, small=small)
    if is_usable(kept.dtype):
        kept = compress(kept, code, matrix.shape)
    scales = None if scales is None else scales.float().flatten().contiguous()
    return PrunedMatrix(kept, places, scales, matrix.bias, matrix.shape)


def _has_cores(numbers: Tensor) -> bool:
    """Does the device that holds them multiply them without zeros? (A trace without numbers cannot tell.)"""
    if numbers.is_meta or not (numbers.is_cuda or INTERPRETED):
        return False
    return INTERPRETED or capability() >= ((8, 9) if numbers.element_size() == 1 else (8, 0))


def _packed(numbers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """numbers [n, K] and which are kept -> the two of each four [n, K / 2], and where they belong, uint8 [n, K / 4]."""
    column = torch.arange(4, device=mask.device, dtype=torch.int16)
    order = torch.where(mask.unflatten(1, (-1, 4)), column, column + 4).sort(2).values[..., :2]  # zeros fill up
    place = (order & 3).sort(2).values.long()
    kept = numbers.unflatten(1, (-1, 4)).gather(2, place).flatten(1)
    return kept, (place[..., 0] | (place[..., 1] << 2)).to(torch.uint8)


def _words(code: Tensor, *, small: bool) -> Tensor:
    """Places [N, K / 4] as `places` has them."""
    fours, words = code.shape[1], 64 if small else 32
    row, four = torch.arange(TILE, device=code.device)[:, None], torch.arange(fours, device=code.device)
    at, shift = (part.flatten() for part in _found(row, four, small=small))
    pieces = []
    for piece in code.split(_PIECE):
        tiles = piece.view(-1, TILE * fours).long() << shift
        word = torch.zeros(len(tiles), TILE * fours // 8, dtype=torch.int64, device=code.device)
        word.scatter_add_(1, at.expand_as(tiles), tiles)
        pieces.append(torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32))
    return torch.cat(pieces).view(len(code) // TILE, -1, words)
