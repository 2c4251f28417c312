"""Weights as bitsandbytes stores them. Owns: their layout.

    4 bits   NAME.weight uint8 [numel / 2, 1], the upper half of a byte first, along rows; NAME.weight.quant_map [16];
             NAME.weight.absmax float32 [blocks], or uint8 that name entries of NAME.weight.nested_quant_map [256],
             times NAME.weight.nested_absmax [blocks / nested size], plus the `nested_offset` of
             NAME.weight.quant_state.bitsandbytes__nf4 (or fp4), which holds JSON as bytes
    8 bits   NAME.weight int8 [out, in], NAME.SCB float32 [out]: 127 times a row's scale. Activations of
             `llm_int8_threshold` or more are not rounded; 0: all are
Where blocks straddle rows, the numbers themselves are held. Must not know: models, devices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tokenmill.compute.forward import Weight
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.quant.base import check_range, known
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.grid import GridWeight
from tokenmill.quant.half_scales import held
from tokenmill.quant.table import TableWeight, nibbles

METHOD = "bitsandbytes"
_KINDS = ("nf4", "fp4")
_STATE_BYTES = 1 << 16
_THRESHOLD = 6.0
"""What bitsandbytes' configuration takes if none is said."""


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of this method that cannot be read here."""
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if config.get("load_in_4bit") and kind not in _KINDS:
        raise ModelError(f"This checkpoint is quantised with '{METHOD}' as {shown(kind)}; nf4 and fp4 can be read.")
    storage = config.get("bnb_4bit_quant_storage", "uint8")
    if config.get("load_in_4bit") and storage != "uint8":
        raise ModelError(
            f"This checkpoint is quantised with '{METHOD}' and stored as {shown(storage)}; uint8 can be read."
        )
    threshold(config)


def threshold(config: Mapping[str, Any]) -> float:
    """The magnitude from which on activations of 8 bit weights are not rounded; 0: all are rounded."""
    said = config.get("llm_int8_threshold", _THRESHOLD)
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said) or said < 0:
        raise ModelError(f"This checkpoint's llm_int8_threshold is {shown(said)}: it must be a number from 0 on.")
    return float(said)


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`?"""
    found = next((n for n in (f"{name}.SCB", f"{name}.weight.absmax") if ckpt.has(n)), None)
    return found is not None and ckpt.shape(found) is not None


def load(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None, *, apart: float
) -> Weight:
    """Read the weight [out, in] under `name`. apart: the threshold."""
    if ckpt.has(f"{name}.SCB"):
        found = _eight(ckpt, name, shape, dtype, bias)
        if isinstance(found, GridWeight):
            found.apart = apart
        return found
    rows, columns = shape
    state = _state(ckpt, name)
    block = state.get("blocksize")
    if state.get("quant_type") not in _KINDS or type(block) is not int or block < 1:
        raise ModelError(f"'{name}' has no readable state of bitsandbytes (nf4 or fp4 in blocks).")
    if state.get("shape") != [rows, columns]:
        raise ModelError(f"'{name}' has shape {shown(state.get('shape'))}, but the config asks for {list(shape)}.")
    raw, count = ckpt.tensor(f"{name}.weight"), rows * columns
    if raw.dtype != torch.uint8 or raw.numel() != -(-count // 2):
        raise ModelError(f"'{name}.weight' must hold {-(-count // 2)} bytes, not {raw.numel()} of {raw.dtype}.")
    table = ckpt.tensor(f"{name}.weight.quant_map", (16,)).float()
    table = table.cpu() if known(table) else table
    scales = _scales(ckpt, name, -(-count // block), state)
    check_range(float(table.abs().max()) if known(table) else 1.0, scales, f"{name}.weight.absmax")
    codes = nibbles(raw.flatten(), high_first=True)[:count]
    if columns % block:
        values = table.to(codes.device)[codes.int()] * scales.repeat_interleave(min(block, count))[:count]
        return DenseWeight(values.view(rows, columns).to(dtype), bias)
    scales = scales.view(rows, columns // block)
    return TableWeight(codes.view(rows, columns), table, scales, dtype, bias, str(state["quant_type"]).upper())


def _state(ckpt: Checkpoint, name: str) -> dict[str, Any]:
    for kind in _KINDS:
        full = f"{name}.weight.quant_state.bitsandbytes__{kind}"
        if ckpt.has(full):
            found = ckpt.tensor(full)
            try:
                if found.dtype != torch.uint8 or found.numel() > _STATE_BYTES:
                    raise ValueError("no text")
                state = json.loads(bytes(found.flatten().tolist()))
            except (ValueError, RecursionError) as error:
                raise ModelError(f"'{full}' is not JSON.") from error
            return state if isinstance(state, dict) else {}
    return {}


def _scales(ckpt: Checkpoint, name: str, count: int, state: dict[str, Any]) -> Tensor:
    """The largest magnitude of each block."""
    stored_scales = ckpt.tensor(f"{name}.weight.absmax", (count,))
    if stored_scales.dtype != torch.uint8:
        if ckpt.has(f"{name}.weight.nested_absmax"):
            raise ModelError(
                f"'{name}.weight.absmax' has scales of its own, so it must be uint8, not {stored_scales.dtype}."
            )
        return stored_scales.float()
    table = ckpt.tensor(f"{name}.weight.nested_quant_map", (256,)).float()
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not _is_number(offset):
        raise ModelError(f"'{name}' has scales of scales, but no readable nested_blocksize and nested_offset.")
    nested = ckpt.tensor(f"{name}.weight.nested_absmax", (-(-count // size),)).float()
    return table[stored_scales.int()] * nested.repeat_interleave(min(size, count))[:count] + offset


def _is_number(value: object) -> TypeGuard[int | float]:
    """Is this a number of float32?"""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= torch.finfo(torch.float32).max


def _eight(ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> Weight:
    rows, columns = shape
    q = ckpt.tensor(f"{name}.weight", shape)
    if q.dtype != torch.int8:
        raise ModelError(f"'{name}.weight' has an SCB, so it must be int8, not {q.dtype}.")
    if ckpt.has(f"{name}.weight_format") and ckpt.tensor(f"{name}.weight_format").flatten().tolist() != [0]:
        raise ModelError(f"'{name}.weight_format' is not 0 (row by row): only that can be read.")
    largest = ckpt.tensor(f"{name}.SCB", (rows,)).float()
    group = next((g for g in (256, 128, 64, 32) if columns % g == 0), columns)
    scales = (largest / 127.0)[:, None].expand(rows, columns // group)
    return held(q, scales, bits=8, group=group, kind=(dtype, bias), what=f"{name}.SCB")
