"""Weights in float8 (e4m3) with float32 scales. Owns: the format, as it is stored or rounded to at load.

    weight[n, k] = data[n, k] * scales[n, 0]                  a scale per row
    weight[n, k] = data[n, k] * scales[n // 128, k // 128]    a scale per block (`weight_scale_inv` of DeepSeek)
Scales of activations are never taken from a checkpoint: backends that round activations do so row by row.
Must not know: layers, devices. After settling, only the backend's packed form is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from tokenmill.compute.forward import Kernels, StoredMatrix
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UnevenError, shown
from tokenmill.kernels.fp8 import BLOCK, FP8, LARGEST, round_rows, widen
from tokenmill.quant.at_load import RoundedAtLoad
from tokenmill.quant.base import check_range, known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import Unrounded
from tokenmill.quant.packed import PackedWeight, joined_bias

METHOD = "fp8"
"""`quant_method` of checkpoints in this format. (compressed-tensors has its own.)"""
_SCALES = ("weight_scale_inv", "weight_scale")
_STACKED = "_scale_inv"
"""What the scales of several experts in one tensor are called, behind its name."""
_BESIDE = ("input_scale", "input_scale_ub", "activation_scale", "input_global_scale")
_FINE = 32
"""Columns that share a power of two in MXFP8."""
_BLOCKS = ([BLOCK, BLOCK], [1, _FINE])


class Fp8Weight(PackedWeight):
    """data [out, in] float8, scales [out, 1] or [ceil(out / 128), ceil(in / 128)] float32."""

    def __init__(
        self, data: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None, *, blocks: bool = False
    ) -> None:
        self.data: Tensor | None = data.contiguous()
        self.scales: Tensor | None = scales.float().contiguous()
        self.dtype, self.bias, self.blocks = dtype, bias, blocks
        self.shape = (data.shape[0], data.shape[1])

    def to(self, device: torch.device) -> Self:
        """A copy on another device. The weight must not be settled yet."""
        data, scales = self._parts()
        return self._like(data.to(device), scales.to(device), self.bias)

    def stored(self) -> StoredMatrix:
        """A matrix of kind "fp8" or "fp8-blocks"."""
        data, scales = self._parts()
        parts = ("codes", data), ("scales", scales)
        return StoredMatrix("fp8-blocks" if self.blocks else "fp8", self.shape, parts, self.dense, self.bias)

    def forget(self) -> None:
        """Free the stored numbers: the packed form has them."""
        self.data = self.scales = None

    def join(self, others: list[Self]) -> Self | None:
        """One matrix, if blocks stay whole. If any part has a bias, missing ones count as zeros."""
        every = [self, *others]
        uneven = any(part.shape[0] % BLOCK for part in every[:-1])
        if len({(part.blocks, part.dtype) for part in every}) > 1 or (self.blocks and uneven):
            return None
        parts = [part._parts() for part in every]
        data = torch.cat([d.view(torch.uint8) for d, _ in parts]).view(FP8)
        return self._like(data, torch.cat([s for _, s in parts]), joined_bias(every, data.device))

    def take(self, index: Tensor) -> Any:
        """Rows in the order of index. If that cuts blocks of scales, each row keeps its own scale, or, where it has
        several, its numbers are held unquantised."""
        data, scales = self._parts()
        index = index.to(data.device)
        bias = None if self.bias is None else self.bias[index]
        rows = data.view(torch.uint8)[index].view(FP8)
        if not self.blocks:
            return self._like(rows, scales[index], bias)
        if not known(index):  # for a plan: blocks are taken whole if they may be
            if len(index) % BLOCK:
                return DenseWeight(self.stored_rows(index), bias, self.dtype)
            return self._like(rows, scales[: len(index) // BLOCK], bias)
        heads = index[::BLOCK]
        line = heads.repeat_interleave(BLOCK)[: len(index)] + torch.arange(len(index), device=index.device) % BLOCK
        if not bool((heads % BLOCK).any()) and torch.equal(line, index):
            return self._like(rows, scales[heads // BLOCK], bias)
        if scales.shape[1] == 1:
            return type(self)(rows, scales[index // BLOCK], self.dtype, bias)
        return DenseWeight(self.stored_rows(index), bias, self.dtype)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1), cut between blocks."""
        if parts == 1:
            return self
        start, stop = self.part_range(dim, part, parts)
        data, scales = self._parts()
        if self.blocks and (start % BLOCK or (stop % BLOCK and stop != self.shape[dim])):
            raise UnevenError(f"a matrix of {self.shape[dim]} {('rows', 'columns')[dim]} in blocks of {BLOCK}", parts)
        first, last = start // BLOCK, -(-stop // BLOCK)
        if dim == 0:
            bias = None if self.bias is None else self.bias[start:stop]
            return self._like(data[start:stop], scales[first:last] if self.blocks else scales[start:stop], bias)
        kept = scales[:, first:last] if self.blocks else scales
        return self._like(data[:, start:stop], kept, self.bias if part == 0 else None)

    def stored_rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in]."""
        stored, scales = self._parts()
        data = stored.view(torch.uint8)[ids].view(FP8)
        if not self.blocks:
            return widen(data, scales[ids]).to(self.dtype)
        scales = scales[ids // BLOCK].repeat_interleave(BLOCK, 1)[:, : self.shape[1]]
        return (data.float() * scales).to(self.dtype)

    def _parts(self) -> tuple[Tensor, Tensor]:
        assert self.data is not None and self.scales is not None, "a settled weight is not taken apart"
        return self.data, self.scales

    def _like(self, data: Tensor, scales: Tensor, bias: Tensor | None) -> Self:
        return type(self)(data, scales, self.dtype, bias, blocks=self.blocks)


class UnroundedFp8(RoundedAtLoad):
    """Rounded row by row."""

    def rounded(self, kernels: Kernels, parts: int) -> Fp8Weight:
        """A row's scale is float32, so every matrix can be rounded."""
        return Fp8Weight(*round_rows(self.dense()), self.dtype, self.bias)


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of this method that cannot be read here."""
    block = config.get("weight_block_size")
    if block is not None and block not in _BLOCKS:
        raise ModelError(
            f"This checkpoint has fp8 weights in blocks of {shown(block)}; [128, 128] and [1, 32] are read."
        )
    if config.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise ModelError(f"This checkpoint has fp8 scales as {shown(config['scale_fmt'])}; float and ue8m0 are read.")
    if str(config.get("fmt") or "e4m3").lower() not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        raise ModelError(f"This checkpoint has fp8 weights of type {shown(config['fmt'])}; only e4m3 is supported.")


def check_bytes(scales: Tensor, name: str, how: Mapping[str, Any]) -> None:
    """Refuse scales that are bytes if config.json does not say that bytes are powers of two: they may be whole
    numbers, or float8 that lost its type."""
    if scales.dtype == torch.uint8 and not _by_powers(how):
        raise ModelError(
            f"'{name}' holds bytes, and config.json does not say that they are powers of two (scale_fmt ue8m0, MXFP8)."
        )


def _by_powers(how: Mapping[str, Any]) -> bool:
    """Does quantization_config say that scales are powers of two?"""
    if how.get("quant_method") == "mxfp8" or how.get("scale_fmt") == "ue8m0":
        return True
    if str(how.get("quant_algo")).upper() == "MXFP8" or how.get("format") == "mxfp8-quantized":
        return True
    groups = how.get("config_groups")
    every = [each for each in groups.values() if isinstance(each, Mapping)] if isinstance(groups, Mapping) else []
    weights = [each.get("weights") for each in every]
    return any(each.get("format") == "mxfp8-quantized" for each in every) or any(
        isinstance(each, Mapping) and str(each.get("scale_dtype")).removeprefix("torch.") in ("uint8", "float8_e8m0fnu")
        for each in weights
    )


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Is the weight under `name` float8, with scales beside it?"""
    found = next((s for s in _SCALES if ckpt.has(f"{name}.{s}")), None)
    if found is None or ckpt.shape(f"{name}.{found}") is None:  # checkpoints that invent tensors have no shapes
        return False
    return ckpt.has(f"{name}.weight") and ckpt.tensor(f"{name}.weight").dtype == FP8


def load(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
) -> Fp8Weight | Unrounded:
    """Read the weight [out, in] under `name`: with one scale, one per row or one per block. With one per 32 columns,
    for which there is no kernel, it is rounded anew to int8 with that many scales."""
    data = ckpt.tensor(f"{name}.weight", shape)
    scales = ckpt.tensor(f"{name}.{next(s for s in _SCALES if ckpt.has(f'{name}.{s}'))}")
    for part in _BESIDE:
        if ckpt.has(f"{name}.{part}"):
            ckpt.tensor(f"{name}.{part}")  # about activations; read so that no tensor counts as unused
    return held(data, scales, (dtype, bias), name)


def stacked(ckpt: Checkpoint, name: str) -> bool:
    """Does one tensor `name` hold several experts in float8, with scales beside it?"""
    scales = f"{name}{_STACKED}"
    return ckpt.has(name) and ckpt.has(scales) and ckpt.shape(scales) is not None and ckpt.tensor(name).dtype == FP8


def load_stacked(
    ckpt: Checkpoint, name: str, shape: tuple[int, int, int], dtype: torch.dtype, how: Mapping[str, Any]
) -> list[Fp8Weight | Unrounded]:
    """The experts [E, out, in] under `name`. Each has scales as a matrix of its own has them."""
    data, scales = ckpt.tensor(name, shape), ckpt.tensor(f"{name}{_STACKED}")
    if ckpt.has(f"{name}_activation_scale"):
        ckpt.tensor(f"{name}_activation_scale")
    if scales.ndim != 3 or len(scales) != shape[0] or not (scales.is_floating_point() or scales.dtype == torch.uint8):
        raise ModelError(f"'{name}{_STACKED}' has shape {list(scales.shape)} of {scales.dtype}, which does not fit "
                         f"{list(shape)}.")  # fmt: skip
    check_bytes(scales, f"{name}{_STACKED}", how)
    return [held(*parts, (dtype, None), name) for parts in zip(data, scales, strict=True)]


def held(data: Tensor, scales: Tensor, kind: tuple[torch.dtype, Tensor | None], name: str) -> Fp8Weight | Unrounded:
    """data [out, in] with scales in one of the forms that `load` reads. kind: the compute dtype and the bias."""
    shape = (data.shape[0], data.shape[1])
    scales = scales.contiguous().view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    check_range(LARGEST, scales.float(), name)
    if tuple(scales.shape) == (shape[0], shape[1] // _FINE) and shape[1] % _FINE == 0 and shape[1] > _FINE:
        return fine_float8(data, scales.float(), kind, name)
    scales = scales.float()
    grid = tuple(-(-size // BLOCK) for size in shape)
    if scales.numel() == 1:
        return Fp8Weight(data, scales.reshape(1, 1).expand(shape[0], 1), *kind)
    if tuple(scales.shape) == grid:
        return Fp8Weight(data, scales, *kind, blocks=True)
    if tuple(scales.shape) in ((shape[0],), (shape[0], 1)):
        return Fp8Weight(data, scales.reshape(-1, 1), *kind)
    raise ModelError(f"'{name}' has float8 weights {list(shape)} with scales {list(scales.shape)}; neither per row "
                     f"nor per block of {BLOCK}.")  # fmt: skip


def fine_float8(data: Tensor, scales: Tensor, kind: tuple[torch.dtype, Tensor | None], name: str) -> Unrounded:
    """data [out, in] with a scale for each 32 columns."""
    check_range(LARGEST, scales.float(), name)
    values = data.float().view(data.shape[0], -1, _FINE) * scales.float()[..., None]
    return Unrounded(values.flatten(1).to(kind[0]), kind[1], 8, _FINE, form="MXFP8")
