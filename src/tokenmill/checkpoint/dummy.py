"""Weights without a file, for tests, benchmarks and planning. Owns: inventing a tensor from its name, shape and dtype.
Must not know: models, layouts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.core.errors import ModelError

# Prime, so that no row length divides it: otherwise rows of the repeated block would be equal.
_BLOCK = 1_048_573
_SPREAD = 0.02
_SCALE = 2.0**-10
_NORM = re.compile(r"(?:^|\.)(?:[^.]*norm[^.]*|ln_?[^.]*)\.weight$", re.IGNORECASE)
_BIAS = re.compile(r"(?:^|[._])bias$")
_SCALES = re.compile(r"scales?(?:_inv)?$")


class DummyCheckpoint(WholeTensors):
    """A checkpoint in which every tensor exists. Weights are ~ N(0, 0.02), norms are one, biases are zero. The same
    name, seed, shape and dtype give the same values on every device.

    All weights are windows of one random block, repeated. So filling a tensor costs one copy, not one random number per
    weight."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._device = torch.device(device)
        self._blocks: dict[torch.dtype, Tensor] = {}

    def names(self) -> Iterable[str]:
        """No names, because every name exists."""
        return ()

    def has(self, name: str) -> bool:
        """True for every name."""
        return True

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: a tensor has whatever shape is asked for."""
        return None

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """An invented tensor. It needs a shape; dtype defaults to float32."""
        if shape is None:
            raise ModelError(f"dummy weights need the shape of {name!r}; this loader asks without one")
        dtype = dtype or torch.float32
        if dtype.is_floating_point and (constant := _constant(name)) is not None:
            # fp8 types cannot be filled directly.
            return torch.full(shape, constant, device=self._device).to(dtype)
        return self._window(name, shape, dtype)

    def close(self) -> None:
        """Free the random blocks."""
        self._blocks.clear()

    def _window(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        first = int.from_bytes(digest, "little") % _BLOCK
        block = self._block(dtype)[first : first + _BLOCK]
        count = prod(shape)
        out = torch.empty(count, dtype=dtype, device=self._device)
        # Some devices cannot copy these types element by element, so they are copied as integers of the same size.
        bits = _BITS[dtype.itemsize]
        source, target = block.view(bits), out.view(bits)
        whole = count // _BLOCK
        target[: whole * _BLOCK].view(whole, _BLOCK).copy_(source.expand(whole, _BLOCK))
        target[whole * _BLOCK :].copy_(source[: count - whole * _BLOCK])
        return out.view(shape)

    def _block(self, dtype: torch.dtype) -> Tensor:
        """The random block of a dtype, twice in a row, so that every window into it is contiguous."""
        if dtype not in self._blocks:
            random = torch.Generator().manual_seed(self._seed)
            if dtype.is_floating_point:
                block = torch.randn(_BLOCK, generator=random).mul_(_SPREAD).to(dtype)
            elif dtype is torch.bool:
                block = torch.randint(0, 2, (_BLOCK,), generator=random).bool()
            else:
                block = torch.randint(0, 256, (_BLOCK * dtype.itemsize,), generator=random, dtype=torch.uint8).view(
                    dtype
                )
            self._blocks[dtype] = block.repeat(2).to(self._device)
        return self._blocks[dtype]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _constant(name: str) -> float | None:
    if _NORM.search(name):
        return 1.0
    if _BIAS.search(name):
        return 0.0
    return _SCALE if _SCALES.search(name) else None
