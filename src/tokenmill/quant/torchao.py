"""Weights as torchao's safetensors files hold them. Owns: their layout.

    NAME._weight_qdata, NAME._weight_scale and maybe NAME._weight_zero_point
    float8   qdata [out, in] e4m3; scales [out, 1], [1, 1] or one per 128 x 128
    integers qdata [out, in] int8 of any width, scales and integer zero points [out, groups]: (code - zero) * scale
    int4     qdata [out, in / 2] int8, two neighbours in a byte, -8..7 each, the first one low; scales and zero points
             [groups, out]: code * scale + zero
    MX       qdata [out, in] e4m3, or [out, in / 2] uint8, two 4 bit floats each, the first one low; scales e8m0, one
             per 32 columns
    NVFP4    qdata as MX's 4 bit floats; scales e4m3, one per 16 columns; maybe per_tensor_scale, which multiplies
Scales of the last two may be swizzled: of 128 rows and 4 groups, rows r, r + 32, r + 64 and r + 96 lie side by side in
[32 * out / 128, 16 * groups / 4]. Files say in their metadata which class wrote a tensor; the tensors tell as much.
Pickled files are never read. Must not know: models, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Weight
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.kernels.fp8 import BLOCK, FP8, LARGEST
from tokenmill.quant import mx
from tokenmill.quant.base import check_range, known
from tokenmill.quant.fp8 import Fp8Weight, fine_float8
from tokenmill.quant.half_scales import held, with_zeros
from tokenmill.quant.table import nibbles

METHOD = "torchao"
_BESIDE = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")
"""About activations; they are read so that no tensor counts as unused."""
_OTHERS = ("act_pre_scale", "scale_and_zero")
"""Tensors that other classes write beside their numbers."""
_GROUPS = (256, 128, 64, 32)
_WHOLE = "_weight_per_tensor_scale"
_FINE = {torch.float8_e8m0fnu: 32, FP8: 16}
"""Types of scales that MX and NVFP4 have, and how many columns share one."""
_LARGEST_ZERO = 1 << 14
"""No file has larger zero points: codes have at most 8 bits."""


def check(config: Mapping[str, Any]) -> None:
    """Accept any quantization_config of this method: nothing in it changes how tensors are read."""


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`?"""
    full = f"{name}._weight_qdata"
    return ckpt.has(full) and ckpt.shape(full) is not None


def load(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Weight:
    """Read the weight [out, in] under `name`."""
    rows, columns = shape
    for part in _OTHERS:
        if ckpt.has(f"{name}._weight_{part}"):
            raise ModelError(f"'{name}' is stored by 'torchao' with {part}, which is not supported.")
    for part in _BESIDE:
        if ckpt.has(f"{name}._weight_{part}"):
            ckpt.tensor(f"{name}._weight_{part}")
    data, scale = ckpt.tensor(f"{name}._weight_qdata"), ckpt.tensor(f"{name}._weight_scale")
    zero = ckpt.tensor(f"{name}._weight_zero_point") if ckpt.has(f"{name}._weight_zero_point") else None
    if not scale.is_floating_point() or scale.ndim != 2:
        raise ModelError(f"'{name}._weight_scale' has shape {list(scale.shape)} of {scale.dtype}: not supported.")
    if zero is None and scale.dtype in _FINE and (data.dtype == torch.uint8 or scale.dtype != FP8):
        return _fine(ckpt, data, scale, shape, (dtype, bias), name)
    if data.dtype == torch.int8 and zero is not None and tuple(data.shape) == (rows, columns // 2) and columns % 2 == 0:
        return _pairs(data, scale, zero, shape, (dtype, bias), name)
    if tuple(data.shape) != (rows, columns) or data.dtype not in (torch.int8, FP8):
        raise ModelError(
            f"'{name}._weight_qdata' has shape {list(data.shape)} of {data.dtype}, which does not fit {list(shape)}."
        )
    if data.dtype == FP8:
        if zero is not None:
            raise ModelError(f"'{name}._weight_zero_point' lies beside float8 numbers, which have none.")
        return _float8(data, scale, shape, (dtype, bias), name)
    signed = (torch.int8, torch.int16, torch.int32, torch.int64)
    if zero is not None and (zero.dtype not in signed or zero.shape != scale.shape):
        raise ModelError(
            f"'{name}._weight_zero_point' has shape {list(zero.shape)} of {zero.dtype}, which does not fit."
        )
    if zero is not None and known(zero) and int(zero.long().abs().max()) > _LARGEST_ZERO:
        raise ModelError(f"'{name}._weight_zero_point' has zero points beyond {_LARGEST_ZERO}.")
    zero = None if zero is None or (known(zero) and not bool(zero.any())) else zero.to(torch.int16)
    bits = _bits(data, zero) if known(data) else 8
    return _grid(data, scale, zero, bits, (dtype, bias), name)


def _float8(
    data: Tensor, scale: Tensor, shape: tuple[int, int], kind: tuple[torch.dtype, Tensor | None], name: str
) -> Fp8Weight:
    blocks = tuple(-(-size // BLOCK) for size in shape)
    check_range(LARGEST, scale.float(), f"{name}._weight_scale")
    if scale.numel() == 1:
        return Fp8Weight(data, scale.float().expand(shape[0], 1), *kind)
    if tuple(scale.shape) == (shape[0], 1):
        return Fp8Weight(data, scale.float(), *kind)
    if tuple(scale.shape) == blocks:
        return Fp8Weight(data, scale.float(), *kind, blocks=True)
    raise ModelError(f"'{name}._weight_scale' has shape {list(scale.shape)}, which does not fit {list(shape)}.")


def _fine(
    ckpt: Checkpoint,
    data: Tensor,
    scale: Tensor,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    name: str,
) -> Weight:
    """MX and NVFP4."""
    rows, columns = shape
    group, full = _FINE[scale.dtype], f"{name}._weight_scale"
    wanted = (rows, columns) if data.dtype == FP8 else (rows, columns // 2)
    if columns % group or tuple(data.shape) != wanted or data.dtype not in (torch.uint8, FP8):
        raise ModelError(
            f"'{name}._weight_qdata' has shape {list(data.shape)} of {data.dtype}, which does not fit {list(shape)}."
        )
    scale = _in_rows(scale, rows, columns // group, full)
    if scale.dtype == FP8:
        whole = _whole_scale(ckpt, name)
        return mx.nvfp4(data, scale, whole, kind, full)
    if data.dtype == FP8:
        return fine_float8(data, scale, kind, full)
    return mx.mxfp4(data.view(rows, -1, group // 2), scale, *kind, f"{name}._weight_qdata")


def _in_rows(scale: Tensor, rows: int, groups: int, name: str) -> Tensor:
    """scale [rows, groups], whether it is swizzled or not."""
    if tuple(scale.shape) == (rows, groups):
        return scale.contiguous()
    tall, wide = -(-rows // 128), -(-groups // 4)
    if tuple(scale.shape) != (32 * tall, 16 * wide):
        raise ModelError(f"'{name}' has shape {list(scale.shape)}, which does not fit {rows} rows of {groups} groups.")
    lines = scale.contiguous().view(torch.uint8).view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return lines.reshape(128 * tall, 4 * wide)[:rows, :groups].contiguous().view(scale.dtype)


def _whole_scale(ckpt: Checkpoint, name: str) -> float:
    """The factor of all scales of an NVFP4 matrix."""
    if not ckpt.has(f"{name}.{_WHOLE}"):
        return 1.0
    found = ckpt.tensor(f"{name}.{_WHOLE}").float()
    return mx.positive(found, f"{name}.{_WHOLE}")


def _bits(codes: Tensor, zero: Tensor | None) -> int:
    """The fewest bits that hold these codes and zero points."""
    least, most = (int(t) for t in codes.aminmax())
    if zero is not None:
        least, most = min(least, int(zero.min())), max(most, int(zero.max()))
    return min(8, max(2, max(-least - 1, most).bit_length() + 1))


def _pairs(
    data: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    name: str,
) -> Weight:
    """Four bit codes, two per byte. Scales and zeros lie [groups, out]."""
    if scale.shape[1] != shape[0] or zero.shape != scale.shape or not zero.is_floating_point():
        raise ModelError(
            f"'{name}' has scales {list(scale.shape)} and zero points {list(zero.shape)} of {zero.dtype}, which do not "
            f"fit {list(shape)}."
        )
    codes = nibbles(data.view(torch.uint8)).to(torch.int8)
    codes = torch.where(codes > 7, codes - 16, codes)
    if codes.shape[1] % scale.shape[0]:
        raise _uneven(name, scale)
    codes, steps, points = with_zeros(codes, scale.float().T, zero.float().T)
    return _grid(codes, steps, None if known(points) and not bool(points.any()) else points, 4, kind, name)


def _uneven(name: str, scale: Tensor) -> ModelError:
    return ModelError(f"'{name}._weight_scale' has shape {list(scale.shape)}: groups must divide a row evenly.")


def _grid(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
    kind: tuple[torch.dtype, Tensor | None],
    name: str,
) -> Weight:
    """scale, zero: [out, groups], or one number for all."""
    rows, columns = codes.shape
    if scale.numel() == 1:
        scale, zero = scale.expand(rows, 1), None if zero is None else zero.expand(rows, 1)
    count = scale.shape[1]
    if scale.shape[0] != rows or not count or columns % count:
        raise _uneven(name, scale)
    group = columns // count
    size = next((g for g in _GROUPS if group % g == 0), group)
    scale = scale.repeat_interleave(group // size, 1)
    zeros = None if zero is None else zero.repeat_interleave(group // size, 1).contiguous()
    return held(codes, scale, bits=bits, group=size, kind=kind, what=f"{name}._weight_scale", zeros=zeros)
