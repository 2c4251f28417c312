"""Codes of few bits in 32 bit words, without gaps: code i of a row begins at bit i * bits. Owns: packing and unpacking.

compressed-tensors and GPTQ tools store codes like this (a code may straddle two words). Must not know: files, what
codes mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_RUN = 32
"""This many codes fill whole words, whatever their bits."""


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """words [n, m] int32 -> the first `count` codes of each row, [n, count] uint8."""
    if bits in (4, 8):  # codes are whole bytes, or halves of them with the lower half first
        # A transposed matrix of one column counts as contiguous, whatever its strides. Only a copy has the strides that
        # a view as bytes needs.
        words = words.contiguous() if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
        raw = words.view(torch.uint8)
        codes = raw if bits == 8 else torch.stack((raw & 15, raw >> 4), -1).flatten(1)
        return codes[:, :count].contiguous()
    runs = F.pad(words, (0, -words.shape[1] % bits)).view(words.shape[0], -1, bits).long() & 0xFFFFFFFF
    codes = torch.empty(*runs.shape[:2], _RUN, dtype=torch.uint8, device=words.device)
    for i in range(_RUN):
        word, place = divmod(i * bits, 32)
        found = runs[..., word] >> place
        if place + bits > 32:
            found = found | runs[..., word + 1] << (32 - place)
        codes[..., i] = (found & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)[:, :count].contiguous()


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [n, count] (0 .. 2^bits - 1) -> [n, ceil(count * bits / 32)] int32; the inverse of `unpack`."""
    rows, count = codes.shape
    runs = F.pad(codes.long(), (0, -count % _RUN)).view(rows, -1, _RUN)
    words = torch.zeros(rows, runs.shape[1], bits, dtype=torch.int64, device=codes.device)
    for i in range(_RUN):
        word, place = divmod(i * bits, 32)
        words[..., word] |= runs[..., i] << place & 0xFFFFFFFF
        if place + bits > 32:
            words[..., word + 1] |= runs[..., i] >> (32 - place)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.flatten(1)[:, : -(-count * bits // 32)].to(torch.int32).contiguous()
