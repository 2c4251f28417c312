"""Mixtures of experts in native calls. Owns: the choice, the chosen experts' products, and their weighted sum."""

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
    (rows, top_k), hidden = gates.shape, parts.shape[1]
    parts, gates = parts.contiguous(), gates.contiguous()
    out = torch.empty((rows, hidden), dtype=dtype)
    _native.add_experts(parts.data_ptr(), rows, hidden, out.data_ptr(), TYPES[dtype], gates.data_ptr(), top_k)
    return out
