"""The compressed-tensors layout of integer weights. Owns: packing, unpacking, and which of its configs can be read.

    NAME.weight_packed int32 [out, in * bits / 32], little end first, q stored as q + 2^(bits - 1)
    NAME.weight_scale [out, groups]     NAME.weight_shape [2]          (format pack-quantized, 4 or 8 bits)
    NAME.weight_zero_point int32 [out * bits / 32, groups], packed along out       (the same, 4 bits, asymmetric)
    NAME.weight int8 [out, in]          NAME.weight_scale [out, groups]            (format int-quantized, 8 bits)
    NAME.weight float8 [out, in]        NAME.weight_scale [out, 1], one, or one a block: see fp8.py (float-quantized)
Must not know: files, models, how scales are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.core.model import Checkpoint
from tokenmill.quant.grid import GridWeight

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
_GROUPS = (256, 128, 64, 32)


def pack(q: Tensor, bits: int) -> Tensor:
    """q [out, in] int8 (4 bits: -8..7) -> [out, in * bits / 32] int32."""
    raised = (q.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    if bits == 4:
        raised = raised[:, 0::2] | (raised[:, 1::2] << 4)
    return raised.contiguous().view(torch.int32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: [out, in] int8."""
    raised = packed.contiguous().view(torch.uint8)
    if bits == 4:
        raised = torch.stack((raised & 15, raised >> 4), -1).flatten(1)
    return (raised - (1 << (bits - 1))).view(torch.int8)


def quantization_config(bits: int, group: int, ignore: list[str]) -> dict[str, Any]:
    """What config.json says of weights written with `pack`."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    return _config("pack-quantized", weights | {"dynamic": False, "observer": "mse"}, None, ignore)


def fp8_config(ignore: list[str]) -> dict[str, Any]:
    """What config.json says of float8 weights with a scale per row, for activations rounded token by token."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    inputs = weights | {"strategy": "token", "dynamic": True, "observer": None}
    return _config("float-quantized", weights | {"dynamic": False, "observer": "minmax"}, inputs, ignore)


def _config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str]) -> dict[str, Any]:
    more: dict[str, Any] = {"actorder": None, "block_structure": None, "observer_kwargs": {}}
    inputs = None if inputs is None else inputs | more
    scheme = {
        "targets": ["Linear"], "weights": weights | more, "input_activations": inputs, "output_activations": None,
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
    if config.get("format") not in FORMATS:
        raise _refused(f"format {config.get('format')!r} (readable: {', '.join(FORMATS)})")
    groups = config.get("config_groups")
    for scheme in groups.values() if isinstance(groups, Mapping) else ():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refused("a group without weights")
        kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise _refused(f"{bits} bit {kind} weights (readable: 4 and 8 bit int, 8 bit float)")
        if weights.get("symmetric") is False and bits != 4:
            raise _refused("8 bit weights with zero points")
        readable = ("group", "channel") if kind == "int" else ("channel", "tensor", "block")
        if strategy not in readable:
            raise _refused(f"scales per {strategy} (readable: {', '.join(readable)})")
        if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
            raise _refused(f"blocks of {weights.get('block_structure')} (readable: [128, 128])")


def _refused(what: str) -> ModelError:
    return ModelError(f"This checkpoint is quantised with '{METHOD}' and has {what}, which is not supported.")


def stored_bits(ckpt: Checkpoint, name: str, columns: int) -> int | None:
    """Bits of the quantised weight under `name`; None: it is not quantised."""
    if ckpt.has(f"{name}.weight_packed"):
        packed = ckpt.shape(f"{name}.weight_packed")  # checkpoints that invent tensors know no shape
        return None if packed is None or len(packed) != 2 else packed[1] * 32 // columns
    if ckpt.has(f"{name}.weight_scale") and ckpt.shape(f"{name}.weight_scale") is not None:
        return 8
    return None


def load_grid(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
) -> GridWeight:
    """The quantised weight [out, in] under `name`."""
    rows, columns = shape
    bits = stored_bits(ckpt, name, columns)
    if bits not in (4, 8):
        raise ModelError(f"'{name}.weight_packed' does not hold {columns} columns of 4 or 8 bits.")
    if ckpt.has(f"{name}.weight_packed"):
        packed = ckpt.tensor(f"{name}.weight_packed", (rows, columns * bits // 32))
        if packed.dtype != torch.int32:
            raise ModelError(f"'{name}.weight_packed' must be int32, not {packed.dtype}.")
        if ckpt.has(f"{name}.weight_shape"):
            ckpt.tensor(f"{name}.weight_shape", (2,))
        q = unpack(packed, bits)
    else:
        q = ckpt.tensor(f"{name}.weight", shape)
        if q.dtype != torch.int8:
            raise ModelError(f"'{name}.weight' has scales, so it must be int8, not {q.dtype}.")
    scales, group = _scales(ckpt, name, shape)
    zeros = None
    if bits == 4 and ckpt.has(f"{name}.weight_zero_point"):
        stored = ckpt.tensor(f"{name}.weight_zero_point")
        if stored.dtype != torch.int32 or stored.shape[0] * 8 != rows or scales.shape[1] % stored.shape[1]:
            raise ModelError(f"'{name}.weight_zero_point' has shape {list(stored.shape)}, which does not fit.")
        zeros = unpack(stored.T, bits).T.repeat_interleave(scales.shape[1] // stored.shape[1], 1).contiguous()
    return GridWeight(q, scales, bits=bits, group=group, dtype=dtype, bias=bias, zeros=zeros)


def _scales(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[Tensor, int]:
    """float16 [out, groups] in a group that kernels know; one scale a row is repeated."""
    rows, columns = shape
    scales = ckpt.tensor(f"{name}.weight_scale").reshape(rows, -1).half()
    group = columns // scales.shape[1]
    if columns % scales.shape[1] or (group % 32 and scales.shape[1] > 1):
        raise ModelError(f"'{name}.weight_scale': {scales.shape[1]} scales for {columns} columns; groups are of 32 n.")
    known = next((g for g in _GROUPS if group % g == 0), group)
    return scales.repeat_interleave(group // known, 1), known
