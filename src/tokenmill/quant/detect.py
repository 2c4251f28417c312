"""Which format a weight is in. Owns: choosing by the tensors that a checkpoint has.

Formats with the same tensors are told apart by `quantization_config` in config.json. Must not know: layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import Blocks
from tokenmill.compute.forward import Weight
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UnevenError, shown
from tokenmill.quant import (
    bnb,
    compressed,
    expected_tensors,
    fp8,
    gptq_awq,
    hqq_quanto,
    mlx,
    mx,
    sparse,
    squeezellm,
    ternary,
    torchao,
)
from tokenmill.quant.base import known
from tokenmill.quant.dense import DenseWeight, as_held, check_real
from tokenmill.quant.gguf_weight import BlockWeight
from tokenmill.quant.grid import GridWeight, Unrounded
from tokenmill.quant.rank_share import BlockPart, Part, part_of
from tokenmill.quant.schemes import AT_LOAD, FP8, ROUNDS_INPUTS, check_scheme

_METHODS = {
    compressed.METHOD: compressed.check,
    fp8.METHOD: fp8.check,
    "fbgemm_fp8": fp8.check,
    "mxfp8": fp8.check,
    "modelopt": mx.check_modelopt,
    mx.METHOD: mx.check,
    bnb.METHOD: bnb.check,
    ternary.METHOD: ternary.check,
    torchao.METHOD: torchao.check,
    squeezellm.METHOD: squeezellm.check,
    **dict.fromkeys(gptq_awq.METHODS, gptq_awq.check),
    **dict.fromkeys(hqq_quanto.METHODS, hqq_quanto.check),
    **dict.fromkeys(mlx.METHODS, mlx.check),
}
"""`quant_method` of config.json -> the function that refuses configs that cannot be read."""

_READERS = (fp8, hqq_quanto, torchao, squeezellm, mx)
"""Formats that can be read by their tensors alone."""
_INTERWOVEN = (bnb, hqq_quanto, torchao, squeezellm, ternary)
"""Forms in which a part of a matrix is not one range of bytes."""

_OTHER_NAMES = (
    *("weight_packed", "qweight", "W_q", "_weight_qdata", "weight._data", "weight._data._data", "compressed"),
)
"""Tensors that stand for a matrix whose numbers are not under NAME.weight."""

_UNREAD = {
    "EXL2": ("q_weight", "q_groups"), "EXL3": ("trellis", "suh"), "AQLM": ("codebooks", "codes"),
    "VPTQ": ("centroids.weight", "indices"), "QuIP": ("Qidxs", "SU"), "Marlin": ("B", "s"),
}  # fmt: skip
"""Forms that are not read, and two tensors that a matrix in them has. Folders need not say their names."""

_APART = ("_scale_inv", "_scale", "_scales")
"""What scales of several matrices in one tensor are called, behind its name."""

Share = tuple[int, int, int]
"""A part of a weight: (dimension, part, parts), as in Weight.split."""


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """One weight to load: tensors `name`.weight, .bias, ...; shape (out, in). transposed: its numbers are stored as
    [in, out]. (Tools that quantise such a matrix store it as any other.) share: load only this part."""

    name: str
    shape: tuple[int, int]
    bias: bool = False
    transposed: bool = False
    share: Share | None = None


def check_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Read from config.json how weights are stored. What cannot be read is refused."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return {}
    if isinstance(quantization, Mapping) and (check := _METHODS.get(str(quantization.get("quant_method")))):
        check(quantization)
        return quantization
    method: object = quantization
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "?")
    raise ModelError(
        f"This checkpoint is quantised with {shown(method)}, which is not supported. Use an unquantised checkpoint, or "
        f"one by {', '.join(_METHODS)}."
    )


def check_any_stored(how: Mapping[str, object], names: Iterable[str]) -> None:
    """Refuse tensors of a form that is not read, and plain numbers of which config.json says that they are quantised.
    (compressed-tensors has a plain form.) how: the result of `check_config`; names: of all tensors."""
    method, told = how.get("quant_method"), tuple(names)
    for form, (one, other) in _UNREAD.items():
        found = next((name for name in told if name.endswith(f".{one}")), "")
        if found and f"{found.removesuffix(one)}{other}" in told:
            raise ModelError(f"'{found}' is quantised as {form}, which is not supported.")
    if method in (None, compressed.METHOD) or not told or any(name.endswith(expected_tensors.MARKS) for name in told):
        return
    raise ModelError(
        f"config.json says that the weights are quantised with {shown(method)}, but no tensor is: they are plain "
        "numbers. If these are what you want, leave that out: --hf-overrides '{\"quantization_config\": null}'."
    )


def check_stored(config: Mapping[str, object], wanted: str, where: str, *, gguf: bool) -> None:
    """Refuse a checkpoint that is not quantised by the method that the user named."""
    quantization = config.get("quantization_config")
    named = str(quantization.get("quant_method", "?")) if isinstance(quantization, Mapping) else None
    found = "gguf" if gguf else named
    meant = {"modelopt_fp4": "modelopt", "gpt_oss_mxfp4": "mxfp4"}.get(wanted, wanted.removesuffix("_marlin"))
    if found != meant:
        stored_as = f"its weights are stored as {found}" if found else "its weights are stored unquantised"
        schemes = ", ".join([FP8, *AT_LOAD])
        raise ModelError(
            f"{where}: {stored_as}, not as {wanted}. To quantise them while loading: --quantization {schemes}."
        )


def load_weight(
    ckpt: Checkpoint,
    request: WeightRequest,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    how: Mapping[str, object] = MappingProxyType({}),
) -> Weight:
    """Load one weight in the format of its tensors, then quantise it if `quantization` asks for that.

    how: the result of `check_config`, for facts that the tensors do not show."""
    share, ckpt = request.share, mlx.alone(ckpt, request.name, request.shape, how)
    if request.bias:
        check_numbers(ckpt, f"{request.name}.bias", how)
    if share is not None and share[2] > 1 and _plainly(ckpt, request):
        check_numbers(ckpt, f"{request.name}.weight", how)
        return from_dense(*_dense_part(ckpt, request, share, dtype, device), quantization, dtype)
    if share is not None and share[2] > 1 and (part := _stored_part(ckpt, request, share)) is not None:
        bias = request.bias and (share[0] == 0 or share[1] == 0)
        own = replace(request, shape=part.own, bias=bias, share=None)
        return _load_whole(part, own, (dtype, device), quantization, how)
    whole = _load_whole(ckpt, request, (dtype, device), quantization, how)
    return whole if share is None else whole.split(*share)


def has_form(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold the matrix `name` in a form without NAME.weight?"""
    return any(ckpt.has(f"{name}.{other}") for other in _OTHER_NAMES)


def check_plainly_stored(ckpt: Checkpoint, full: str) -> None:
    """Refuse a tensor that is no matrix (a norm, a table of positions) and is stored as if it were one."""
    name = full.removesuffix(".weight")
    if name != full and (_is_stored(ckpt, name) or sparse.stored(ckpt, name)):
        raise ModelError(f"'{full}' is stored quantised: that is read of matrices and embeddings, not of this.")


def is_zeros_beside(ckpt: Checkpoint, full: str) -> bool:
    """Is this the bias of a quantised matrix whose numbers are all 0? AutoGPTQ writes one for every matrix, also where
    the model has none."""
    name = full.removesuffix(".bias")
    if name == full or not _is_stored(ckpt, name):
        return False
    bias = ckpt.tensor(full)
    return not known(bias) or not bool(bias.any())


def _plainly(ckpt: Checkpoint, request: WeightRequest) -> bool:
    """Is the weight stored as one matrix of plain numbers, so that a part of it can be read?"""
    name, (out, inner) = request.name, request.shape
    if sparse.stored(ckpt, name) or _is_stored(ckpt, name):
        return False
    return request.transposed or _blocks(ckpt, f"{name}.weight", (out, inner)) is None


def _stored_part(ckpt: Checkpoint, request: WeightRequest, share: Share) -> Part | None:
    """A part of a quantised matrix, if its tensors can be cut there. None: the whole matrix must be read."""
    name, shape = request.name, request.shape
    if sparse.stored(ckpt, name) or any(reader.stored(ckpt, name) for reader in _INTERWOVEN):
        return None
    blocks = _blocks(ckpt, f"{name}.weight", shape)
    if blocks is not None:
        return BlockPart.of(ckpt, name, shape, share, blocks.type.elements)
    turned = gptq_awq.stored(ckpt, name)
    if turned and gptq_awq.upright(ckpt, name, shape):
        return None  # the scales of a row are padded
    return part_of(ckpt, name, shape, share, turned=turned)


def _dense_part(
    ckpt: Checkpoint, request: WeightRequest, share: Share, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """A part of a matrix [out, in], and its bias. If columns are divided, the first part has the bias."""
    dim, part, parts = share
    out, inner = request.shape
    size = request.shape[dim]
    if size % parts:
        raise UnevenError(f"{request.name} with {size} {'columns' if dim else 'rows'}", parts)
    start, stop = part * (size // parts), (part + 1) * (size // parts)
    name, bias, read = f"{request.name}.weight", None, _read_as(dtype)
    along, stored = (1 - dim, (inner, out)) if request.transposed else (dim, (out, inner))
    found = ckpt.part(name, along, start, stop, stored, read)
    check_real(found, name, dtype)
    weight = as_held(found, dtype)
    weight = weight.t() if request.transposed else weight
    if request.bias and dim == 0:
        bias = ckpt.part(f"{request.name}.bias", 0, start, stop, (out,), dtype).to(device)
    elif request.bias:
        bias = ckpt.tensor(f"{request.name}.bias", (out,), dtype).to(device)
    # A copy, because a view would keep the whole file mapped, and the whole matrix in memory if reading has made one.
    return weight.to(device, copy=True, memory_format=torch.contiguous_format), bias if dim == 0 or part == 0 else None


def _load_whole(
    ckpt: Checkpoint,
    request: WeightRequest,
    kind: tuple[torch.dtype, torch.device],
    quantization: str | None,
    how: Mapping[str, object],
) -> Any:
    """Load the weight in the format of its tensors, then quantise it if asked for."""
    dtype, device = kind
    out, inner = request.shape
    stored = (inner, out) if request.transposed else (out, inner)
    bias = ckpt.tensor(f"{request.name}.bias", (out,), dtype).to(device) if request.bias else None
    if sparse.stored(ckpt, request.name) and not request.transposed:
        ckpt = sparse.Widened(ckpt, request.name, sparse.load(ckpt, request.name, request.shape))
    if (found := _stored(ckpt, request.name, request.shape, (dtype, bias), how)) is not None:
        held = found.to(device)
        return held if quantization is None else from_dense(held.dense(), bias, quantization)
    blocks = _blocks(ckpt, f"{request.name}.weight", stored)
    if blocks is not None and not request.transposed:
        quantised = BlockWeight([replace(blocks, raw=blocks.raw.to(device))], dtype, bias)
        return quantised if quantization is None else from_dense(quantised.dense(), bias, quantization)
    weight = numbers(ckpt, f"{request.name}.weight", stored, dtype, how)
    return from_dense((weight.t() if request.transposed else weight).to(device), bias, quantization, dtype)


def numbers(
    ckpt: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype, how: Mapping[str, object]
) -> Tensor:
    """Read a tensor of weights that are multiplied in `dtype`, in the type that `as_held` keeps."""
    if scales := next((full for part in _APART if ckpt.has(full := f"{name}{part}") and ckpt.shape(full)), None):
        raise ModelError(
            f"'{name}' holds codes with scales of their own, '{scales}'. Experts in one tensor are read in float8 with "
            "_scale_inv, as [experts, out, in], and in MXFP4 with _blocks and _scales: not as here."
        )
    found = ckpt.tensor(name, shape, _read_as(dtype))
    check_real(found, name, dtype)
    check_numbers(ckpt, name, how)
    return as_held(found, dtype)


def _read_as(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to ask a checkpoint for. None: the stored one. (Invented numbers have the requested dtype, or
    float32.)"""
    return None if dtype == torch.float32 else dtype


def check_numbers(ckpt: Checkpoint, name: str, how: Mapping[str, object]) -> None:
    """Check that a tensor that will be read unchanged holds the numbers themselves, not codes of them."""
    if how and ckpt.has(name) and ckpt.shape(name) is not None:
        expected_tensors.check_plain(ckpt.tensor(name), name)


def load_stacked(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int, int],
    kind: tuple[torch.dtype, Tensor | None],
    device: torch.device,
    quantization: str | None,
    how: Mapping[str, object],
) -> list[Weight]:
    """Experts [E, out, in] that lie in one tensor of 4 or 8 bit floats. kind: the compute dtype and their biases."""
    held: list[Weight] = []
    every = fp8.load_stacked(ckpt, name, shape, kind[0], how) if kind[1] is None and fp8.stacked(ckpt, name) else None
    for weight in every or mx.load_stacked(ckpt, name, shape, *kind):
        moved = weight.to(device)
        held.append(moved if quantization is None else from_dense(moved.dense(), moved.bias, quantization))
    return held


def _stored(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    how: Mapping[str, object],
) -> Any | None:
    """The weight, if it is stored quantised; else None. kind: the compute dtype and the bias."""
    if not _is_stored(ckpt, name):
        return None
    expected_tensors.check(ckpt, name, how, shape[1])
    noting = expected_tensors.NotingCheckpoint(ckpt)
    found = _read(noting, name, shape, kind, how)
    noting.check_all_read(name)
    return found


def _is_stored(ckpt: Checkpoint, name: str) -> bool:
    """Is the matrix stored quantised?"""
    return any(reader.stored(ckpt, name) for reader in (*_READERS, bnb, gptq_awq, mlx, ternary, compressed))


def _read(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    how: Mapping[str, object],
) -> Any:
    """Read the weight by the reader of its form."""
    for reader in _READERS:
        if reader.stored(ckpt, name):
            return reader.load(ckpt, name, shape, *kind)
    if bnb.stored(ckpt, name):
        return bnb.load(ckpt, name, shape, *kind, apart=bnb.threshold(how))
    if gptq_awq.stored(ckpt, name):
        return gptq_awq.load(ckpt, name, shape, *kind, how=how)
    if mlx.stored(ckpt, name):
        return mlx.load(ckpt, name, shape, kind, how)
    if ternary.stored(ckpt, name):
        return ternary.load(ckpt, name, shape, *kind, divide=ternary.divides(how))
    found = compressed.load_grid(
        ckpt, name, shape, *kind, symmetric=expected_tensors.symmetric(how), stated=expected_tensors.widths(how)
    )
    if isinstance(found, GridWeight):
        found.rounds_inputs = compressed.rounds_inputs(how)
    return found


def _blocks(ckpt: Checkpoint, name: str, shape: tuple[int, int]) -> Blocks | None:
    ask = getattr(ckpt, "blocks", None)
    return None if ask is None else ask(name, shape)


def from_dense(
    weight: Tensor, bias: Tensor | None, quantization: str | None, dtype: torch.dtype | None = None
) -> Weight:
    """A matrix [out, in] as it is, or quantised as `--quantization` asks. dtype: the type in which it is multiplied, if
    that is not the weight's own."""
    scheme = None if quantization is None else check_scheme(quantization)[0]
    if scheme is None or scheme == "none":
        return DenseWeight(weight, bias, dtype)
    weight = weight.to(dtype or weight.dtype)
    if scheme == FP8:
        return fp8.UnroundedFp8(weight, bias)
    return Unrounded(weight, bias, *AT_LOAD[scheme], rounds_inputs=scheme in ROUNDS_INPUTS)
