"""Ranks on CPUs of one machine. Owns: the memory that they exchange through, and what layers ask of it.

The exchange itself is native (csrc/group.cpp), so that recorded steps hold it. Must not know: layers, processes.
"""

from __future__ import annotations

import importlib
import mmap
import os
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmill.parallel.group import AtOnce

_native: Any = importlib.import_module("tokenmill._native")
SLOT_BYTES = 4 << 20
"""How much a rank may send at one time. Longer rows are refused; more rows go one after the other."""
CLOSED_AT = 8
"""The place in the group's memory of the flag by which its owner lets waiting ranks give up (csrc/group.cpp: Head)."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Memory:
    """Anonymous memory for a group of this size. The process that starts the ranks makes it; they inherit `file`."""

    def __init__(self, size: int) -> None:
        self.bytes = 64 * (size + 1) + 2 * size * SLOT_BYTES
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("tokenmill-group")
        else:
            with tempfile.TemporaryFile() as made:
                self.file = os.dup(made.fileno())
        os.ftruncate(self.file, self.bytes)
        self.map: mmap.mmap | None = mmap.mmap(self.file, self.bytes)

    def close(self) -> None:
        """Let ranks that wait for each other give up; the memory is freed when they end."""
        if self.map is not None:
            self.map[CLOSED_AT] = 1
            self.map.close()
            self.map = None
            os.close(self.file)


class SharedGroup(AtOnce):
    """One rank's view of the memory behind `file`."""

    exact = True
    """(Ranks exchange inputs, not sums. Calls are not counted: all give up a failed epoch, wherever they are.)"""

    def __init__(self, file: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.map = mmap.mmap(file, os.fstat(file).st_size)
        self.memory = np.frombuffer(self.map, dtype=np.uint8)
        self.native = _native.SharedGroup(self.memory.ctypes.data, len(self.memory), rank, size)
        self.native.begin(0)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual + the sum in rank order, in float32 and rounded once."""
        kind = _TYPES.get(x.dtype)
        if kind is None:
            first, *others = self.all_gather(x).chunk(self.size, -1)
            total = first.float()
            for part in others:
                total = total + part.float()
            return (total if residual is None else total + residual.float()).to(x.dtype)
        x, out = x.contiguous(), torch.empty_like(x)
        residual = None if residual is None else residual.to(x.dtype).contiguous()
        beside = 0 if residual is None else residual.data_ptr()
        self.native.reduce(x.data_ptr(), beside, out.data_ptr(), x.numel(), kind)
        return out

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x side by side."""
        if dim not in (-1, x.ndim - 1):
            return self.all_gather(x.movedim(dim, -1)).movedim(-1, dim)
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        out = torch.empty((*x.shape[:-1], width * self.size), dtype=x.dtype)
        self.native.gather(x.data_ptr(), out.data_ptr(), rows, width * x.element_size())
        return out

    def agree(self, values: list[int]) -> list[int]:
        """The least value of each number."""
        said = self.all_gather(torch.tensor(values, dtype=torch.int64)[:, None])
        return [int(least) for least in said.amin(-1)]

    def begin(self, epoch: int) -> None:
        """Count calls from here, unless this epoch has already begun."""
        self.native.begin(epoch)

    def fail(self) -> None:
        """Let ranks that wait for this one give up."""
        self.native.fail()
