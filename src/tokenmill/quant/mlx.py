"""Integers as MLX stores them, and Transformers for its Metal kernels. Owns: their layout.

    NAME.weight uint32 [out, in * bits / 32], codes from 0 on without gaps (bits.py); NAME.scales and NAME.biases (in
    Transformers' files NAME.qbiases) [out, in / group]: code * scale + bias
Experts lie in one tensor, [E, out, *], as NAME = ....switch_mlp.gate_proj, up_proj and down_proj. Zero points become
fractions. Must not know: models, devices.
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
from tokenmill.quant import bits as packed
from tokenmill.quant.half_scales import held, with_zeros

METHODS = ("mlx", "metal")
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_OFFSETS = ("biases", "qbiases")
_EXPERT = re.compile(r"(.+)\.experts\.(\d{1,6})\.(\w+)", re.ASCII)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def check(config: Mapping[str, Any]) -> None:
    """Refuse a quantization_config of these methods that cannot be read here."""
    for bits, group, mode in _settings(config):
        if mode != "affine" or bits not in _BITS or group not in _GROUPS:
            raise ModelError(
                f"This checkpoint is quantised with '{config.get('quant_method')}' as {shown(mode)} in {shown(bits)} "
                f"bits and groups of {shown(group)}, which is not supported: affine, {', '.join(map(str, _BITS))} bits "
                f"and groups of {', '.join(map(str, _GROUPS))} are."
            )


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[object, object, object]]:
    """Bits, group and mode of all matrices, and of those that are named. (False: one is not rounded.)"""
    named = (each for each in config.values() if isinstance(each, Mapping) and {"bits", "group_size"} & each.keys())
    for each in (config, *named):
        yield (
            each.get("bits", config.get("bits")),
            each.get("group_size", config.get("group_size")),
            each.get("mode", config.get("mode", "affine")),
        )


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


def alone(ckpt: Checkpoint, name: str) -> Checkpoint:
    """A checkpoint with the matrix `name`, if it is an expert's and MLX has put all of them together."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return ckpt
    stacked = f"{found[1]}.switch_mlp.{_MIXTRAL.get(found[3], found[3])}"
    return Expert(ckpt, name, stacked, int(found[2])) if ckpt.has(f"{stacked}.weight") else ckpt


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
    words, offsets = ckpt.tensor(f"{name}.weight"), _offsets(ckpt, name)
    scales, less = ckpt.tensor(f"{name}.scales"), ckpt.tensor(offsets)
    if words.dtype != torch.uint32:
        raise ModelError(f"'{name}.weight' lies beside '{offsets}', so it must hold uint32, not {words.dtype}.")
    width, count = (t.shape[1] if t.ndim == 2 and t.shape[0] == rows else 0 for t in (words, scales))
    found = width * 32 // columns, columns // count if count else 0
    if (found[0] * columns, found[1] * count) != (width * 32, columns) or scales.shape != less.shape:
        raise ModelError(
            f"'{name}.weight' {list(words.shape)}, '{name}.scales' {list(scales.shape)} and '{offsets}' "
            f"{list(less.shape)} do not fit {list(shape)}."
        )
    said = {(bits, group) for bits, group, _ in _settings(how)} if how.get("quant_method") in METHODS else {found}
    if found not in said:
        raise ModelError(
            f"'{name}' holds {found[0]} bits in groups of {found[1]}: config.json says "
            f"{' or '.join(f'{bits} in groups of {group}' for bits, group in sorted(said, key=str))}."
        )
    bits, group = found
    codes = packed.unpack(words.view(torch.int32), bits, columns)
    codes, steps, zeros = with_zeros(codes.to(torch.int16), scales.float(), less.float())
    half = 1 << (bits - 1)
    q = (codes - half).to(torch.int8)
    return held(q, steps, bits=bits, group=group, kind=kind, what=f"{name}.scales", zeros=zeros - half)
