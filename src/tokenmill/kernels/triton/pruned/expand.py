"""A 2:4 matrix with its zeros. Owns: the kernel that writes it. Must not know: who multiplies it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.common import begin, wait
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix


@triton.jit
def _code_at(place_ptr, n, four, BLOCKS, SMALL: tl.constexpr):
    """Where the two numbers of a row's four belong (layout.py)."""
    FOURS: tl.constexpr = 8 if SMALL else 4  # of a thread
    part = four % FOURS
    block = n // 16 * BLOCKS + four // (4 * FOURS)
    word = block * (8 * FOURS) + part // 4 * 32 + n % 8 * 4 + part % 4
    field = four % (4 * FOURS) // FOURS + 4 * (n % 16 // 8)
    return (tl.load(place_ptr + word) >> (4 * field).to(tl.int32)) & 15


@triton.jit
def _expand_kernel(
    kept_ptr, place_ptr, out_ptr, K, BLOCKS, SMALL: tl.constexpr, ROWS: tl.constexpr, FOURS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of FOURS times four columns a program."""
    begin(PDL)
    wait(PDL)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    four = (tl.program_id(1) * FOURS + tl.arange(0, FOURS))[None, :]
    code = _code_at(place_ptr, n, four, BLOCKS, SMALL)
    first, second = code & 3, code >> 2
    a, b = tl.load(kept_ptr + n * (K // 2) + 2 * four), tl.load(kept_ptr + n * (K // 2) + 2 * four + 1)
    none = tl.zeros_like(a)
    c0 = tl.where(first == 0, a, none)
    c1 = tl.where(first == 1, a, tl.where(second == 1, b, none))
    c2 = tl.where(first == 2, a, tl.where(second == 2, b, none))
    c3 = tl.where(second == 3, b, none)
    whole = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (ROWS, 4 * FOURS))
    k = tl.program_id(1) * (4 * FOURS) + tl.arange(0, 4 * FOURS)
    tl.store(out_ptr + n * K + k[None, :], whole)


def with_zeros(weight: PrunedMatrix, *, pdl: bool) -> Tensor:
    """The matrix [N, K] in its own type, without scales."""
    rows, columns = weight.shape
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.places.device)
    kept, filled, small = weight.kept, out, out.element_size() == 1
    if small:
        kept, filled = kept.view(torch.uint8), out.view(torch.uint8)
    _expand_kernel[(rows // 32, columns // 128)](
        kept, weight.places, filled, columns, columns // (128 if small else 64), SMALL=small, ROWS=32, FOURS=32,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
