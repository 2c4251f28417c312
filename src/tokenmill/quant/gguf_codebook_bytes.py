"""Rounding matrices into GGUF blocks of codebooks (IQ1, IQ2, IQ3) and of three values (TQ). Owns: their byte layout.

As in gguf_rounding.py, each function takes rows [n, columns] of whole blocks in float32 and the columns' importance,
and gives their bytes [n, bytes of a row] uint8. Must not know: how entries are found, files, names, layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.quant import gguf_fit as fit
from tokenmill.quant.gguf_codebooks import BLOCK, Found, book, find

_THIRDS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.32, 0.25)
"""Scales that are tried for three values, as multiples of the largest magnitude."""


def _found(name: str, rows: Tensor, importance: Tensor | None) -> Found:
    x = rows.reshape(-1, BLOCK)
    return find(x, fit.counted(importance, x), book(name))


def _fields(parts: Tensor, bits: int) -> Tensor:
    """Pack fields of `bits` bits: [..., n] -> [...] int64, lowest field first."""
    return (parts.long() << torch.arange(0, bits * parts.shape[-1], bits, device=parts.device)).sum(-1)


def _raw(words: Tensor, size: int) -> Tensor:
    """Whole numbers [blocks, n] -> bytes [blocks, n * size], lowest byte first."""
    shifts = torch.arange(0, 8 * size, 8, device=words.device)
    return (words.long()[..., None] >> shifts & 255).to(torch.uint8).flatten(1)


def _half(scale: Tensor) -> Tensor:
    return scale.half().view(torch.uint8)


def _pairs(steps: Tensor) -> Tensor:
    """Steps of four bits, two per byte."""
    return _raw(_fields(steps.view(len(steps), -1, 2), 4), 1)


def _seven(negative: Tensor) -> Tensor:
    """Seven of the signs of each 8 numbers. The eighth follows from them, because the number of minus signs is even."""
    return _fields(negative.view(len(negative), -1, 8)[..., :7], 1)


def _eight(negative: Tensor) -> Tensor:
    return _raw(_fields(negative.view(len(negative), -1, 8), 1), 1)


def _joined(rows: Tensor, *parts: Tensor) -> Tensor:
    return torch.cat(parts, 1).view(rows.shape[0], -1)


def _signs_and_step(f: Found) -> Tensor:
    """For each 32 numbers: four times seven signs, and the step in the bits above them."""
    return _raw(_fields(_seven(f.negative).view(len(f.steps), -1, 4), 7) | f.steps.long() << 28, 4)


def iq2_xxs(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; per 32 numbers four entries of 8 numbers (of 256 entries), signs, a step."""
    f = _found("IQ2_XXS", rows, importance)
    entries, signs = _raw(f.entries, 1).view(-1, 8, 4), _signs_and_step(f).view(-1, 8, 4)
    return _joined(rows, _half(f.scale), torch.cat([entries, signs], -1).flatten(1))


def iq2_xs(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; entries of 8 numbers (of 512) with their signs; a step per 16."""
    f = _found("IQ2_XS", rows, importance)
    return _joined(rows, _half(f.scale), _raw(f.entries.long() | _seven(f.negative) << 9, 2), _pairs(f.steps))


def iq2_s(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; entries of 8 numbers (of 1024), signs, high bits of entries; a step per 16."""
    f = _found("IQ2_S", rows, importance)
    high = _raw(_fields((f.entries >> 8).view(len(f.steps), -1, 4), 2), 1)
    return _joined(rows, _half(f.scale), _raw(f.entries & 255, 1), _eight(f.negative), high, _pairs(f.steps))


def iq3_xxs(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; entries of 4 numbers (of 256); per 32 signs and a step."""
    f = _found("IQ3_XXS", rows, importance)
    return _joined(rows, _half(f.scale), _raw(f.entries, 1), _signs_and_step(f))


def iq3_s(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; entries of 4 numbers (of 512), their ninth bits, signs; a step per 32."""
    f = _found("IQ3_S", rows, importance)
    high = _raw(_fields((f.entries >> 8).view(len(f.steps), -1, 8), 1), 1)
    return _joined(rows, _half(f.scale), _raw(f.entries & 255, 1), high, _eight(f.negative), _pairs(f.steps))


def iq1_s(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: a scale; entries of 8 numbers (of 2048); per 32 their high bits, a step, and the
    direction of the shift."""
    f = _found("IQ1_S", rows, importance)
    high = _fields((f.entries >> 8).view(len(f.steps), -1, 4), 3) | f.steps.long() << 12 | f.books.long() << 15
    return _joined(rows, _half(f.scale), _raw(f.entries & 255, 1), _raw(high, 2))


def iq1_m(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: entries of 8 numbers (of 2048); their high bits and shifts; a step per 16, with the bits
    of the scale among the steps."""
    f = _found("IQ1_M", rows, importance)
    high = _raw(_fields((f.entries >> 8 | f.books.int() << 3).view(len(f.steps), -1, 2), 4), 1)
    bits = f.scale.half().view(torch.int16).long() & 0xFFFF
    quarters = (bits >> torch.arange(0, 16, 4, device=bits.device) & 15) << 12
    return _joined(
        rows, _raw(f.entries & 255, 1), high, _raw(_fields(f.steps.view(len(f.steps), -1, 4), 3) | quarters, 2)
    )


def _ternary(rows: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Blocks of 256 numbers: scales, and the values -1, 0, 1 as 0, 1, 2."""
    x = rows.reshape(-1, BLOCK)
    levels = fit.integers(-1, 1)
    scale = fit.scales(x, fit.counted(importance, x), levels, 1.0, _THIRDS).abs().clamp(max=65504.0).half()
    return scale.view(torch.uint8), (levels(fit.divided(x, scale.float())) + 1).long()


def tq1_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers of three values: five per byte (four in the last sixteen bytes) as a fraction of 256; a
    scale."""
    scale, q = _ternary(rows, importance)
    parts = (q[:, :160].view(-1, 5, 32), q[:, 160:240].view(-1, 5, 16), q[:, 240:].view(-1, 4, 4))
    powers = torch.tensor([81, 27, 9, 3, 1], device=q.device)
    whole = torch.cat([(part * powers[: part.shape[1], None]).sum(1) for part in parts], 1)
    return _joined(rows, _raw((whole * 256 + 242) // 243, 1), scale)


def tq2_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers of three values, two bits each; a scale."""
    scale, q = _ternary(rows, importance)
    return _joined(rows, _raw(_fields(q.view(-1, 2, 4, 32).transpose(2, 3), 2).flatten(1), 1), scale)


ENCODERS: dict[str, Callable[..., Tensor]] = {
    "IQ1_S": iq1_s, "IQ1_M": iq1_m, "IQ2_XXS": iq2_xxs, "IQ2_XS": iq2_xs, "IQ2_S": iq2_s, "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s, "TQ1_0": tq1_0, "TQ2_0": tq2_0,
}  # fmt: skip
