"""Adding up what came from another GPU. Owns: waiting for it within the launch, the sum with a residual, and its norm.

The other GPU copies its part here and then writes a number behind it; programs begin once that number is there.
Must not know: groups, layers, who copies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.compute.model import Addition
from tokenmill.kernels.triton.common import begin, pow2, wait
from tokenmill.kernels.triton.pointwise import add_sum, norm_stored, stored_norm

MOST_PROGRAMS = 528
"""Four of a Hopper's multiprocessor: each asks once whether the other part is there, then has several rows."""


@triton.jit(do_not_specialize=["turn", "rows"])
def _arrived_kernel(
    mine_ptr, theirs_ptr, residual_ptr, out_ptr, normed_ptr, turn_ptr, turn, rows, D,
    scale, within_ptr, within_bias_ptr, within_eps, norm_ptr, norm_bias_ptr, norm_eps,
    WITHIN: tl.constexpr, WITHIN_BIAS: tl.constexpr, WITHIN_OFFSET: tl.constexpr,
    NORM: tl.constexpr, NORM_BIAS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    d = tl.arange(0, BLOCK)
    real = d < D
    wait(PDL)
    while tl.atomic_add(turn_ptr, 0, sem="acquire", scope="sys") - turn < 0:
        pass
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * D + d
        mine = tl.load(mine_ptr + at, mask=real, other=0.0).to(tl.float32)
        theirs = tl.load(theirs_ptr + at, mask=real, other=0.0, cache_modifier=".cg").to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=real, other=0.0).to(tl.float32)
        total = add_sum(residual, mine + theirs, scale, within_ptr, within_bias_ptr, d, real, D, within_eps,
                        WITHIN, WITHIN_BIAS, WITHIN_OFFSET, PLAIN, out_ptr.dtype.element_ty)  # fmt: skip
        tl.store(out_ptr + at, total, mask=real)
        if NORM != "none":
            y = norm_stored(total.to(tl.float32), norm_ptr, norm_bias_ptr, d, real, D, norm_eps,
                            NORM, NORM_BIAS, NORM_OFFSET)  # fmt: skip
            tl.store(normed_ptr + at, y.to(normed_ptr.dtype.element_ty), mask=real)


def add_arrived(
    mine: Tensor, theirs: Tensor, turns: Tensor, turn: int, residual: Tensor, addition: Addition, out: Tensor,
    normed: Tensor | None, *, pdl: bool,
) -> None:  # fmt: skip
    """out = residual + scale * within(mine + theirs) (two ranks' parts, so in any order), and normed its norm: rows
    [T, D] of one type. theirs is there when turns [1] int32 is `turn`, or beyond it."""
    rows, width = out.shape
    block = pow2(width)
    plain = addition.within is None and addition.scale == 1.0
    _arrived_kernel[(min(rows, MOST_PROGRAMS),)](
        mine, theirs, residual, out, normed, turns, turn, rows, width, float(addition.scale),
        **stored_norm(addition.within, "within"), **stored_norm(addition.norm, "norm"),
        PLAIN=plain, BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
