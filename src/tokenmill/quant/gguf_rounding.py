"""Rounding matrices into GGUF blocks. Owns: each type's byte layout, and which search finds its numbers.

Each function takes rows [n, columns] of whole blocks in float32 and gives their bytes [n, bytes of a row] uint8.
importance [columns] says how much each column's errors count.
Must not know: files, names, layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.gguf_blocks import NON_LINEAR
from tokenmill.quant import gguf_codebook_bytes
from tokenmill.quant import gguf_fit as fit
from tokenmill.quant.gguf_fit import counted, divided

_TRIALS = (1.0, 0.97, 0.94, 0.91, 0.87, 0.82, 1.03, 1.06, -1.0, -0.95)
"""Scales that are tried, as multiples of the one that maps the largest magnitude to the end of the levels. Negative: to
the other end."""
_WHOLE = (1.0, 0.97, 0.94, 0.91, 0.87, 0.8, 0.72)
"""Ranges that are tried if a range has two ends, as multiples of the whole range."""
_NAMED = fit.named(NON_LINEAR)
_ENTRIES = fit.entries(NON_LINEAR)
_SHARED = (1.0, 0.98, 0.96, 1.02)


def q8_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale and 32 int8."""
    x = rows.view(-1, 32)
    scale = (x.abs().amax(-1, keepdim=True) / 127.0).half()
    q = divided(x, scale.float()).round().clamp(-127, 127).to(torch.int8)
    return _joined(rows, [scale.view(torch.uint8), q.view(torch.uint8)])


def _centred(rows: Tensor, importance: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
    """Blocks of 32: scales in half precision, and whole numbers -half .. half - 1, stored plus `half`."""
    x = rows.view(-1, 32)
    levels = fit.integers(-half, half - 1)
    scale = fit.scales(x, counted(importance, x), levels, -half, _TRIALS).half()
    return scale.view(torch.uint8), (levels(divided(x, scale.float())) + half).to(torch.uint8)


def _ranged(rows: Tensor, importance: Tensor | None, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 32: scales and minima in half precision, and whole numbers 0 .. most."""
    x, c = rows.view(-1, 32), counted(importance, rows.view(-1, 32))
    low = x.amin(-1, keepdim=True)
    scale, offset = fit.scales_and_offsets(x - low, c, most, _WHOLE)  # here the offset may have any sign
    s, m = scale.half(), (offset + low).half()
    q = divided(x - m.float(), s.float()).round().clamp(0, most).to(torch.uint8)
    return s.view(torch.uint8), m.view(torch.uint8), q


def q4_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale and 32 nibbles, each stored plus 8."""
    scale, q = _centred(rows, importance, 8)
    return _joined(rows, [scale, _nibbles(q)])


def q4_1(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale, the minimum and 32 nibbles."""
    scale, low, q = _ranged(rows, importance, 15)
    return _joined(rows, [scale, low, _nibbles(q)])


def q5_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale, their fifth bits and 32 nibbles, each stored plus 16."""
    scale, q = _centred(rows, importance, 16)
    return _joined(rows, [scale, _bits(q >> 4), _nibbles(q & 15)])


def q5_1(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale, the minimum, their fifth bits and 32 nibbles."""
    scale, low, q = _ranged(rows, importance, 31)
    return _joined(rows, [scale, low, _bits(q >> 4), _nibbles(q & 15)])


def iq4_nl(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 32 numbers: a scale and 32 indices of table entries."""
    x = rows.view(-1, 32)
    scale = fit.scales(x, counted(importance, x), _ENTRIES, NON_LINEAR[0], _TRIALS).half()
    return _joined(rows, [scale.view(torch.uint8), _nibbles(_NAMED(divided(x, scale.float())))])


def iq4_xs(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: eight groups of indices of table entries; scales of six bits times one for all."""
    x = rows.view(-1, 8, 32)
    c = counted(importance, x)
    best = fit.scales(x, c, _ENTRIES, NON_LINEAR[0], _TRIALS)[..., 0]
    d, steps = fit.shared(best, _energy(x, c, best), -32, 31, _SHARED)
    q = _NAMED(divided(x, (d * steps)[..., None]))
    raised = (steps + 32).to(torch.int32)
    high = ((raised >> 4) << torch.arange(0, 16, 2)).sum(1, keepdim=True).to(torch.int16)
    low = (raised & 15).to(torch.uint8)
    nibbles = (q[..., :16] | q[..., 16:] << 4).flatten(1)
    return _joined(
        rows, [d.half().view(torch.uint8), high.view(torch.uint8), low[:, 0::2] | low[:, 1::2] << 4, nibbles]
    )


def _pairs(rows: Tensor, importance: Tensor | None, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """A block of 256 numbers: eight groups of whole numbers 0 .. most [blocks, 8, 32]; the bytes of both shared
    factors; scale and minimum of each group in six bits."""
    x = rows.view(-1, 8, 32)
    c = counted(importance, x)
    step, low = (each[..., 0] for each in fit.scales_and_offsets(x, c, most, _WHOLE))
    d, scales = fit.shared(step, _energy(x, c, step), 0, 63, _SHARED)
    dmin, minima = fit.shared(-low, c.sum(-1), 0, 63, _SHARED)
    q = divided(x + (dmin * minima)[..., None], (d * scales)[..., None]).round_().clamp_(0, most).to(torch.uint8)
    a, b = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = torch.cat([a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, a[:, 4:] & 15 | b[:, 4:] << 4], 1)
    return q, torch.cat([d.half().view(torch.uint8), dmin.half().view(torch.uint8)], 1), packed


def q4_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: eight groups of nibbles; scale and minimum of each in six bits times one for all."""
    q, shared, packed = _pairs(rows, importance, 15)
    return _joined(rows, [shared, packed, (q[:, 0::2] | q[:, 1::2] << 4).flatten(1)])


def q5_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """As Q4_K, with the fifth bits apart."""
    q, shared, packed = _pairs(rows, importance, 31)
    high, low = _over(q >> 4, 1), q & 15
    return _joined(rows, [shared, packed, high, (low[:, 0::2] | low[:, 1::2] << 4).flatten(1)])


def q2_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: sixteen groups of two bits; scale and minimum of each in four bits times one for all."""
    x = rows.view(-1, 16, 16)
    c = counted(importance, x)
    step, low = (each[..., 0] for each in fit.scales_and_offsets(x, c, 3, _WHOLE))
    d, scales = fit.shared(step, _energy(x, c, step), 0, 15, _SHARED)
    dmin, minima = fit.shared(-low, c.sum(-1), 0, 15, _SHARED)
    q = divided(x + (dmin * minima)[..., None], (d * scales)[..., None]).round_().clamp_(0, 3).to(torch.uint8)
    both = scales.to(torch.uint8) | minima.to(torch.uint8) << 4
    shared = [d.half().view(torch.uint8), dmin.half().view(torch.uint8)]
    return _joined(rows, [both, _over(q.view(-1, 2, 4, 32), 2), *shared])


def q3_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: sixteen groups of three bits; scales of six bits times one for all."""
    d, scales, q = _sixteen(rows, importance, 4, 32)
    q, raised = q.view(-1, 8, 32), (scales + 32).to(torch.uint8)
    high = raised >> 4
    upper = high[:, :4] | high[:, 4:8] << 2 | high[:, 8:12] << 4 | high[:, 12:] << 6
    lower = raised[:, :8] & 15 | (raised[:, 8:] & 15) << 4
    low = _over((q & 3).view(-1, 2, 4, 32), 2)
    return _joined(rows, [_over(q >> 2, 1), low, lower, upper, d.half().view(torch.uint8)])


def q6_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """A block of 256 numbers: sixteen groups of six bits; scales of int8 times one for all."""
    d, scales, q = _sixteen(rows, importance, 32, 128)
    q = q.view(-1, 2, 4, 32)
    low = torch.cat([q[:, :, 0] & 15 | q[:, :, 2] << 4, q[:, :, 1] & 15 | q[:, :, 3] << 4], -1)
    high = _over(q >> 4, 2)
    bytes_of_scales = scales.to(torch.int8).view(torch.uint8)
    return _joined(rows, [low.flatten(1), high, bytes_of_scales, d.half().view(torch.uint8)])


def _sixteen(rows: Tensor, importance: Tensor | None, half: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sixteen groups of sixteen: a shared scale, the groups' scales as whole numbers -steps .. steps - 1, and the
    numbers stored plus `half`."""
    x = rows.view(-1, 16, 16)
    c, levels = counted(importance, x), fit.integers(-half, half - 1)
    best = fit.scales(x, c, levels, -half, _TRIALS)[..., 0]
    d, scales = fit.shared(best, _energy(x, c, best), -steps, steps - 1, _SHARED)
    return d, scales, (levels(divided(x, (d * scales)[..., None])) + half).to(torch.uint8)


ENCODERS = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, **gguf_codebook_bytes.ENCODERS,
}  # fmt: skip


def _energy(x: Tensor, c: Tensor, step: Tensor) -> Tensor:
    """The weight of an error of a group's scale: the squares of the whole numbers that it multiplies [blocks,
    groups]."""
    return (c * divided(x, step[..., None]).square()).sum(-1)


def _nibbles(q: Tensor) -> Tensor:
    """[blocks, 32] -> 16 bytes: the second half in the upper nibbles."""
    return q[:, :16] | q[:, 16:] << 4


def _bits(q: Tensor) -> Tensor:
    """[blocks, 8 n] of 0 and 1 -> n bytes, lowest bit first."""
    return (q.view(len(q), -1, 8) << torch.arange(8, dtype=torch.uint8, device=q.device)).sum(-1).to(torch.uint8)


def _over(q: Tensor, bits: int) -> Tensor:
    """[blocks, ..., 8 / bits, width] -> [blocks, ... * width] bytes. Fields lie above each other, the first one
    lowest."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=q.device)[:, None]
    return (q << shifts).sum(-2).to(torch.uint8).flatten(1)


def _joined(rows: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(parts[0].shape[0], -1) for part in parts], 1).view(rows.shape[0], -1)
