"""Long chunks. Owns: which ones have their keys gathered, and which kernel reads these. Must not know: how keys are
gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan
from tokenmill.kernels.triton.attention.gathered import ALIGN, Gathered, attend_gathered
from tokenmill.kernels.triton.common import INTERPRETED, pow2

LEAST = 32 if INTERPRETED else 256
"""New tokens of one sequence from which gathering pays."""
MOST = 1 << 16
"""Keys that are gathered at one time: 268 MB for 8 heads of 128 in 16 bits."""
_WIDE = 1 << 26
"""Pairs of a head's query and a key from which gathering heads of more than 128 pays."""
_ROOM = 1 << 28
"""Numbers that are gathered at one time."""


def can_gather(q: Tensor, spec: AttentionSpec, plan: GroupPlan, longest: int, *, hopper: bool) -> bool:
    """Long chunks over whole tables of moderate size, heads that fill a tile; hopper: the device is one."""
    width, pairs = spec.kv.key_dim, longest * plan.reach * spec.heads
    return (
        longest >= LEAST
        and 0 < plan.reach <= min(MOST, _ROOM // (2 * spec.kv.heads * width)) - ALIGN * plan.tables.shape[0]
        and plan.first is None
        and not spec.window
        and spec.alibi is None
        and width == spec.kv.value_dim == pow2(width)
        and (16 <= width <= 128 or (hopper and not spec.softcap and served(width, 0, width) and pairs > _WIDE))
        and (INTERPRETED or q.dtype in (torch.bfloat16, torch.float16))
    )


def attend_long(
    q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext, arranged: tuple[Tensor, Tensor],
    gathered: Gathered, *, pdl: bool, hopper: bool,
) -> None:  # fmt: skip
    """q [T, H, D + R] -> out [T, H, DV], for the sequences with several new tokens; hopper: the device is one. Both may
    be some of the heads of a token: those whose keys were gathered."""
    if hopper and not spec.softcap and served(*gathered.sizes):
        from tokenmill.kernels.triton.attention.hopper import attend_hopper  # the interpreter cannot load it

        attend_hopper(q, out, spec, ctx, arranged, gathered)
    else:
        attend_gathered(q, out, spec, ctx, arranged, gathered, pdl=pdl)


def served(dim: int, beside: int, values: int) -> bool:
    """Has hopper.py tiles for keys and values of these sizes?"""
    wide = dim == values == 256 and not beside
    return wide or (dim in (64, 128) and values in (64, 128) and beside in (0, 16, 32, 64))
