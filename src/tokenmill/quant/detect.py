"""Which format a weight is in. Owns: choosing by the tensors that a checkpoint has. Knows nothing of layers.

Formats that the tensors do not tell apart are told apart by `quantization_config` in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.core.errors import ModelError
from tokenmill.core.protocols import Checkpoint, Weight
from tokenmill.quant import compressed
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.gguf_weight import BlockWeight
from tokenmill.quant.grid import Unrounded

AT_LOAD = {"int8": 8, "int4": 4}
"""Schemes of --quantization: bits of a weight, in groups of 32 with float16 scales."""


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """One weight to load: tensors `name`.weight, .bias, ...; shape (out, in); transposed: stored as [in, out]."""

    name: str
    shape: tuple[int, int]
    bias: bool = False
    transposed: bool = False


def check_config(config: Mapping[str, object]) -> None:
    """Refuse a checkpoint whose `quantization_config` names a method that cannot be read."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == compressed.METHOD:
        return compressed.check(quantization)
    method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
    raise ModelError(
        f"This checkpoint is quantised with '{method}', which is not supported. Use an unquantised checkpoint."
    )


def load_weight(
    ckpt: Checkpoint,
    request: WeightRequest,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
) -> Weight:
    """Load one weight in the format its tensors are in, then quantise it if `quantization` asks for that."""
    out, inner = request.shape
    stored = (inner, out) if request.transposed else (out, inner)
    bias = ckpt.tensor(f"{request.name}.bias", (out,), dtype).to(device) if request.bias else None
    if not request.transposed and compressed.stored_bits(ckpt, request.name, inner) is not None:
        grid = compressed.load_grid(ckpt, request.name, request.shape, dtype, bias).to(device)
        return grid if quantization is None else from_dense(grid.dense(), bias, quantization)
    blocks = _blocks(ckpt, f"{request.name}.weight", stored)
    if blocks is not None and not request.transposed:
        quantised = BlockWeight([Blocks(blocks.type, blocks.raw.to(device))], dtype, bias)
        return quantised if quantization is None else from_dense(quantised.dense(), bias, quantization)
    weight = ckpt.tensor(f"{request.name}.weight", stored, dtype)
    return from_dense((weight.t() if request.transposed else weight).to(device), bias, quantization)


def _blocks(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> Blocks | None:
    ask = getattr(ckpt, "blocks", None)
    return None if ask is None else ask(name, shape)


def from_dense(weight: Tensor, bias: Tensor | None, quantization: str | None) -> Weight:
    """A matrix [out, in] as it is, or quantised to what `--quantization` asks for."""
    if quantization is None:
        return DenseWeight(weight, bias)
    if quantization not in AT_LOAD:
        raise ModelError(f"Quantising at load to {quantization!r} is not supported; use {' or '.join(AT_LOAD)}.")
    return Unrounded(weight, bias, AT_LOAD[quantization])


def head_scheme(quantization: str | None) -> str | None:
    """What the output head is quantised to when the other weights are quantised to `quantization`."""
    return "int8" if quantization == "int4" else quantization
