"""What a quantised checkpoint must hold so that its numbers can be understood. Owns: refusing a weight without the
scales, zero points or order that config.json promises, another type of codes, scales that are whole numbers, and
factors that its form does not use. All of these could be read, but would give wrong numbers. Must not know: how a
form's codes become numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import AroundCheckpoint
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.kernels.fp8 import BLOCK, FP8
from tokenmill.quant import fp8, gptq_awq, ternary
from tokenmill.quant.base import known
from tokenmill.quant.compressed import packed_bits
from tokenmill.quant.dense import codes_alone

_FACTORS = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "_weight_scale", "scales", "SCB"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight._scale"),
    *("weight._shift", "scale", "zero", "vals", "biases", "qbiases", "_weight_per_tensor_scale"),
)
_NUMBERS = (*_FACTORS, "lookup_table", "_weight_zero_point")
"""Everything besides codes from which a matrix is made. Floats among it must be numbers."""
_EXPONENTS = ("weight_scale", "weight_scale_inv")
"""Factors that may be powers of two, one byte each."""
_OF_ALL = ("weight_scale_2", "weight_global_scale")
"""One number for a matrix, which its reader checks."""
_NAN = 255
"""The byte of a power of two that means "not a number"."""
_EIGHT, _FOUR, _WHOLE = "8 bit floats", "4 bit floats", "integers"
"""Kinds of codes in compressed-tensors."""
_WORDS = ("gptq", "awq", "auto-round", "intel/auto-round")
"""Methods whose tensors lie as gptq_awq.py says."""
_PACKED = ("qweight", "scales")
_BY_GROUP = ("group", "dynamic", True)
"""compressed-tensors' words for an order in which the group of each column is listed."""
_CODES = ("weight", "weight_packed", "qweight", "W_q", "_weight_qdata", "weight._data", "weight._data._data")
"""What holds a matrix's numbers. No form has two of them."""
MARKS = (*(f".{part}" for part in (*_NUMBERS, *_CODES[1:])), "_blocks", "_scale", "_scales", "_scale_inv")
"""How names of tensors end that only quantised matrices have."""


class NotingCheckpoint(AroundCheckpoint):
    """A Checkpoint that notes which tensors are read."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.read: set[str] = set()

    def stored(self, name: str, shape: tuple[int, ...] | None) -> str:
        """It is noted."""
        self.read.add(name)
        return name

    def check_all_read(self, name: str) -> None:
        """Refuse a factor of the matrix `name` that was not read: it would have no effect."""
        for full in (f"{name}.{part}" for part in _FACTORS):
            if self.has(full) and full not in self.read:
                raise ModelError(f"'{full}' lies beside a matrix whose form has no such factor.")


def check(ckpt: Checkpoint, name: str, how: Mapping[str, Any], columns: int) -> None:
    """Refuse the quantised matrix under `name` if a tensor is missing or has the wrong type, or if its groups are not
    those of config.json. how: quantization_config."""
    if len(both := [part for part in _CODES if ckpt.has(f"{name}.{part}")]) > 1:
        raise ModelError(f"'{name}' is stored twice: as {both[0]} and as {both[1]}.")
    for part in _NUMBERS:
        if ckpt.has(f"{name}.{part}") and ckpt.shape(f"{name}.{part}") is not None:
            _check_factor(ckpt, name, part)
    if how.get("quant_method") in _WORDS:
        _check_words(ckpt, name, how, columns)
    elif _is_gptq(ckpt, name):
        raise _unsaid(f"{name}.qweight", "of 'gptq', and so not if zero points are stored less 1 (checkpoint_format)")
    elif ternary.stored(ckpt, name) and how.get("quant_method") != ternary.METHOD:
        raise _unsaid(f"{name}.weight", "of 'bitnet', and so not if its scale multiplies or divides (linear_class)")
    elif how.get("quant_method") == "quanto":
        _check_quanto(ckpt, name, str(how.get("weights")))
    _check_kind(ckpt, name, how)
    if (schemes := _integers(how)) and (seen := Seen.of(ckpt, name, columns)) is not None:
        _check_schemes(schemes, seen, name)
    elif _stored_as(ckpt, name) == _EIGHT:
        _check_float8(ckpt, name, how, columns)


def _check_quanto(ckpt: Checkpoint, name: str, said: str) -> None:
    """Refuse codes of another type or other bits than config.json says. Their rows alone would tell: a file with half
    of them has codes of half the bits."""
    whole, dtype = f"{name}.weight._data", {"int8": torch.int8, "float8": FP8}.get(said)
    if dtype and ckpt.has(whole) and ckpt.shape(whole) is not None and (found := ckpt.tensor(whole).dtype) != dtype:
        raise ModelError(f"'{whole}' is stored as {str(found).removeprefix('torch.')}: config.json says {said}.")
    codes, scales = f"{name}.weight._data._data", f"{name}.weight._scale"
    rows = ckpt.shape(codes) if ckpt.has(codes) else None
    groups = math.prod(ckpt.shape(scales) or (0,)) if ckpt.has(scales) else 0
    if rows and said in ("int2", "int4") and rows[0] != -(-groups * int(said[3:]) // 8):
        raise ModelError(f"'{codes}' has shape {list(rows)}, which is not {said} for {groups} groups.")


def _stored_as(ckpt: Checkpoint, name: str) -> str:
    """What the codes of a matrix of compressed-tensors are by their type. "": it has none."""
    packed, plain = f"{name}.weight_packed", f"{name}.weight"
    full = packed if ckpt.has(packed) else plain
    if not ckpt.has(full) or ckpt.shape(full) is None:
        return ""
    dtype = ckpt.tensor(full).dtype
    kinds = {torch.int32: _WHOLE, torch.uint8: _FOUR} if full == packed else {torch.int8: _WHOLE, FP8: _EIGHT}
    return kinds.get(dtype, "")


def _check_kind(ckpt: Checkpoint, name: str, how: Mapping[str, Any]) -> None:
    """Refuse codes of a type that no scheme of config.json has. (A type that lies makes other numbers of them.)"""
    found, named = _stored_as(ckpt, name), {_kind(each) for each in _schemes(how)}
    if found and named and found not in named:
        raise ModelError(f"'{name}' is stored as {found}: config.json says {' or '.join(sorted(named))}.")


def _kind(scheme: Mapping[str, Any]) -> str:
    return _WHOLE if scheme.get("type", "int") == "int" else _FOUR if scheme.get("num_bits") == 4 else _EIGHT


def _check_float8(ckpt: Checkpoint, name: str, how: Mapping[str, Any], columns: int) -> None:
    """Refuse scales of float8 that are fewer or more than config.json says."""
    full = next((f"{name}.{part}" for part in _EXPONENTS if ckpt.has(f"{name}.{part}")), "")
    shape, rows = ckpt.shape(full) if full else None, (ckpt.shape(f"{name}.weight") or (0,))[0]
    if shape is None:
        return
    fp8.check_bytes(ckpt.tensor(full), full, how)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    sizes = {"tensor": 1, "channel": rows, "block": math.prod(blocks), "group": rows * columns // 32}
    said = {str(each.get("strategy")) for each in _schemes(how) if _kind(each) == _EIGHT}
    if size := how.get("weight_block_size"):
        said.add("group" if size == [1, 32] else "block")
    if said and said <= set(sizes) and math.prod(shape) not in {sizes.get(each) for each in said}:
        raise ModelError(
            f"'{full}' has shape {list(shape)}: config.json says one scale per {' or '.join(sorted(said))}."
        )


def symmetric(how: Mapping[str, Any]) -> bool:
    """Does config.json say that the zero points of all integer matrices are 0?"""
    schemes = _integers(how)
    return bool(schemes) and all(each.get("symmetric") is True for each in schemes)


def widths(how: Mapping[str, Any]) -> list[int]:
    """The numbers of bits that config.json says of integer matrices."""
    return [bits for each in _integers(how) if type(bits := each.get("num_bits")) is int]


def check_plain(stored: Tensor, name: str) -> None:
    """Refuse codes that would be read as the numbers themselves."""
    if stored.is_floating_point() and stored.element_size() > 1:
        return
    raise codes_alone(stored, name)


def _check_factor(ckpt: Checkpoint, name: str, part: str) -> None:
    found = ckpt.tensor(f"{name}.{part}")
    dtype, exponents = found.dtype, part in _EXPONENTS or (part == "scales" and _is_floats_of_mlx(ckpt, name))
    whole = part == "_weight_zero_point" or (part == "weight.absmax" and ckpt.has(f"{name}.weight.nested_absmax"))
    if not dtype.is_floating_point and not whole and not (exponents and dtype == torch.uint8):
        raise ModelError(f"'{name}.{part}' must hold floats, not {str(dtype).removeprefix('torch.')}.")
    if known(found) and part not in _OF_ALL and not _all_numbers(found, exponents):
        raise ModelError(f"'{name}.{part}' holds infinities or NaN, which are not numbers: the file is damaged.")


def _is_floats_of_mlx(ckpt: Checkpoint, name: str) -> bool:
    """Does the matrix hold words as MLX writes them, without offsets? Then each scale may be a byte."""
    full = f"{name}.weight"
    words = ckpt.has(full) and ckpt.shape(full) is not None and ckpt.tensor(full).dtype == torch.uint32
    return words and not any(ckpt.has(f"{name}.{offsets}") for offsets in ("biases", "qbiases"))


def _all_numbers(found: Tensor, exponents: bool) -> bool:
    """Are these numbers of float32? Whole numbers are, unless they are powers of two."""
    if found.dtype.is_floating_point and found.dtype != torch.float8_e8m0fnu:
        return bool(torch.isfinite(found.float()).all())
    return not exponents or not bool((found.view(torch.uint8) == _NAN).any())


def _check_words(ckpt: Checkpoint, name: str, how: Mapping[str, Any], columns: int) -> None:
    """The checks for GPTQ and AWQ."""
    scales = ckpt.shape(f"{name}.scales") if ckpt.has(f"{name}.scales") else None
    count = scales[0] if scales is not None and len(scales) == 2 else 0
    if how.get("desc_act") is True and ckpt.has(f"{name}.qweight") and count > 1 and not ckpt.has(f"{name}.g_idx"):
        raise ModelError(
            f"'{name}.g_idx' is missing: config.json says that columns are in an order of their own (desc_act)."
        )
    size = how.get("group_size", how.get("q_group_size"))
    if str(how.get("version")).lower() == "gemv":
        return
    size = columns if size == -1 else size  # one scale for each row
    if type(size) is not int or size < 1:
        return
    # Some matrices may have another size.
    if gptq_awq.varied(how):
        size = size if count == -(-columns // size) else 0
    if scales is not None and size and (len(scales) != 2 or count != -(-columns // size)):
        raise _other_groups(f"{name}.scales", scales, size)


def _is_gptq(ckpt: Checkpoint, name: str) -> bool:
    """Do words and scales lie as GPTQ tools store them? (In AWQ's versions eight rows or columns share a word.)"""
    words, scales = (ckpt.shape(f"{name}.{part}") if ckpt.has(f"{name}.{part}") else None for part in _PACKED)
    if words is None or scales is None or len(words) != 2 or len(scales) != 2:
        return False
    return words[1] == scales[1] and words[0] != scales[0]


def _unsaid(what: str, unknown: str) -> ModelError:
    return ModelError(f"config.json does not say by its quant_method that '{what}' is {unknown}.")


def _other_groups(what: str, shape: Iterable[int], size: int) -> ModelError:
    return ModelError(f"'{what}' has shape {list(shape)}: config.json says groups of {size} columns.")


def _uneven(what: str, size: int, columns: int) -> ModelError | None:
    """An error if the last group would be shorter: this form has no such groups."""
    if columns <= size or not columns % size:
        return None
    return ModelError(f"'{what}': groups of {size} columns do not divide {columns}, which is not supported.")


def _schemes(how: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemes of weights in compressed-tensors' config, which may have several groups of matrices."""
    groups = how.get("config_groups")
    every = groups.values() if isinstance(groups, Mapping) else ()
    schemes = [scheme.get("weights") for scheme in every if isinstance(scheme, Mapping)]
    return [each for each in schemes if isinstance(each, Mapping)]


def _integers(how: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in _schemes(how) if _kind(each) == _WHOLE]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the tensors of an integer matrix show. bits: what a code may have; none if each code fills a byte, which
    shows nothing; scales: their shape; zeros: zero points exist; ordered: the group of each column is listed."""

    bits: list[int] | None
    rows: int
    columns: int
    scales: tuple[int, ...]
    zeros: bool
    ordered: bool

    @classmethod
    def of(cls, ckpt: Checkpoint, name: str, columns: int) -> Seen | None:
        """None: the matrix has no integers, or they are invented."""
        packed, scales = f"{name}.weight_packed", f"{name}.weight_scale"
        full = packed if ckpt.has(packed) else f"{name}.weight"
        if not ckpt.has(full) or not ckpt.has(scales):
            return None
        stored, found = ckpt.tensor(full), ckpt.shape(scales)
        if found is None or stored.ndim != 2 or stored.dtype not in (torch.int32, torch.int8):
            return None
        return cls(
            bits=packed_bits(stored.shape[1], columns) if full == packed else None,
            rows=stored.shape[0],
            columns=columns,
            scales=tuple(found),
            zeros=ckpt.has(f"{name}.weight_zero_point"),
            ordered=full != packed or ckpt.has(f"{name}.weight_g_idx"),
        )


def _check_schemes(schemes: list[Mapping[str, Any]], seen: Seen, name: str) -> None:
    """Refuse a matrix that fits no scheme of config.json. (A scheme's targets are not compared: they are names of
    modules, which files need not have.)"""
    alike = [each for each in schemes if seen.bits is None or each.get("num_bits") in seen.bits]
    if not alike:
        allowed = " or ".join(sorted({str(each.get("num_bits")) for each in schemes}))
        held = " or ".join(map(str, seen.bits or ())) or "other than 2 to 8"
        raise ModelError(f"'{name}.weight_packed' holds {held} bits a column: config.json says {allowed}.")
    faults = [_fault(each, seen, name) for each in alike]
    if None not in faults:
        raise next(fault for fault in faults if fault is not None)


def _fault(scheme: Mapping[str, Any], seen: Seen, name: str) -> ModelError | None:
    """Why a matrix does not fit this scheme. None: it fits."""
    size, count = scheme.get("group_size"), seen.scales[1] if len(seen.scales) == 2 else 0
    if scheme.get("strategy") == "group" and type(size) is int and size > 0:
        if count != -(-seen.columns // size):
            return _other_groups(f"{name}.weight_scale", seen.scales, size)
        if (uneven := _uneven(f"{name}.weight_scale", size, seen.columns)) is not None:
            return uneven
    elif scheme.get("strategy") in ("channel", "tensor") and (count > 1 or _is_lone(scheme, seen)):
        return ModelError(
            f"'{name}.weight_scale' has shape {list(seen.scales)}: config.json says one scale per {scheme['strategy']}."
        )
    if scheme.get("symmetric") is False and not seen.zeros:
        return ModelError(f"'{name}.weight_zero_point' is missing: config.json says that weights are not symmetric.")
    if scheme.get("actorder") in _BY_GROUP and not seen.ordered:
        return ModelError(
            f"'{name}.weight_g_idx' is missing: config.json says that columns are in an order of their own (actorder)."
        )
    return None


def _is_lone(scheme: Mapping[str, Any], seen: Seen) -> bool:
    """Is there one scale for all rows, where each has its own?"""
    return scheme.get("strategy") == "channel" and seen.rows > 1 and math.prod(seen.scales) == 1
