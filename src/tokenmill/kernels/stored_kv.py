"""K/V as the cache stores them, in plain torch: the specification. Owns: rounding into pages and reading back.

A group's scale is its largest magnitude over LARGEST, kept as bfloat16 (which has float32's range). Numbers are rounded
against the kept scale, so reading back errs by half a step at most. In int4 a group has a scale and its least number,
both kept as bfloat16, with integers from 0 to 15. Knows nothing of attention or schedules.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tokenmill.compute.forward import KVView

MOST = 15
"""The largest of four bits."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def page_parts(view: KVView) -> Iterable[Tensor]:
    """The tensors of a layer's pages: latent values lie in the keys."""
    parts = [p for p in (view.key, view.value, view.key_scale, view.value_scale) if p is not None]
    return {p.data_ptr(): p for p in reversed(parts)}.values()


def store(view: KVView, block: Tensor, offset: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Write k [T, heads, Dk] and v [T, heads, Dv] (None: latent, values are a part of k) to these places [T]."""
    _put(view.key, view.key_scale, block, offset, k)
    if v is not None:
        _put(view.value, view.value_scale, block, offset, v)


def load(pages: Tensor, scale: Tensor | None, block: Tensor, offset: Tensor) -> Tensor:
    """pages [blocks, heads, size, D] at these places [...] -> [..., heads, D] in float32."""
    if scale is None:
        return pages[block, :, offset].float()
    if pages.dtype == torch.uint8:
        return unpacked(pages[block, :, offset], scale[block, :, offset])
    found = pages.view(torch.uint8)[block, :, offset].view(pages.dtype).float()
    scales = scale[block, :, offset].float()
    parts = found.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return parts.flatten(-2)


def quantise(x: Tensor, dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor]:
    """x [..., D] -> numbers [..., D] of `dtype` (int8, float8_e4m3fn) and scales [..., groups] bfloat16."""
    largest = LARGEST[dtype]
    parts = x.float().unflatten(-1, (groups, -1))
    scale = (parts.abs().amax(-1) / largest).to(torch.bfloat16)
    wide = scale.float()[..., None]
    # A scale of zero means that everything is (nearly) zero; NaN and infinity come back as NaN through the scale.
    numbers = torch.where(wide > 0, parts / wide, 0.0).clamp(-largest, largest)
    numbers = numbers.nan_to_num(0.0)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype).flatten(-2), scale


def packed(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """x [..., D] -> bytes [..., D / 2] and scales, then least numbers [..., 2 * groups] bfloat16."""
    parts = x.float().unflatten(-1, (groups, -1))
    low = parts.amin(-1).to(torch.bfloat16)
    scale = ((parts.amax(-1) - low.float()) / MOST).clamp(min=0.0).to(torch.bfloat16)
    wide, least = scale.float()[..., None], low.float()[..., None]
    # Rounding the least number down or up shifts the grid by less than a step; NaN and infinity come back as NaN.
    steps = torch.where(wide > 0, (parts - least) / wide, 0.0).nan_to_num(0.0).round().clamp(0, MOST)
    first, second = steps.to(torch.uint8).flatten(-2).chunk(2, -1)
    return first | second << 4, torch.cat([scale, low], -1)


def unpacked(numbers: Tensor, scale: Tensor) -> Tensor:
    """The inverse: bytes [..., D / 2], scales and least numbers [..., 2 * groups] -> [..., D] in float32."""
    steps = torch.cat([numbers & MOST, numbers >> 4], -1).float()
    scales, least = (part.float()[..., None] for part in scale.chunk(2, -1))
    return (steps.unflatten(-1, (scales.shape[-2], -1)) * scales + least).flatten(-2)


def _put(pages: Tensor, scale: Tensor | None, block: Tensor, offset: Tensor, x: Tensor) -> None:
    if scale is None:
        pages[block, :, offset] = x.to(pages.dtype)
        return
    if pages.dtype == torch.uint8:
        pages[block, :, offset], scale[block, :, offset] = packed(x, scale.shape[-1] // 2)
        return
    numbers, scale[block, :, offset] = quantise(x, pages.dtype, scale.shape[-1])
    pages.view(torch.uint8)[block, :, offset] = numbers.view(torch.uint8)  # torch does not index float8 everywhere
