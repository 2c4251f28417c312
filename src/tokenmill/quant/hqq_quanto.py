"""Integers whose zero points are not integers: HQQ's and quanto's files. Owns: their layouts.

    HQQ      NAME.W_q, NAME.scale, NAME.zero: (code - zero) * scale in groups along rows (axis 1). The matrix
             [numel / group, group] is cut into 8 / bits parts along its rows; a byte (3 bits: ten in an int32)
             holds one row of each part, the first part highest
    quanto   NAME.weight._data int8 or float8 [out, in] with NAME.weight._scale [out, 1]; or NAME.weight._data._data
             uint8, as above but the first part lowest, with _scale and _shift [numel / group, 1]: code * scale - shift
They become integers with fractions as zero points, or plain numbers if their groups straddle rows or are no runs of 32
columns. Must not know: models, devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Weight
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.kernels.fp8 import FP8, LARGEST
from tokenmill.quant.base import check_range, known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.fp8 import Fp8Weight
from tokenmill.quant.half_scales import held, kernels_know, with_zeros

METHODS = ("hqq", "quanto")
_GROUP = 32
FACTS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
"""Other fields that HQQ writes. Those that change the numbers are checked; the others say how they were found."""
_PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_LONGEST = 64
"""The longest name of a packing that is read."""


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of these methods that cannot be read here."""
    for each in _settings(config.get("quant_config")):
        weights = each.get("weight_quant_params", each)
        if isinstance(weights, Mapping) and weights.get("axis", 1) != 1:
            raise ModelError(
                "This checkpoint is quantised with 'hqq' in groups across rows (axis 0), which is not supported."
            )
        if isinstance(weights, Mapping) and weights.get("view_as_float"):
            raise ModelError(
                "This checkpoint is quantised with 'hqq' and stored as floats (view_as_float): not supported."
            )
        for part in ("scale_quant_params", "zero_quant_params"):
            if each.get(part):
                raise ModelError(f"This checkpoint is quantised with 'hqq' and has {part}, which is not supported.")


def _settings(config: object) -> list[Mapping[str, Any]]:
    """The settings for all matrices, or for each by its name."""
    if not isinstance(config, Mapping):
        return []
    if "weight_quant_params" in config or not any(isinstance(each, Mapping) for each in config.values()):
        return [config]
    return [each for each in config.values() if isinstance(each, Mapping)]


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`?"""
    found = next((n for n in (f"{name}.W_q", *_quanto(name)) if ckpt.has(n)), None)
    return found is not None and ckpt.shape(found) is not None


def _quanto(name: str) -> tuple[str, str]:
    return f"{name}.weight._data", f"{name}.weight._data._data"


def load(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Weight:
    """Read the weight [out, in] under `name`."""
    if ckpt.has(f"{name}.W_q"):
        return _hqq(ckpt, name, shape, dtype, bias)
    for part in ("input_scale", "output_scale"):
        if ckpt.has(f"{name}.{part}"):
            ckpt.tensor(f"{name}.{part}")  # about activations; read so that no tensor counts as unused
    whole, parts = _quanto(name)
    if ckpt.has(whole):
        return _rows(ckpt, name, shape, dtype, bias)
    raw = ckpt.tensor(parts)
    scale, shift = (ckpt.tensor(f"{name}.weight.{part}").float() for part in ("_scale", "_shift"))
    groups, lines = scale.numel(), raw.shape[0] if raw.ndim == 2 else 0
    bits = next((b for b in (4, 2) if lines == -(-groups * b // 8)), 0)  # the last part may be shorter
    if not bits or raw.dtype != torch.uint8:
        raise ModelError(
            f"'{parts}' {list(raw.shape)} does not lie in rows of as many codes as share a scale (2 or 4 bits)."
        )
    if groups == 2 and bits == 4 and known(raw) and not bool((raw >> 4).any()):
        bits = 2  # one row of codes is right for both, but no group of 4 bits has only its lowest number
    codes = torch.cat([raw >> bits * i & ((1 << bits) - 1) for i in range(8 // bits)])[:groups]
    if groups != shift.numel():
        raise ModelError(f"'{parts}' and its scales do not fit {list(shape)}.")
    codes, scale, zero = with_zeros(codes, scale.reshape(-1, 1), -shift.reshape(-1, 1))
    return _affine(codes, scale, zero, shape, (dtype, bias), parts, bits)


def _rows(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Weight:
    rows, columns = shape
    data, scale = ckpt.tensor(f"{name}.weight._data", shape), ckpt.tensor(f"{name}.weight._scale", (rows, 1))
    if data.dtype == FP8:
        check_range(LARGEST, scale, f"{name}.weight._scale")
        return Fp8Weight(data, scale, dtype, bias)
    if data.dtype != torch.int8:
        raise ModelError(f"'{name}.weight._data' is stored as {data.dtype}; int8 and float8 (e4m3) can be read.")
    group = next((g for g in (256, 128, 64, 32) if columns % g == 0), columns)
    scales = scale.expand(rows, columns // group)
    return held(data, scales, bits=8, group=group, kind=(dtype, bias), what=f"{name}.weight._scale")


def _hqq(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Weight:
    rows, columns = shape
    fields = {part: ckpt.tensor(f"{name}.{part}") for part in FACTS if ckpt.has(f"{name}.{part}")}
    if odd := [part for part, t in fields.items() if t.is_floating_point() and not t.float().isfinite().all()]:
        raise ModelError(f"'{name}.{odd[0]}' is not a number.")
    numbers = {part: int(found.flatten()[0]) for part, found in fields.items() if found.numel() == 1}
    if numbers.get("axis", 1) != 1 or numbers.get("view_as_float", 0):
        raise ModelError(f"'{name}' is quantised with 'hqq' in groups across rows, or as floats: not supported.")
    if numbers.get("quant_scale", 0) or numbers.get("quant_zero", 0):
        raise ModelError(f"'{name}' is quantised with 'hqq' and so are its scales or zero points: not supported.")
    if "shape" in fields and fields["shape"].tolist() != [rows, columns]:
        raise ModelError(f"'{name}' has shape {fields['shape'].tolist()}, but the config asks for {list(shape)}.")
    scale, zero = ckpt.tensor(f"{name}.scale").float(), ckpt.tensor(f"{name}.zero").float()
    raw = ckpt.tensor(f"{name}.W_q")
    bits = numbers.get("nbits", 3 if raw.dtype == torch.int32 else raw.numel() * 8 // (rows * columns))
    if bits not in (1, 2, 3, 4, 8) or raw.ndim != 2 or raw.dtype != (torch.int32 if bits == 3 else torch.uint8):
        raise ModelError(f"'{name}.W_q' holds {raw.dtype} for {bits} bits, which cannot be read.")
    count = 10 if bits == 3 else 8 // bits
    codes = torch.cat([raw >> bits * (count - 1 - i) & ((1 << bits) - 1) for i in range(count)])
    if scale.ndim == 2 and scale.shape[1] != 1:
        raise ModelError(
            f"'{name}.scale' has shape {list(scale.shape)}: groups across rows (axis 0) are not supported."
        )
    if 0 < (said := numbers.get("group_size", 0)) != rows * columns // max(scale.numel(), 1):
        raise ModelError(f"'{name}.scale' has shape {list(scale.shape)}: '{name}.group_size' says groups of {said}.")
    if "packing" in fields and (packing := _text(fields["packing"])) not in ("", _PACKINGS[bits]):
        raise ModelError(f"'{name}.packing' is {shown(packing)}; {bits} bits are read as {_PACKINGS[bits]}.")
    if zero.shape != scale.shape:
        raise ModelError(f"'{name}.zero' has shape {list(zero.shape)}, its scales {list(scale.shape)}.")
    if bits == 3 and len(codes) - scale.numel() in range(count):  # the last words are padded
        codes = codes[: scale.numel()]
    return _affine(codes, scale, zero, shape, (dtype, bias), f"{name}.W_q", bits)


def _text(stored_text: Tensor) -> str:
    """A text that HQQ writes as bytes."""
    if stored_text.dtype != torch.uint8 or stored_text.numel() > _LONGEST:
        return ""
    return bytes(stored_text.flatten().tolist()).decode("utf-8", "replace")


def _affine(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    what: str,
    bits: int,
) -> Weight:
    """codes [numel / group, group] with as many scales and zero points -> (code - zero) * scale. kind: the compute
    dtype and the bias."""
    rows, columns = shape
    groups = scale.numel()
    if zero.numel() != groups or codes.numel() != rows * columns or not groups or rows * columns % groups:
        raise ModelError(f"'{what}' and its scales do not fit {list(shape)}.")
    group = rows * columns // groups
    if codes.ndim != 2 or codes.shape[1] != group:
        raise ModelError(f"'{what}' does not lie in rows of {group} codes, as many as share a scale.")
    if not kernels_know(group, columns) or group % _GROUP:
        check_range((1 << bits) + float(zero.abs().max()) if known(zero) else 1.0, scale, what)
        values = (codes.float() - zero.reshape(-1, 1)) * scale.reshape(-1, 1)
        return DenseWeight(values.view(shape).to(kind[0]), kind[1])
    bits = max(bits, 2)
    half = 1 << (bits - 1)
    q = (codes.to(torch.int16) - half).to(torch.int8).reshape(rows, columns)
    size = next(g for g in (256, 128, 64, 32) if group % g == 0)
    scales, zeros = (t.view(rows, -1).repeat_interleave(group // size, 1) for t in (scale, zero - half))
    return held(q, scales, bits=bits, group=size, kind=kind, what=what, zeros=zeros)
