"""Which format a weight is in. Owns: choosing by the tensors that a checkpoint has. Knows nothing of layers.

Formats that the tensors do not tell apart are told apart by `quantization_config` in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.core.errors import ModelError
from tokenmill.core.forward import Weight
from tokenmill.core.model import Checkpoint
from tokenmill.quant import compressed, fp8, words
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.gguf_weight import BlockWeight
from tokenmill.quant.grid import GridWeight, Unrounded

AT_LOAD = {"int8": (8, 0), "int4": (4, 0), "int4-g32": (4, 32), "int4-g64": (4, 64), "int4-g128": (4, 128)}
"""Schemes of --quantization besides fp8: bits of a weight, and columns per float16 scale (0: the backend chooses)."""
_HEAD = ",head="
_METHODS = {compressed.METHOD: compressed.check, fp8.METHOD: fp8.check, "awq": words.check, "gptq": words.check}


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
    if isinstance(quantization, Mapping) and (check := _METHODS.get(str(quantization.get("quant_method")))):
        return check(quantization)
    method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
    raise ModelError(
        f"This checkpoint is quantised with '{method}', which is not supported. Use an unquantised checkpoint."
    )


def check_stored(config: Mapping[str, object], wanted: str, where: str, *, gguf: bool) -> None:
    """Refuse a checkpoint that is not quantised by the method which somebody believes it to be."""
    quantization = config.get("quantization_config")
    named = str(quantization.get("quant_method", "?")) if isinstance(quantization, Mapping) else None
    found = "gguf" if gguf else named
    meant = {"modelopt_fp4": "modelopt", "gpt_oss_mxfp4": "mxfp4"}.get(wanted, wanted.removesuffix("_marlin"))
    if found != meant:
        told = f"its weights are stored as {found}" if found else "its weights are not quantised"
        schemes = ", ".join(["fp8", *AT_LOAD])
        raise ModelError(f"{where}: {told}, not as {wanted}. To quantise them while loading: --quantization {schemes}.")


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
    if not request.transposed and (found := _stored(ckpt, request.name, request.shape, dtype, bias)) is not None:
        grid = found.to(device)
        return grid if quantization is None else from_dense(grid.dense(), bias, quantization)
    blocks = _blocks(ckpt, f"{request.name}.weight", stored)
    if blocks is not None and not request.transposed:
        quantised = BlockWeight([replace(blocks, raw=blocks.raw.to(device))], dtype, bias)
        return quantised if quantization is None else from_dense(quantised.dense(), bias, quantization)
    weight = ckpt.tensor(f"{request.name}.weight", stored, dtype)
    return from_dense((weight.t() if request.transposed else weight).to(device), bias, quantization)


def _stored(
    ckpt: Checkpoint, name: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None
) -> GridWeight | fp8.Fp8Weight | None:
    """The weight, if it lies there in 8 or 4 bits with scales beside it."""
    if fp8.stored(ckpt, name):
        return fp8.load(ckpt, name, shape, dtype, bias)
    if words.stored(ckpt, name):
        return words.load(ckpt, name, shape, dtype, bias)
    if compressed.stored_bits(ckpt, name, shape[1]) is not None:
        return compressed.load_grid(ckpt, name, shape, dtype, bias)
    return None


def _blocks(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> Blocks | None:
    ask = getattr(ckpt, "blocks", None)
    return None if ask is None else ask(name, shape)


def from_dense(weight: Tensor, bias: Tensor | None, quantization: str | None) -> Weight:
    """A matrix [out, in] as it is, or quantised to what `--quantization` asks for."""
    scheme = None if quantization is None else quantization.partition(_HEAD)[0]
    if scheme is None or scheme == "none":
        return DenseWeight(weight, bias)
    if scheme == fp8.METHOD:
        return fp8.UnroundedFp8(weight, bias)
    if scheme not in AT_LOAD:
        raise ModelError(
            f"Quantising at load to {scheme!r} is not supported; use {', '.join(AT_LOAD)} or fp8 (and, for another "
            f"output head, `fp8{_HEAD}none` or the like)."
        )
    return Unrounded(weight, bias, *AT_LOAD[scheme])


def head_scheme(quantization: str | None) -> str | None:
    """What the output head is quantised to: what follows `,head=`, else 8 bits at least: its outliers matter."""
    if quantization is None:
        return None
    scheme, _, head = quantization.partition(_HEAD)
    return head or ("int8" if scheme.startswith("int4") else scheme)
