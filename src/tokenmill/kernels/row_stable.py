"""Row-stable building blocks of the reference. Owns: how a row's result stays independent of the rows beside it on a
CPU.

BLAS picks another summation order for another number of rows, so on a CPU every product runs on zero-padded blocks of
exactly ROW_BLOCK rows. Transcendental functions are limited to exp, erf, tanh and log, whose vector and scalar forms
agree bit for bit in torch (sigmoid, silu, gelu and softplus do not). The rest is IEEE arithmetic.
Knows nothing of models, caches or formats.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_BLOCK = 16
"""16 and 32 rows are equally stable here; 16 wastes less on a decode step."""

_MIN_COLUMNS = 16
"""Below this, float32 BLAS treats the rows of one block differently."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias -> [T, N]."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    columns = weight.shape[0]
    if columns < _MIN_COLUMNS:
        weight = F.pad(weight, (0, 0, 0, _MIN_COLUMNS - columns))
        bias = None if bias is None else F.pad(bias, (0, _MIN_COLUMNS - columns))
    blocks = [F.linear(part, weight, bias) for part in row_blocks(x)]
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return y[: x.shape[0], :columns]


def batched(a: Tensor, b: Tensor) -> Tensor:
    """a [B, R, K] @ b [B, K, N] -> [B, R, N]: stable in how many products there are, and in the place of a row."""
    columns = b.shape[2]
    if a.device.type != "cpu":
        return torch.bmm(a, b)
    if len(a) == 1:  # one product alone is computed in another way, which rounds otherwise
        return batched(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    if columns >= _MIN_COLUMNS:
        return torch.bmm(a, b)
    return torch.bmm(a, F.pad(b, (0, _MIN_COLUMNS - columns)))[..., :columns]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, K] @ weight [H, N, K], head by head -> [T, H, N]."""
    if x.device.type != "cpu":
        return torch.einsum("thk,hnk->thn", x, weight).contiguous()
    blocks = [batched(part.transpose(0, 1), weight.transpose(1, 2)) for part in row_blocks(x)]
    return torch.cat(blocks, dim=1)[:, : x.shape[0]].transpose(0, 1).contiguous()


def row_blocks(x: Tensor) -> list[Tensor]:
    """x [T, ...] -> contiguous blocks [ROW_BLOCK, ...], the last one padded with zeros (at least one block)."""
    tokens = x.shape[0]
    short = -tokens % ROW_BLOCK if tokens else ROW_BLOCK
    if short:
        x = torch.cat((x, x.new_zeros(short, *x.shape[1:])))
    return list(x.contiguous().split(ROW_BLOCK))


def sum_last(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept as size 1."""
    if x.numel() == x.shape[-1] and x.device.type == "cpu":
        # A single long row would be reduced by several threads in pieces; a second row keeps it whole.
        return torch.cat((x.reshape(1, -1),) * 2).sum(-1)[0].view(*x.shape[:-1], 1)
    return x.sum(-1, keepdim=True)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension in float32."""
    x = x.float()
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / sum_last(e)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) from stable parts."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) from stable parts. What 1 + exp(x) rounds away is added behind the logarithm, so that the result
    is right to its last bits however small it is."""
    small = torch.exp(-x.abs())
    whole = 1.0 + small
    return x.clamp(min=0.0) + (torch.log(whole) + (small - (whole - 1.0)) / whole)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function."""
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of gelu."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))
