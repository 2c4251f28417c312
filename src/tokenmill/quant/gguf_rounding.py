"""Rounding matrices into GGUF blocks. Owns: Q8_0, Q4_0, Q4_K and Q6_K, with the scales that lose least of those tried.

Each function takes rows [n, columns] of whole blocks in float32 and gives their bytes [n, bytes of a row] uint8;
importance [columns] says how much each column's errors count.
Must not know: files, names, layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TRIALS_4 = (1.0, 0.975, 0.95, 0.925, 1.025, 1.05, -1.0, -0.95)
"""Scales tried for Q4_0, times the one that makes the largest magnitude -8; negative: it becomes +8 (cut to 7)."""
_TRIALS_K = (1.0, 0.97, 0.94, 0.91, 0.87)
_TRIALS_6 = (1.0, 0.98, 0.96, 0.94)


def q8_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """32 numbers: a scale and 32 int8."""
    x = rows.view(-1, 32)
    scale = (x.abs().amax(-1, keepdim=True) / 127.0).half()
    q = _divided(x, scale.float()).round().clamp(-127, 127).to(torch.int8)
    return _joined(rows, [scale.view(torch.uint8), q.view(torch.uint8)])


def q4_0(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """32 numbers: a scale and 32 nibbles, 8 above their value."""
    x = rows.view(-1, 32)
    owner = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = _best(
        x, [(owner / -8.0 * by).half().float() for by in _TRIALS_4], lambda s: _steps(x, s, -8, 7) * s, importance
    )
    q = (_steps(x, scale, -8, 7) + 8).to(torch.uint8)
    return _joined(rows, [scale.half().view(torch.uint8), q[:, :16] | q[:, 16:] << 4])


def q4_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """256 numbers: eight groups of nibbles, scale and minimum of each in six bits of a shared one."""
    x = rows.view(-1, 8, 32)
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True)
    trials = [torch.cat([(high - low).clamp(min=0.0) / 15.0 * by, low * by], -1) for by in _TRIALS_K]

    def back(t: Tensor) -> Tensor:
        return _steps(x - t[..., 1:], t[..., :1], 0, 15) * t[..., :1] + t[..., 1:]

    best = _best(x, trials, back, importance)
    (d, scales), (dmin, minima) = _six_bits(best[..., 0]), _six_bits(-best[..., 1])
    step, offset = (d * scales)[..., None], (dmin * minima)[..., None]
    q = _steps(x + offset, step, 0, 15).to(torch.uint8)
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).flatten(1)
    a, b = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = torch.cat([a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, a[:, 4:] & 15 | b[:, 4:] << 4], 1)
    return _joined(rows, [d.half().view(torch.uint8), dmin.half().view(torch.uint8), packed, nibbles])


def q6_k(rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """256 numbers: sixteen groups of six bits, scales of int8 times a shared one."""
    x = rows.view(-1, 16, 16)
    owner = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    trials = [owner / -32.0 * by for by in _TRIALS_6]
    best = _best(x, trials, lambda s: _steps(x, s, -32, 31) * s, importance)[..., 0]
    largest = best.gather(-1, best.abs().argmax(-1, keepdim=True))
    d = (largest / -128.0).half().float()
    scales = _divided(best, d).round().clamp(-128, 127)
    q = (_steps(x, (d * scales)[..., None], -32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.cat([q[:, :, 0] & 15 | q[:, :, 2] << 4, q[:, :, 1] & 15 | q[:, :, 3] << 4], -1)
    high = q >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    bytes_of_scales = scales.to(torch.int8).view(torch.uint8)
    return _joined(rows, [low.flatten(1), high.flatten(1), bytes_of_scales, d.half().view(torch.uint8)])


ENCODERS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k}


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [blocks, 8] >= 0 -> a shared scale [blocks, 1] exact in half precision, and whole numbers to 63."""
    shared = (values.amax(-1, keepdim=True) / 63.0).half().float()
    return shared, _divided(values, shared).round().clamp(0, 63)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale != 0, x / scale, 0.0)


def _steps(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return _divided(x, scale).round_().clamp_(low, high)


def _best(
    x: Tensor, trials: list[Tensor], back: Callable[[Tensor], Tensor], importance: Tensor | None = None
) -> Tensor:
    """Of several parameters per group (last dimension), those whose result is nearest to x; importance [columns]: what
    a column's squared error counts."""
    counts = None if importance is None else importance.expand(x.numel() // len(importance), -1).reshape(x.shape)
    best, least = trials[0], None
    for trial in trials:
        error = (back(trial) - x).square()
        error = (error if counts is None else error * counts).sum(-1, keepdim=True)
        if least is None:
            least = error
            continue
        better = error < least
        best, least = torch.where(better, trial, best), torch.where(better, error, least)
    return best


def _joined(rows: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(parts[0].shape[0], -1) for part in parts], 1).view(rows.shape[0], -1)
