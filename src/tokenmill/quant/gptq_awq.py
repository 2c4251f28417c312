"""Integer weights as AutoAWQ and GPTQ tools store them. Owns: which tensors a weight is made of, and their order.

    NAME.qweight, NAME.qzeros int32, NAME.scales float16; codes without gaps in words of 32 bits (bits.py), and

    GPTQ       qweight [in * bits / 32, out] along in; qzeros [groups, out * bits / 32] along out hold the zero point
               less 1 (0 borrows), but not in files of the second version (`checkpoint_format: gptq_v2`); scales
               [groups, out];
               NAME.g_idx [in] says each column's group, in any order (`desc_act`)
    AWQ gemm   qweight [in, out / 8], qzeros [groups, out / 8], in both words hold 0 2 4 6 1 3 5 7; scales [groups, out]
    AWQ gemv   qweight [out, in / 8], qzeros [out, n / 8], scales [out, n], n: the groups, filled up

Must not know: models, devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.quant import bits as packed
from tokenmill.quant.base import known
from tokenmill.quant.column_order import in_order
from tokenmill.quant.half_scales import Held, held

METHODS = ("gptq", "awq", "auto-round", "intel/auto-round")
_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of columns 0 to 7 in a word of AWQ."""
_CHANGES = ("is_marlin_format", "use_bitblas_format", "rotation", "adapter")
"""Fields whose value would change the tensors or the computation in a way that is not built here."""
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of these methods that cannot be read here."""
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    kind = _kind(config)
    if kind not in _BITS:
        raise ModelError(
            f"This checkpoint is quantised with '{method}' packed as {shown(config.get('packing_format'))}, which is "
            "not supported; auto_round:auto_gptq and auto_round:auto_awq are."
        )
    if bits not in _BITS[kind]:
        raise ModelError(f"This checkpoint is quantised with '{method}' in {shown(bits)} bits, which is not supported.")
    version = str(config.get("version") or "gemm").lower()
    if kind == "awq" and version not in ("gemm", "gemv"):
        raise ModelError(
            f"This checkpoint is quantised with 'awq' in version {shown(version)}; gemm and gemv can be read."
        )
    form = _form(config)
    if method == "gptq" and form not in ("gptq", "gptq_v2"):
        raise ModelError(f"This checkpoint is quantised with 'gptq' in the form {shown(form)}, which is not supported.")
    for field in _CHANGES:
        if config.get(field):
            raise ModelError(f"This checkpoint is quantised with '{method}' and has {field!r}, which is not supported.")
    if dynamic := config.get("dynamic"):
        if not isinstance(dynamic, Mapping):
            raise ModelError(f"This checkpoint is quantised with '{method}' and has a `dynamic` that is not an object.")
        odd = [rule for rule in dynamic.values() if isinstance(rule, Mapping) and rule.get("bits", 4) == 1]
        if odd:
            raise ModelError(
                "This checkpoint is quantised with 'gptq' in 1 bit for some matrices, which is not supported."
            )


def varied(how: Mapping[str, Any]) -> bool:
    """Does config.json say something else about some matrices? (Rules that begin with "-:" only leave some out.)"""
    rules = how.get("dynamic") or ()
    return bool(how.get("extra_config")) or any(not str(rule).startswith("-:") for rule in rules)


def _kind(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method"))
    if method in ("gptq", "awq"):
        return method
    return {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}.get(str(config.get("packing_format")), "")


def _form(config: Mapping[str, Any]) -> str:
    """The file's form by either of GPTQModel's names."""
    said = (config.get(name) for name in ("checkpoint_format", "format"))
    return str(next((each for each in said if each is not None), "gptq")).lower()


def second_version(config: Mapping[str, Any]) -> bool:
    """Does a GPTQ file store zero points unchanged? The tensors do not show it."""
    return _kind(config) == "gptq" and _form(config) == "gptq_v2"


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Is there such a weight under `name`?"""
    return ckpt.has(f"{name}.qweight") and ckpt.shape(f"{name}.qweight") is not None


def upright(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> bool:
    """Do the tensors under `name` lie as a matrix [out, in] does (AWQ's version gemv)?"""
    scales, words = (ckpt.shape(f"{name}.{part}") or () for part in ("scales", "qweight"))
    return _upright(scales, words, shape)


def _upright(scales: Sequence[int], words: Sequence[int], shape: tuple[int, int]) -> bool:
    rows, columns = shape
    square = tuple(words) == (rows, columns // 8)  # as many scales in a row as rows
    return len(scales) == 2 and scales[0] == rows and (scales[1] != rows or square)


def load(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    how: Mapping[str, Any] = MappingProxyType({}),
) -> Held:
    """Read the weight [out, in] under `name`, with its zero points. how: quantization_config."""
    rows, columns = shape
    words = _words(ckpt, f"{name}.qweight")
    scales = ckpt.tensor(f"{name}.scales")
    if _upright(scales.shape, words.shape, shape):
        return _gemv(ckpt, name, words, shape, (dtype, bias), how)
    groups = scales.shape[0] if scales.ndim == 2 else 0
    group, order = _columns_of_group(columns, groups, how), None
    if scales.ndim != 2 or scales.shape[1] != rows or not group:
        raise ModelError(f"'{name}.scales' has shape {list(scales.shape)}, which does not fit {list(shape)}.")
    awq, method = tuple(words.shape) == (columns, rows // 8), _kind(how)
    if method and awq is not (method == "awq"):
        raise ModelError(
            f"'{name}.qweight' has shape {list(words.shape)}, which does not fit {list(shape)} by {method}."
        )
    bits = 4 if awq else 32 * words.shape[0] // columns if words.ndim == 2 else 0
    if not awq and (bits not in (2, 3, 4, 8) or tuple(words.shape) != (-(-columns * bits // 32), rows)):
        raise ModelError(f"'{name}.qweight' has shape {list(words.shape)}, which does not fit {list(shape)}.")
    zero_words = _words(ckpt, f"{name}.qzeros", (groups, -(-rows * bits // 32)))
    if awq:
        q, zeros = _interleaved(words).T, _interleaved(zero_words).T
    else:
        q = packed.unpack(words.T, bits, columns)
        zeros = (packed.unpack(zero_words, bits, rows) if second_version(how) else _one_more(zero_words, bits, rows)).T
        if ckpt.has(f"{name}.g_idx"):
            index = ckpt.tensor(f"{name}.g_idx", (columns,))
            order = in_order(index, group, groups, f"{name}.g_idx") if known(index) else None
    return _make(q, scales.T.contiguous(), zeros, (bits, group), (dtype, bias), name, how, order)


def _one_more(words: Tensor, bits: int, count: int) -> Tensor:
    """Zero points [n, count] of the first version: one more than stored. Tools store 0 by taking 1 from each code of a
    word at once, so that it borrows from the next code; 3 bits do not fill words and wrap one by one."""
    most = (1 << bits) - 1
    if 32 % bits:
        return packed.unpack(words, bits, count) + 1 & most
    return packed.unpack(words + 0xFFFFFFFF // most, bits, count)


def _columns_of_group(columns: int, groups: int, how: Mapping[str, Any]) -> int:
    """The columns of a group if there are so many groups. What config.json says goes first: the last group may be
    shorter. 0: they do not fit."""
    said = how.get("group_size", how.get("q_group_size"))
    if type(said) is int and said > 0 and -(-columns // said) == groups:
        return min(said, columns)
    return columns // groups if groups and columns % groups == 0 else 0


def _make(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    sizes: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    name: str,
    how: Mapping[str, Any],
    order: Tensor | None = None,
) -> Held:
    """codes [out, in] and zeros [out, groups] -> (code - zero) * scale, without zeros if all are in the middle. kind:
    the compute dtype and the bias; sizes: bits, and columns of a group."""
    bits, group = sizes
    half = 1 << (bits - 1)
    q, less = (codes.to(torch.int16) - half).to(torch.int8).contiguous(), zeros.to(torch.int16) - half
    kept = less.contiguous() if not known(less) or bool(less.any()) else None
    if kept is not None and known(kept) and (promise := _symmetric(how)):
        raise ModelError(f"'{name}.qzeros' has zero points that are not in the middle, but config.json says {promise}.")
    return held(q, scales, bits=bits, group=group, kind=kind, what=f"{name}.scales", zeros=kept, order=order)


def _symmetric(how: Mapping[str, Any]) -> str:
    """The words with which config.json says that all zero points are in the middle; "": it does not. (A file of one
    version that is read as the other has all of them one beside the middle.)"""
    if varied(how):
        return ""
    if how.get("sym") is True:
        return f"'sym' (checkpoint_format {shown(_form(how))})" if _kind(how) == "gptq" else "'sym'"
    return "no 'zero_point'" if how.get("zero_point") is False else ""


def _gemv(
    ckpt: Checkpoint,
    name: str,
    words: Tensor,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    how: Mapping[str, Any],
) -> Held:
    rows, columns = shape
    scales, zeros = ckpt.tensor(f"{name}.scales"), _words(ckpt, f"{name}.qzeros")
    filled = zeros.shape[1] * 8 if zeros.ndim == 2 else 0
    if tuple(words.shape) != (rows, columns // 8) or tuple(scales.shape) != (rows, filled) or zeros.shape[0] != rows:
        raise ModelError(f"'{name}' has tensors of AWQ's version gemv that do not fit {list(shape)}.")
    group_size = how.get("group_size", how.get("q_group_size"))
    known_sizes = (
        [columns if group_size == -1 else group_size] if type(group_size) is int and group_size else [128, 64, 32]
    )
    group = next((g for g in known_sizes if _filled_groups(columns, g) == filled and columns % g == 0), 0)
    if not group:
        raise ModelError(f"'{name}.scales' has {filled} scales a row, which fit no group of {columns} columns.")
    groups = columns // group
    q, offsets = packed.unpack(words, 4, columns), packed.unpack(zeros, 4, filled)[:, :groups]
    return _make(q, scales[:, :groups].contiguous(), offsets, (4, group), kind, name, how)


def _filled_groups(columns: int, group: int) -> int:
    """The scales of a row in version gemv, padded to a whole number of words of zero points; small groups are padded to
    several words."""
    several = max(1, 128 // group) * 8
    return math.ceil(columns // group / several) * several


def _words(ckpt: Checkpoint, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    found = ckpt.tensor(name, shape)
    if found.dtype != torch.int32:
        raise ModelError(f"'{name}' must hold int32, not {found.dtype}.")
    return found


def _interleaved(words: Tensor) -> Tensor:
    """words [n, m] int32 of AWQ -> [n, 8 m] uint8."""
    shifts = 4 * torch.tensor(_INTERLEAVED, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)
