"""Torch operations between native ones. Owns: which of them a recording may make again, and how.

An operation may be made again if its result depends only on its arguments' numbers, and its shape on no number: it then
writes where it wrote before. Operations that read numbers on the host, draw random numbers, or are not listed may not.
Must not know: tapes, what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _named(names: str) -> list[Any]:
    """Operations of torch by name and overload."""
    found = (name.partition(".") for name in names.split())
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in found]


_INTO: dict[Any, Any] = {
    op: op.overloadpacket.out
    for op in _named(
            "abs add.Tensor bmm cat clamp cos div.Tensor erf exp expm1 gather index_select log log1p matmul maximum "
            "mean.dim minimum mm mul.Tensor neg reciprocal relu rsqrt sigmoid silu sin sqrt stack sub.Tensor tanh"
    )
} | dict(
    zip(
        _named("eq.Scalar index.Tensor pow.Tensor_Scalar scatter.src scatter.value sum.dim_IntList where.self"),
        _named("eq.Scalar_out index.Tensor_out pow.Tensor_Scalar_out scatter.src_out scatter.value_out sum.IntList_out "
               "where.self_out"),
        strict=True,
    )
)  # fmt: skip
"""Operation -> the same into memory that is there."""
_COPIED = frozenset(_named("contiguous clone to.dtype _to_copy to.dtype_layout"))
"""A copy of the first argument in another type or layout."""
_WHOLE = frozenset(
    _named(
        "amax arange arange.start argmax einsum flatten.using_ints full ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor "
        "le.Scalar lt.Scalar remainder.Scalar masked_fill.Scalar max.dim new_zeros ones ones_like outer pad pow.Scalar "
        "repeat repeat_interleave.self_int reshape rsub.Scalar softmax.int softplus sort.stable square topk "
        "var.correction where.ScalarOther where.ScalarSelf zeros zeros_like"
    )
)
"""Computed anew, and copied to where it was."""
_IN_PLACE = frozenset(
    _named("add_.Tensor clamp_ copy_ div_.Tensor fill_.Scalar index_add_ index_put_ mul_.Tensor sub_.Tensor zero_")
)
HOST = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::resolve_conj",
                  "aten::resolve_neg"})  # fmt: skip
"""What is called when numbers are read on the host."""


def again(func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> Callable[[], object] | None:
    """What writes `made` once more, which func(*args, **kwargs) gave; None: it cannot be done."""
    if any(_masks(each) for each in (*args, *kwargs.values())):
        return None
    if func in _IN_PLACE:
        return partial(func, *args, **kwargs)
    if func in _INTO:
        return partial(_INTO[func], *args, **kwargs, out=made[0])
    if func in _COPIED:
        return partial(made[0].copy_, args[0])
    return partial(_anew, func, args, kwargs, made) if func in _WHOLE else None


def _anew(func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> None:
    found = func(*args, **kwargs)
    for place, one in zip(made, [found] if isinstance(found, Tensor) else found, strict=True):
        place.copy_(one)


def _masks(argument: Any) -> bool:
    """Is it a list of indices with a mask, whose numbers decide a shape?"""
    return isinstance(argument, (list, tuple)) and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in argument
    )
