"""The compressed-tensors layout of integer weights. Owns: packing, unpacking, and which of its configs can be read.

    NAME.weight_packed int32 [out, in * bits / 32], without gaps (bits.py), q stored as q + 2^(bits - 1)
    NAME.weight_scale [out, groups]     NAME.weight_shape [2]          (format pack-quantized, 2 to 8 bits)
    NAME.weight_zero_point int32 [out * bits / 32, groups], packed along out                (the same, asymmetric)
    NAME.weight_g_idx [in]: each column's group, in any order                               (the same, actorder group)
    NAME.weight int8 [out, in]          NAME.weight_scale [out, groups]            (format int-quantized, 8 bits)
    NAME.weight float8 [out, in]        NAME.weight_scale [out, 1], one, or one a block: see fp8.py (float-quantized)
Four bit floats are in mx.py, matrices stored without their zeros in sparse.py. 2 and 3 bits are held in 4, 5 to 7 in 8.
Must not know: files, models, how scales are found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.quant import bits as packed
from tokenmill.quant import sparse
from tokenmill.quant.base import known
from tokenmill.quant.column_order import in_order
from tokenmill.quant.half_scales import Held, held

METHOD = "compressed-tensors"
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
BESIDE = ("input_scale", "input_zero_point", "input_global_scale")
"""What files say about activations. It is not used: activations are rounded by their own range."""
_GROUPS = (256, 128, 64, 32)


def pack(q: Tensor, bits: int) -> Tensor:
    """q [out, in] int8 (4 bits: -8..7) -> [out, in * bits / 32] int32."""
    return packed.pack((q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`: [out, count] int8."""
    return (packed.unpack(words, bits, count).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def quantization_config(bits: int, group: int, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config for weights that `pack` wrote."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return config("pack-quantized", weights | {"dynamic": False, "observer": "mse"}, None, ignore)


def fp8_config(ignore: list[str]) -> dict[str, Any]:
    """The quantization_config for float8 weights with a scale per row, and activations that are rounded token by
    token."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
    return config("float-quantized", weights | {"dynamic": False, "observer": "minmax"}, inputs, ignore)


def config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config for weights in this form. inputs: how activations are rounded (None: not at all)."""
    more: dict[str, Any] = {"actorder": None, "block_structure": None, "observer_kwargs": {}}
    inputs = None if inputs is None else more | inputs
    scheme = {
        "targets": ["Linear"], "weights": more | weights, "input_activations": inputs, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of this method that cannot be read here."""
    _check_format(config.get("format"))
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") not in ("dense", *sparse.FORMATS):
        raise _refused(f"sparsity format {shown(sparsity.get('format'))} (readable: {', '.join(sparse.FORMATS)})")
    if config.get("transform_config"):
        raise _refused("rotations of activations (transform_config)")
    groups = config.get("config_groups")
    for scheme in groups.values() if isinstance(groups, Mapping) else ():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refused("a group without weights")
        if scheme.get("format") is not None:
            _check_format(scheme["format"])
        _check_weights(weights)


def _check_format(form: object) -> None:
    if form not in FORMATS:
        raise _refused(f"format {shown(form)} (readable: {', '.join(FORMATS)})")


def _check_weights(weights: Mapping[str, Any]) -> None:
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    if not (kind == "int" and bits in range(2, 9)) and (kind, bits) not in (("float", 8), ("float", 4)):
        raise _refused(f"{_told(bits)} bit {_told(kind)} weights (readable: 2 to 8 bit int, 4 and 8 bit float)")
    readable = {"int": ("group", "channel", "tensor"), "float": ("channel", "tensor", "block", "group", "tensor_group")}
    if strategy not in readable[kind]:
        raise _refused(f"scales per {_told(strategy)} (readable: {', '.join(readable[kind])})")
    if (kind, bits, strategy) == ("float", 8, "group") and weights.get("group_size") != 32:
        raise _refused(f"8 bit float weights in groups of {shown(weights.get('group_size'))} (readable: 32)")
    if strategy == "block" and weights.get("block_structure") not in ([128, 128], "128x128"):  # older tools write this
        raise _refused(f"blocks of {shown(weights.get('block_structure'))} (readable: [128, 128])")


def rounds_inputs(how: Mapping[str, Any]) -> bool:
    """Does every scheme of config.json round activations to 8 bits?"""
    groups = how.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    inputs = [each.get("input_activations") if isinstance(each, Mapping) else None for each in schemes]
    return bool(inputs) and all(isinstance(each, Mapping) and each.get("num_bits") == 8 for each in inputs)


def _told(value: object) -> str:
    return shown(value).strip("'")


def _refused(what: str) -> ModelError:
    return ModelError(f"This checkpoint is quantised with '{METHOD}' and has {what}, which is not supported.")


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Is the weight under `name` quantised?"""
    if ckpt.has(f"{name}.weight_packed"):
        words = ckpt.shape(f"{name}.weight_packed")  # checkpoints that invent tensors have no shapes
        return words is not None and len(words) == 2
    return ckpt.has(f"{name}.weight_scale") and ckpt.shape(f"{name}.weight_scale") is not None


def packed_bits(words: int, columns: int) -> list[int]:
    """How many bits a code may have if a row of so many columns takes so many words. Few columns leave a choice."""
    return [bits for bits in range(2, 9) if -(-columns * bits // 32) == words]


def _bits(ckpt: Checkpoint, name: str, columns: int, stated: Collection[int]) -> int:
    """The bits of a code. stated: those that config.json speaks of; they decide where the tensors leave a choice."""
    if not ckpt.has(f"{name}.weight_packed"):
        return 8
    shape = ckpt.shape(f"{name}.weight_packed")
    able = packed_bits(shape[1], columns) if shape is not None and len(shape) == 2 else []
    chosen = [bits for bits in able if bits in stated] or able[-1:]
    if not chosen:
        raise ModelError(f"'{name}.weight_packed' does not hold {columns} columns of 2 to 8 bits.")
    if len(chosen) > 1:
        told = " or ".join(map(str, chosen))
        raise ModelError(f"'{name}.weight_packed' may hold {told} bits a column: {columns} columns do not show it.")
    return chosen[0]


def load_grid(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None,
    *,
    symmetric: bool = False,
    stated: Collection[int] = (),
) -> Held:
    """Read the quantised weight [out, in] under `name`. symmetric: config.json says that all zero points are 0;
    stated: the numbers of bits that it speaks of."""
    rows, columns = shape
    bits = _bits(ckpt, name, columns, stated)
    if ckpt.has(f"{name}.weight_packed"):
        words = ckpt.tensor(f"{name}.weight_packed", (rows, -(-columns * bits // 32)))
        if words.dtype != torch.int32:
            raise ModelError(f"'{name}.weight_packed' must be int32, not {words.dtype}.")
        stored_shape = ckpt.tensor(f"{name}.weight_shape", (2,)) if ckpt.has(f"{name}.weight_shape") else None
        if stored_shape is not None and known(stored_shape) and stored_shape.tolist() != [rows, columns]:
            raise ModelError(f"'{name}.weight_shape' is not {[rows, columns]}, which the config asks for.")
        q = unpack(words, bits, columns)
    else:
        q = ckpt.tensor(f"{name}.weight", shape)
        if q.dtype != torch.int8:
            raise ModelError(f"'{name}.weight' has scales, so it must be int8, not {q.dtype}.")
    for part in BESIDE:
        if ckpt.has(f"{name}.{part}"):
            ckpt.tensor(f"{name}.{part}")  # about activations; read so that no tensor counts as unused
    scales, group, repeat = _scales(ckpt, name, shape)
    zeros = _zeros(ckpt, name, bits, rows, repeat) if ckpt.has(f"{name}.weight_zero_point") else None
    if symmetric and zeros is not None and known(zeros):
        raise ModelError(f"'{name}.weight_zero_point' is not 0: config.json says that weights are symmetric.")
    order = None
    if ckpt.has(f"{name}.weight_g_idx"):
        index = ckpt.tensor(f"{name}.weight_g_idx", (columns,))
        if known(index) and bool((index != -1).any()):  # all -1: present, but the columns lie in order
            whole = group * repeat[1]
            order = in_order(index, whole, columns // whole, f"{name}.weight_g_idx")
    return held(
        q, scales, bits=bits, group=group, kind=(dtype, bias), what=f"{name}.weight_scale", zeros=zeros, order=order
    )


def _zeros(ckpt: Checkpoint, name: str, bits: int, rows: int, repeat: tuple[int, int]) -> Tensor | None:
    """Zero points [out, groups], or None if all are zero. repeat: (groups as stored, how often each is repeated)."""
    full, (groups, times) = f"{name}.weight_zero_point", repeat
    found = ckpt.tensor(full)
    if found.dtype == torch.int32 and ckpt.has(f"{name}.weight_packed"):
        if tuple(found.shape) != (-(-rows * bits // 32), groups):
            raise ModelError(f"'{full}' has shape {list(found.shape)}, which does not fit.")
        found = unpack(found.T, bits, rows).T
    elif found.dtype not in _SIGNED or (
        (found.numel() != 1 or math.prod(ckpt.shape(f"{name}.weight_scale") or ()) != 1)
        and (found.numel(), *found.shape[:1]) != (rows * groups, rows)
    ):
        raise ModelError(f"'{full}' has shape {list(found.shape)} of {found.dtype}, which does not fit.")
    half = 1 << (bits - 1)
    if known(found) and (int(found.min()) < -half or int(found.max()) >= half):
        raise ModelError(f"'{full}' has zero points that are no numbers of {bits} bits.")
    found = found.to(torch.int16).reshape(-1, groups if found.numel() > 1 else 1).expand(rows, groups)
    return found.repeat_interleave(times, 1).contiguous() if not known(found) or bool(found.any()) else None


_SIGNED = (torch.int8, torch.int16, torch.int32)


def _scales(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[Tensor, int, tuple[int, int]]:
    """(scales, group, (groups as stored, how often each is repeated)); group: a size that kernels know."""
    rows, columns = shape
    stored = ckpt.tensor(f"{name}.weight_scale")
    if stored.numel() == 1:
        stored = stored.reshape(1, 1).expand(rows, 1)
    if stored.numel() % rows or not stored.numel() or not stored.is_floating_point() or stored.shape[0] != rows:
        raise ModelError(f"'{name}.weight_scale' has shape {list(stored.shape)}, which does not fit {list(shape)}.")
    scales = stored.reshape(rows, -1)
    count = scales.shape[1]
    group = columns // count
    if columns % count:
        raise ModelError(f"'{name}.weight_scale' has {count} scales for {columns} columns, which they do not divide.")
    size = next((g for g in _GROUPS if group % g == 0), group)
    return scales.repeat_interleave(group // size, 1), size, (count, group // size)
