"""Recurrent layers on csrc. Owns: passing a step's rows and the addresses of their states.

A result of None means that csrc does not do it (other types, very wide keys), and plain torch does. Must not know:
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import ConvSpec, DeltaSpec, ForwardContext, NormSpec, ScanSpec, SpaceSpec
from tokenmill.kernels import row_stable
from tokenmill.kernels.cpu.packed import TYPES


def step_of(ctx: ForwardContext, states: int) -> tuple[int, int, int, int, int, int]:
    """Addresses of rows, borders, positions and places (0: none), how many sequences, how many states there are."""
    assert ctx.rows is not None, "recurrent layers find their states by row"
    rows, left = ctx.rows.sequences, ctx.rows.left
    addresses = rows.data_ptr(), ctx.borders().data_ptr(), ctx.positions.data_ptr()
    return *addresses, 0 if left is None else left.data_ptr(), rows.shape[0], states


def short_conv_(inputs: Sequence[Tensor], spec: ConvSpec, state: Tensor, ctx: ForwardContext) -> Tensor | None:
    """See kernels/states.py."""
    (x, *gates), weight, bias = inputs, spec.weight, spec.bias
    if gates:
        found = short_conv_((gates[0] * x,), spec, state, ctx)
        return None if found is None else gates[1] * found
    taps, kind = weight.shape[0], TYPES.get(x.dtype)
    if kind is None or state.dtype != x.dtype or not 2 <= taps <= _native.MOST_TAPS or x.stride(1) != 1:
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    addresses = x.data_ptr(), out.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    sizes = x.shape[1], x.stride(0), taps, kind, spec.silu
    _native.short_conv(*addresses, state.data_ptr(), *sizes, step_of(ctx, state.shape[0]))
    return out


def gated_norm(x: Tensor, gate: Tensor, spec: NormSpec | None, size: int, *, first: bool, act: str) -> Tensor | None:
    """See ReferenceKernels.gated_norm; without a norm it is the gate of `activate`."""
    kind = TYPES.get(x.dtype)
    if (
        kind is None
        or gate.dtype != x.dtype
        or x.stride(1) != 1
        or gate.stride(1) != 1
        or act not in ("silu", "sigmoid")
    ):
        return None
    if spec is not None and spec.weight.dtype != x.dtype:
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    norm = (0, 1, 0.0, 0.0) if spec is None else (spec.weight.data_ptr(), len(spec.weight), spec.eps, spec.offset)
    sizes = x.shape[0], x.shape[1], size, x.stride(0), gate.stride(0)
    _native.gated_norm(x.data_ptr(), gate.data_ptr(), out.data_ptr(), norm, sizes, first, act == "silu", kind)
    return out


def delta_rule_(inputs: Sequence[Tensor], spec: DeltaSpec, state: Tensor, ctx: ForwardContext) -> Tensor | None:
    """See kernels/states.py."""
    mixed, gates = inputs if len(inputs) == 2 else (inputs[0], torch.cat(tuple(inputs[1:]), dim=-1))
    if spec.floor:
        plain = replace(spec, floor=0.0, rate=torch.ones_like(spec.rate), shift=torch.zeros_like(spec.shift))
        found = delta_rule_((mixed.float(), _unbounded(gates, spec)), plain, state, ctx)
        return None if found is None else found.to(mixed.dtype)
    kind = TYPES.get(mixed.dtype)
    if (
        kind is None
        or state.dtype != torch.float32
        or spec.key_dim > _native.MOST_KEYS
        or mixed.stride(1) != 1
        or gates.stride(1) != 1
    ):
        return None
    out = torch.empty(len(mixed), spec.value_heads, spec.value_dim, dtype=mixed.dtype)
    heads = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    addresses = mixed.data_ptr(), gates.data_ptr(), out.data_ptr(), state.data_ptr()
    fixed = spec.rate.data_ptr(), spec.shift.data_ptr(), heads
    strides, step = (mixed.stride(0), gates.stride(0)), step_of(ctx, state.shape[0])
    _native.delta_rule(*addresses, *fixed, *strides, spec.most_beta, kind, spec.by_key, spec.tiled, step)
    return out


def _unbounded(gates: Tensor, spec: DeltaSpec) -> Tensor:
    """(beta | pace) with the paces that decay as much without a floor: their softplus is its logarithm."""
    beta, pace = gates.float().split((spec.value_heads, gates.shape[1] - spec.value_heads), dim=-1)
    rate = spec.rate.repeat_interleave(pace.shape[1] // spec.value_heads)
    soft = -spec.floor * row_stable.sigmoid(rate * (pace + spec.shift))
    return torch.cat((beta, soft + torch.log(1.0 - torch.exp(-soft))), dim=-1)


def state_space_(inputs: Sequence[Tensor], spec: SpaceSpec, state: Tensor, ctx: ForwardContext) -> Tensor | None:
    """See kernels/states.py."""
    mixed, rates = inputs
    rates = rates if spec.factor == 1.0 else rates * spec.factor
    kind = TYPES.get(mixed.dtype) if state.dtype == torch.float32 else None
    if kind is None or mixed.stride(1) != 1 or rates.stride(1) != 1 or rates.dtype != mixed.dtype:
        return None
    out = torch.empty(len(mixed), spec.heads * spec.head_dim, dtype=mixed.dtype)
    tensors = mixed.data_ptr(), rates.data_ptr(), out.data_ptr(), state.data_ptr()
    fixed = spec.rate.data_ptr(), spec.shift.data_ptr(), spec.skip.data_ptr()
    sizes = spec.heads, spec.head_dim, spec.groups, spec.keys
    strides, bounds = (mixed.stride(0), rates.stride(0)), (spec.low, spec.high)
    _native.state_space(tensors, fixed, sizes, strides, bounds, kind, step_of(ctx, state.shape[0]))
    return out if spec.gain == 1.0 else out * spec.gain


def selective_scan_(inputs: Sequence[Tensor], spec: ScanSpec, state: Tensor, ctx: ForwardContext) -> Tensor | None:
    """See kernels/states.py."""
    x = inputs[0]
    kind = TYPES.get(x.dtype)
    if kind is None or any(one.dtype != x.dtype or one.stride(1) != 1 for one in inputs):
        return None
    if state.shape[1] > _native.MOST_SCANNED or state.dtype != torch.float32:
        return None
    out = torch.empty(x.shape, dtype=x.dtype)
    tensors = *(one.data_ptr() for one in inputs), out.data_ptr(), state.data_ptr()
    sizes, strides = (x.shape[1], state.shape[1]), tuple(one.stride(0) for one in inputs)
    numbers = spec.rate.data_ptr(), spec.skip.data_ptr()
    _native.selective_scan(tensors, numbers, sizes, strides, kind, step_of(ctx, state.shape[0]))
    return out


RECURRENCES: dict[type, tuple[str, Callable[[Sequence[Tensor], Any, Tensor, ForwardContext], Tensor | None]]] = {
    ConvSpec: ("short_conv", short_conv_),
    DeltaSpec: ("delta_rule", delta_rule_),
    SpaceSpec: ("state_space", state_space_),
    ScanSpec: ("selective_scan", selective_scan_),
}
"""Kind of spec -> what it is counted as, and what computes it."""
