"""A few rows of heads, each times a matrix of its own. Owns: the kernel that streams all matrices in one launch.

As in thin.py the matrix is the tall operand; a program has BN of its rows, for BT tokens. Its first piece is asked for
before the launch before it has ended. Must not know: what heads are for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, begin, pow2, product, wait

MOST = 512
"""Rows beyond which a library multiplies as fast."""
_WIDEST = 128
"""Columns of a piece."""


@triton.jit(do_not_specialize=["T", "x_token"])
def _heads_kernel(
    x_ptr, w_ptr, out_ptr, T, x_token, x_head,
    H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    TILES: tl.constexpr = (N + BN - 1) // BN
    head = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    rows = w_ptr + (head.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    w = tl.load(rows, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    wait(PDL)
    source = x_ptr + t[None, :].to(tl.int64) * x_token + head * x_head + k[:, None]
    acc = tl.zeros((BN, BT), dtype=tl.float32)
    for start in tl.static_range(0, K, BK):
        x = tl.load(source + start, mask=(t < T)[None, :] & (start + k < K)[:, None], other=0.0)
        if start + BK < K:
            after = (start + BK + k < K)[None, :]
            w_next = tl.load(rows + (start + BK), mask=(n < N)[:, None] & after, other=0.0)
        acc = product(w, x, acc, WIDE)
        if start + BK < K:
            w = w_next
    place = (t[None, :].to(tl.int64) * H + head) * N + n[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(t < T)[None, :] & (n < N)[:, None])


def can_multiply_heads(x: Tensor, weight: Tensor) -> bool:
    """Few rows x [T, H, K], with numbers of a head side by side, of the weight's type [H, N, K]."""
    return 0 < x.shape[0] <= MOST and x.dtype == weight.dtype and x.stride(2) == 1 and weight.is_contiguous()


def multiply_heads(x: Tensor, weight: Tensor, *, pdl: bool) -> Tensor:
    """x [T, H, K] @ weight [H, N, K], head by head -> [T, H, N]."""
    tokens, heads, inner = x.shape
    width = weight.shape[1]
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    block_t = tokens_of_tile(tokens)
    block_n = rows_of_tile(heads, width)
    _heads_kernel[(heads * triton.cdiv(width, block_n), triton.cdiv(tokens, block_t))](
        x, weight, out, tokens, x.stride(0), x.stride(1),
        H=heads, K=inner, N=width, BT=block_t, BN=block_n, BK=min(_WIDEST, max(16, pow2(inner))),
        WIDE=INTERPRETED or x.dtype == torch.float32, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def tokens_of_tile(tokens: int) -> int:
    """As few as a tensor core takes, or as fill a tile."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def rows_of_tile(heads: int, width: int) -> int:
    """Small tiles where few heads would not give every multiprocessor a program."""
    return 32 if heads * width <= 32 * 132 else 64
