"""Rows in bfloat16 times a float32 matrix, as exact as in float32 (routers). Owns: the kernel.

A number in float32 is the sum of three in bfloat16, whose products with x are exact. Tensor cores add up a piece of a
row; they cut off what they cannot hold, so pieces are added up outside. Nothing is widened in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import INTERPRETED, begin, product, shared_memory, wait

_LEAST = 64 if INTERPRETED else 2048
"""Rows below which torch is as fast (measured on an H200)."""


@triton.jit(do_not_specialize=["T", "x_token"])
def _parted_kernel(
    x_ptr, w_ptr, out_ptr, T, x_token,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    source = x_ptr + t[:, None].to(tl.int64) * x_token + k[None, :]
    rows = w_ptr + n[None, :] * K + k[:, None]
    acc = tl.zeros((BT, BN), dtype=tl.float32)
    wait(PDL)
    for start in range(0, K, BK):
        inside = start + k < K
        x = tl.load(source + start, mask=(t < T)[:, None] & inside[None, :], other=0.0)
        w = tl.load(rows + start, mask=(n < N)[None, :] & inside[:, None], other=0.0)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        piece = product(x, (rest - middle.to(tl.float32)).to(tl.bfloat16), tl.zeros((BT, BN), dtype=tl.float32), WIDE)
        piece = product(x, middle, piece, WIDE)
        acc += product(x, high, piece, WIDE)
    out = out_ptr + t[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out, acc, mask=(t < T)[:, None] & (n < N)[None, :])


def multiplies_parted(x: Tensor, weight: Tensor) -> bool:
    """Many rows x [T, K] in bfloat16, and a matrix [N, K] in float32."""
    kinds = x.dtype == torch.bfloat16 and weight.dtype == torch.float32
    return kinds and len(x) >= _LEAST and x.stride(1) == 1 and weight.is_contiguous()


def multiply_parted(
    x: Tensor, weight: Tensor, *, pdl: bool, config: tuple[int, int, int, int, int] | None = None
) -> Tensor:
    """x [T, K] @ weight [N, K].T in float32 [T, N]; config (BT, BN, BK, warps, stages)."""
    (tokens, inner), width = x.shape, len(weight)
    out = torch.empty((tokens, width), dtype=torch.float32, device=x.device)
    block_t, block_n, block_k, warps, stages = config or parted_config(tokens, width)
    _parted_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(width, block_n))](
        x, weight, out, tokens, x.stride(0), N=width, K=inner, BT=block_t, BN=block_n, BK=block_k, WIDE=INTERPRETED,
        PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def parted_config(tokens: int, width: int) -> tuple[int, int, int, int, int]:
    """(BT, BN, BK, warps, stages): measured on an H200."""
    if INTERPRETED:
        return 32, 32, 32, 4, 1
    full = triton.cdiv(tokens, 128) * triton.cdiv(width, 32) >= 128
    return (128, 32, 128, 8, 3) if full and shared_memory() >= 200 << 10 else (32, 64, 128, 8, 3)
