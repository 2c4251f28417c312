"""Mixtures of experts in native calls. Owns: the choice, the chosen experts' products, and weighted sums."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import Act, RouteSpec
from tokenmill.kernels.cpu.activation_codes import GATED
from tokenmill.kernels.cpu.bound import BoundExperts
from tokenmill.kernels.cpu.packed import TYPES
from tokenmill.kernels.routing import scaled

_ORDERS = {"softmax_topk": 0, "topk_softmax": 1, "sigmoid_topk": 2, "topk_sigmoid": 3}


def route(logits: Tensor, kind: int, spec: RouteSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids and gates [T, k]."""
    bias = spec.bias
    logits = logits.contiguous()
    rows, experts = logits.shape
    ids = torch.empty((rows, spec.top_k), dtype=torch.int64)
    gates = torch.empty((rows, spec.top_k), dtype=torch.float32)
    one = not isinstance(spec.scale, Tensor)
    weighing = (spec.normalise, spec.scale if one else 1.0, spec.eps, spec.floor)
    how = (_ORDERS[spec.order], *weighing, spec.groups, spec.top_groups, spec.group_sum2)
    _native.choose(
        logits.data_ptr(), rows, experts, kind, 0 if bias is None else bias.data_ptr(), ids.data_ptr(),
        gates.data_ptr(), spec.top_k, how,
    )  # fmt: skip
    return ids, gates if one else scaled(gates, ids, spec)


def visit(
    bound: BoundExperts, x: Tensor, ids: Tensor, gates: Tensor | None, act: Act | None, first: int | None
) -> Tensor:
    """The chosen experts' products, one expert after the other, as Kernels.experts says."""
    kind, (ups, downs) = TYPES[x.dtype], bound.weights
    if first is not None:
        out = torch.empty((ids.numel(), x.shape[1]), dtype=torch.float32)
        return bound.call(x, ids, None, out, kind, 3, first)
    if gates is None:
        out = torch.empty((ids.numel(), ups[0].shape[0] // (1 + (act in GATED))), dtype=x.dtype)
        return bound.call(x, ids, None, out, kind, 1)
    if act is None:
        return bound.call(x, ids, gates, torch.empty((len(ids), downs[0].shape[0]), dtype=x.dtype), kind, 2)
    return bound.call(x, ids, gates, torch.empty_like(x), kind, 0)


def add_experts(parts: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum over choices."""
    return _weigh(parts, None, gates, torch.empty((len(gates), parts.shape[1]), dtype=dtype))


def add_to_each(x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
    """x [T, S * D] with y [T, D] times its factor [T, S] in each of the S parts of a row."""
    return _weigh(x, y, factors, torch.empty(x.shape, dtype=x.dtype))


def _weigh(x: Tensor, y: Tensor | None, factors: Tensor, out: Tensor) -> Tensor:
    """The sum of x's parts, each times its factor; or with y, y times them in x's parts."""
    (rows, count), x = factors.shape, x.contiguous()
    factors = factors if factors.stride(1) == 1 else factors.contiguous()
    y = None if y is None else y.contiguous()
    sizes = rows, count, out.shape[1] if y is None else y.shape[1]
    _native.weigh(
        x.data_ptr(), 0 if y is None else y.data_ptr(), (factors.data_ptr(), factors.stride(0)), out.data_ptr(), sizes,
        (TYPES[x.dtype], TYPES[out.dtype]),
    )  # fmt: skip
    return out
