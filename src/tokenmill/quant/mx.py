"""Four bit floats with shared scales: MXFP4 (a power of two per 32) and NVFP4 (a float8 per 16, one float32 in all).

    NAME_blocks [E, out, in / 32, 16] and NAME_scales [E, out, in / 32] uint8          experts as gpt-oss ships them
    NAME.weight_packed [out, in / 2] and NAME.weight_scale [out, in / 32] uint8        compressed-tensors, MXFP4
    NAME.weight_packed, NAME.weight_scale [out, in / 16] e4m3, NAME.weight_global_scale [1] (divides)          NVFP4
    NAME.weight [out, in / 2] uint8, NAME.weight_scale e4m3, NAME.weight_scale_2 (multiplies)            ModelOpt NVFP4
A byte holds two neighbours, the lower half first; a uint8 scale s means 2^(s - 127). MXFP4 becomes GGUF blocks, which
backends multiply as they are. Owns: these layouts. Must not know: models, devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.checkpoint.gguf_file import TYPES
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.kernels.grid import FP4
from tokenmill.quant.base import known
from tokenmill.quant.compressed import BESIDE
from tokenmill.quant.gguf_weight import BlockWeight
from tokenmill.quant.table import TableWeight, nibbles

METHOD = "mxfp4"
_TYPE = next(kind for kind in TYPES.values() if kind.name == "MXFP4")
_GROUP, _FINE = 32, 16
_NAN = 255
"""The scale byte that means "not a number"."""
_LARGEST = 252
"""The largest scale byte with which all codes mean numbers of float32: 6 * 2^(252 - 127)."""


def check(config: Mapping[str, Any]) -> None:
    """Accept any quantization_config of this method: nothing in it changes how tensors are read."""


def check_modelopt(config: Mapping[str, Any]) -> None:
    """Refuse an algorithm of ModelOpt that cannot be read here."""
    algorithm = str(config.get("quant_algo", "?")).upper()
    if algorithm not in ("FP8", "NVFP4", "MXFP8"):
        raise ModelError(f"This checkpoint is quantised with 'modelopt' as {shown(algorithm)}, which is not supported.")


def mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None, name: str) -> BlockWeight:
    """codes [out, in / 32, 16] (two neighbours per byte) and scale bytes [out, in / 32] -> a weight."""
    if codes.dtype != torch.uint8 or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ModelError(f"'{name}' must hold uint8, not {codes.dtype} with scales of {scales.dtype}.")
    powers = scales.view(torch.uint8)
    if known(powers) and int(powers.max()) > _LARGEST:
        what = "are not numbers" if bool((powers == _NAN).any()) else "exceed float32's range"
        raise ModelError(f"'{name}' has scales that {what}: the file is damaged.")
    spread = nibbles(codes)  # a GGUF block has columns 0 to 15 in the lower halves, 16 to 31 in the upper ones
    halves = spread[..., :16] | spread[..., 16:] << 4
    raw = torch.cat((powers[..., None], halves), -1).flatten(1)
    return BlockWeight([Blocks(_TYPE, raw.contiguous())], dtype, bias)


_SMALL = 121
"""The exponent of invented scales, so that invented numbers have the usual size."""


def load_stacked(
    ckpt: Checkpoint, name: str, shape: tuple[int, int, int], dtype: torch.dtype, bias: Tensor | None
) -> list[BlockWeight]:
    """The experts [E, out, in] under NAME_blocks and NAME_scales, with their biases [E, out]."""
    count, rows, columns = shape
    if columns % _GROUP:
        raise ModelError(f"'{name}_blocks' cannot hold rows of {columns}: blocks are of {_GROUP}.")
    invented = torch.uint8 if ckpt.shape(f"{name}_blocks") is None else None  # dummy weights need a type
    codes = ckpt.tensor(f"{name}_blocks", (count, rows, columns // _GROUP, _GROUP // 2), invented)
    if invented is None:
        scales = ckpt.tensor(f"{name}_scales", (count, rows, columns // _GROUP))
    else:
        scales = codes.new_full((count, rows, columns // _GROUP), _SMALL)
    return [
        mxfp4(codes[e], scales[e], dtype, None if bias is None else bias[e], f"{name}_blocks") for e in range(count)
    ]


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold four bit floats under `name`?"""
    for part, beside in (("weight_packed", "weight_scale"), ("weight", "weight_scale_2")):
        full = f"{name}.{part}"
        if ckpt.has(full) and ckpt.has(f"{name}.{beside}") and ckpt.shape(full) is not None:
            return ckpt.tensor(full).dtype == torch.uint8
    return False


def load(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
) -> BlockWeight | TableWeight:
    """Read the weight [out, in] under `name`."""
    rows, columns = shape
    part = "weight_packed" if ckpt.has(f"{name}.weight_packed") else "weight"
    raw = ckpt.tensor(f"{name}.{part}", (rows, columns // 2))
    scales = ckpt.tensor(f"{name}.weight_scale")
    for beside in BESIDE:
        if ckpt.has(f"{name}.{beside}"):
            ckpt.tensor(f"{name}.{beside}")  # about activations; read so that no tensor counts as unused
    if raw.dtype != torch.uint8 or columns % 2:
        raise ModelError(f"'{name}.{part}' must hold uint8 for an even number of columns, not {raw.dtype}.")
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        if columns % _GROUP or tuple(scales.shape) != (rows, columns // _GROUP):
            raise ModelError(f"'{name}.weight_scale' has shape {list(scales.shape)}, which does not fit {list(shape)}.")
        return mxfp4(raw.view(rows, columns // _GROUP, _GROUP // 2), scales, dtype, bias, f"{name}.{part}")
    if columns % _FINE or tuple(scales.shape) != (rows, columns // _FINE):
        raise ModelError(f"'{name}.weight_scale' has shape {list(scales.shape)}, which does not fit {list(shape)}.")
    return nvfp4(raw, scales, _whole_scale(ckpt, name), (dtype, bias), f"{name}.weight_scale")


def nvfp4(raw: Tensor, scales: Tensor, whole: float, kind: tuple[torch.dtype, Tensor | None], name: str) -> TableWeight:
    """raw [out, in / 2] (two neighbours per byte), scales [out, in / 16] e4m3 and one for the whole matrix. kind: the
    compute dtype and the bias; name: of the scales."""
    if known(scales):
        largest = float(scales.float().abs().max())
        if not math.isfinite(largest):
            raise ModelError(f"'{name}' has scales that are not numbers: the file is damaged.")
        if largest * whole * max(FP4) > torch.finfo(torch.float32).max:
            raise ModelError(f"'{name}' has scales that exceed float32's range: the file is damaged.")
    factors = torch.full((len(raw),), whole, device=raw.device)
    return TableWeight(nibbles(raw), torch.tensor(FP4, device="cpu"), scales.float(), *kind, "NVFP4", factors)


def positive(found: Tensor, name: str) -> float:
    """The one number of a tensor that must be positive."""
    if not known(found):
        return 1.0
    value = float(found.flatten()[0]) if found.numel() == 1 else 0.0
    if not 0.0 < value < float("inf"):
        raise ModelError(f"'{name}' must be one positive number.")
    return value


def _whole_scale(ckpt: Checkpoint, name: str) -> float:
    """The factor that applies to all scales of a matrix."""
    for part in ("weight_global_scale", "weight_scale_2"):
        if ckpt.has(f"{name}.{part}"):
            value = positive(ckpt.tensor(f"{name}.{part}").float(), f"{name}.{part}")
            return 1.0 / value if part == "weight_global_scale" else value
    raise ModelError(f"'{name}' has four bit floats in groups of {_FINE}, but no scale for the whole matrix.")
