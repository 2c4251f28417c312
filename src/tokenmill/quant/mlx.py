"""Matrices as MLX stores them, and Transformers for its Metal kernels. Owns: their layout.

    NAME.weight uint32 [out, in * bits / 32], codes from 0 on without gaps (bits.py); NAME.scales and NAME.biases (in
    Transformers' files NAME.qbiases) [out, in / group]: code * scale + bias                             (mode affine)
    NAME.weight as above, 4 or 8 bit floats; NAME.scales uint8: powers of two (modes mxfp4, mxfp8), float8 (nvfp4)
Experts lie in one tensor, [E, out, *], as NAME = ....switch_mlp.gate_proj, up_proj and down_proj, or ....experts.*;
so do a latent attention's heads (embed_q [H, latent, keys], unembed_out [H, values, latent]: kv_b_proj in two). Zero
points become fractions. Must not know: models, devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import WholeTensors
from tokenmill.compute.forward import Weight
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, shown
from tokenmill.kernels.fp8 import FP8
from tokenmill.quant import bits as packed
from tokenmill.quant import fp8, mx
from tokenmill.quant.half_scales import held, with_zeros
from tokenmill.quant.sparse import Widened

METHODS = ("mlx", "metal")
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""The bits and the group of each mode of floats."""
_OFFSETS = ("biases", "qbiases")
_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,6})\.(\w+)", re.ASCII)
_HEADS, _IN, _OUT = "kv_b_proj", "embed_q", "unembed_out"
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of these methods that cannot be read here."""
    for bits, group, mode in _settings(config):
        if not (mode == "affine" and bits in _BITS and group in _GROUPS) and _FLOATS.get(str(mode)) != (bits, group):
            raise ModelError(
                f"This checkpoint is quantised with '{config.get('quant_method')}' as {shown(mode)} in {shown(bits)} "
                f"bits and groups of {shown(group)}, which is not supported: affine, {', '.join(map(str, _BITS))} bits "
                f"and groups of {', '.join(map(str, _GROUPS))} are, and {', '.join(_FLOATS)}."
            )


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[object, object, object]]:
    """Bits, group and mode of all matrices, and of those that are named: what these leave out are MLX's defaults, not
    those of the others. (False: one is not rounded.)"""
    named = (each for each in config.values() if isinstance(each, Mapping))
    for each in (config, *(each for each in named if {"bits", "group_size", "mode"} & each.keys())):
        mode = each.get("mode", "affine")
        bits, group = _FLOATS.get(str(mode), (4, 64))
        yield each.get("bits", bits), each.get("group_size", group), mode


class Expert(WholeTensors):
    """A checkpoint in which one expert of a mixture has tensors of its own."""

    def __init__(self, inner: Checkpoint, name: str, stacked: str, number: int) -> None:
        self.inner, self.name, self.stacked, self.number = inner, name, stacked, number
        self.names, self.close = inner.names, inner.close

    def _theirs(self, name: str) -> str | None:
        """The tensor that holds this one and those of the other experts."""
        base, _, part = name.rpartition(".")
        return f"{self.stacked}.{part}" if base == self.name else None

    def has(self, name: str) -> bool:
        """Is there such a tensor?"""
        return self.inner.has(self._theirs(name) or name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Its shape."""
        theirs = self._theirs(name)
        found = self.inner.shape(theirs or name)
        return found if theirs is None or found is None else found[1:]

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor."""
        theirs = self._theirs(name)
        if theirs is None:
            return self.inner.tensor(name, shape, dtype)
        every = self.inner.tensor(theirs, None, dtype)
        if self.number >= (len(every) if every.ndim > 1 else 0):
            raise ModelError(f"'{theirs}' {list(every.shape)} has no expert {self.number}.")
        if shape is not None and tuple(every.shape[1:]) != tuple(shape):
            raise ModelError(f"'{theirs}' has shape {list(every.shape)}, whose experts are not {list(shape)}.")
        return every[self.number]


def alone(ckpt: Checkpoint, name: str, shape: tuple[int, int], how: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with the matrix `name`, if MLX has put it together with others, or taken it apart."""
    if name.endswith(f".{_HEADS}") and not ckpt.has(f"{name}.weight"):
        at = name.removesuffix(_HEADS)
        return Widened(ckpt, name, _of_heads(ckpt, at, shape, how)) if ckpt.has(f"{at}{_IN}.weight") else ckpt
    found = _EXPERT.fullmatch(name)
    if found is None or ckpt.has(f"{name}.weight"):
        return ckpt
    for home, last in (("switch_mlp", _MIXTRAL.get(found[3], found[3])), ("experts", found[3])):
        if ckpt.has(f"{(stacked := f'{found[1]}.{home}.{last}')}.weight"):
            return Expert(ckpt, name, stacked, int(found[2]))
    return ckpt


def _of_heads(ckpt: Checkpoint, at: str, shape: tuple[int, int], how: Mapping[str, Any]) -> Tensor:
    """kv_b_proj [heads * (keys + values), latent]."""
    rows, latent = shape
    out = ckpt.shape(full) if ckpt.has(full := f"{at}{_OUT}.weight") else None
    heads, values = (*(out or ()), 0, 0)[:2]
    keys = rows // heads - values if heads else 0
    if keys < 1 or heads * (keys + values) != rows:
        raise ModelError(f"'{full}' {list(out or ())} does not fit {list(shape)}.")

    def part(which: str, head: int, shape: tuple[int, int]) -> Tensor:
        own = Expert(ckpt, at + which, at + which, head)
        if not stored(own, at + which):
            return own.tensor(f"{at}{which}.weight", shape)
        return load(own, at + which, shape, (torch.float32, None), how).dense()

    each = ((part(_IN, head, (latent, keys)).T, part(_OUT, head, (values, latent))) for head in range(heads))
    return torch.cat([piece for pair in each for piece in pair])


def _offsets(ckpt: Checkpoint, name: str) -> str:
    return next((full for part in _OFFSETS if ckpt.has(full := f"{name}.{part}")), f"{name}.{_OFFSETS[0]}")


def stored(ckpt: Checkpoint, name: str) -> bool:
    """Does the checkpoint hold such a weight under `name`? Its codes or its offsets show it."""
    full, words = _offsets(ckpt, name), f"{name}.weight"
    if ckpt.has(full):
        return ckpt.shape(full) is not None
    there = ckpt.has(f"{name}.scales") and ckpt.has(words) and ckpt.shape(words) is not None
    return there and ckpt.tensor(words).dtype == torch.uint32


def load(
    ckpt: Checkpoint,
    name: str,
    shape: tuple[int, int],
    kind: tuple[torch.dtype, Tensor | None],
    how: Mapping[str, Any],
) -> Weight:
    """Read the weight [out, in] under `name`. kind: the compute dtype and the bias; how: quantization_config."""
    rows, columns = shape
    words, scales, offsets = ckpt.tensor(f"{name}.weight"), ckpt.tensor(f"{name}.scales"), _offsets(ckpt, name)
    less = None if scales.dtype == torch.uint8 and not ckpt.has(offsets) else ckpt.tensor(offsets)
    if words.dtype != torch.uint32:
        raise ModelError(f"'{name}.weight' lies beside '{offsets}', so it must hold uint32, not {words.dtype}.")
    width, count = (t.shape[1] if t.ndim == 2 and t.shape[0] == rows else 0 for t in (words, scales))
    bits, group = width * 32 // columns, columns // count if count else 0
    if (bits * columns, group * count) != (width * 32, columns) or (less is not None and less.shape != scales.shape):
        beside = "" if less is None else f" and '{offsets}' {list(less.shape)}"
        raise ModelError(
            f"'{name}.weight' {list(words.shape)}, '{name}.scales' {list(scales.shape)}{beside} do not fit "
            f"{list(shape)}."
        )
    mode = "affine" if less is not None else next((m for m, size in _FLOATS.items() if size == (bits, group)), "floats")
    found = (bits, group, mode)
    said = set(_settings(how)) if how.get("quant_method") in METHODS else {found}
    if found not in said or mode == "floats":
        told = "{0} bits in groups of {1} ({2})".format
        raise ModelError(
            f"'{name}' holds {told(*found)}: config.json says "
            f"{' or '.join(told(*each) for each in sorted(said, key=str))}."
        )
    if less is None:
        return _floats(words.contiguous().view(torch.uint8), scales, mode, kind, name)
    codes = packed.unpack(words.view(torch.int32), bits, columns)
    codes, steps, zeros = with_zeros(codes.to(torch.int16), scales.float(), less.float())
    half = 1 << (bits - 1)
    q = (codes - half).to(torch.int8)
    return held(q, steps, bits=bits, group=group, kind=kind, what=f"{name}.scales", zeros=zeros - half)


def _floats(codes: Tensor, scales: Tensor, mode: str, kind: tuple[torch.dtype, Tensor | None], name: str) -> Weight:
    """codes [out, n] uint8: two 4 bit floats each, or one of 8 bits."""
    if mode == "mxfp8":
        return fp8.held(codes.view(FP8), scales, kind, name)
    if mode == "mxfp4":
        return mx.mxfp4(codes.view(len(codes), scales.shape[1], -1), scales, *kind, f"{name}.weight")
    return mx.nvfp4(codes, scales.view(FP8), 1.0, kind, f"{name}.scales")
