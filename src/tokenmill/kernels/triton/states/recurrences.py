"""Which kernels compute a recurrent layer. Owns: the table of kinds, and what each leaves to plain torch.

Must not know: models, the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ConvSpec, DeltaSpec, ForwardContext, ScanSpec, SpaceSpec
from tokenmill.kernels.states import apart
from tokenmill.kernels.triton.launch import Launch
from tokenmill.kernels.triton.states.chunks import can_chunk, chunked_delta_
from tokenmill.kernels.triton.states.recurrent import ALL, SHORT, delta_rule_, short_conv_
from tokenmill.kernels.triton.states.space import selective_scan_, state_space_
from tokenmill.kernels.triton.states.space_chunks import can_chunk_space, chunked_space_


def _conv(
    launch: Launch, inputs: Sequence[Tensor], spec: ConvSpec, state: Tensor, ctx: ForwardContext
) -> Tensor | None:
    x = inputs[0]
    if x.stride(1) != 1 or x.shape[0] == 0 or any(one.stride() != x.stride() for one in inputs):
        return None
    launch.count("short_conv")
    return short_conv_(inputs, spec, state, ctx, pdl=launch.pdl)


def _delta(
    launch: Launch, inputs: Sequence[Tensor], spec: DeltaSpec, state: Tensor, ctx: ForwardContext
) -> Tensor | None:
    """Token by token where a row has few (or where its bytes must not depend on the step), in chunks where it has
    many."""
    mixed, beta, pace = apart(inputs, spec)
    gates = beta, pace
    if any(one.stride(1) != 1 for one in (mixed, *gates)) or mixed.shape[0] == 0 or spec.key_dim > 256:
        return None
    launch.count("delta_rule")
    out = torch.empty((len(mixed), spec.value_heads, spec.value_dim), dtype=mixed.dtype, device=mixed.device)
    chunked = ctx.max_query > SHORT and can_chunk(spec, mixed.dtype, small=launch.small) and not launch.steady
    if chunked:
        chunked_delta_(mixed, gates, spec, state, ctx, out, small=launch.small)
    if not chunked or len(ctx.kv_len) > 1:
        most = SHORT if chunked else ALL
        delta_rule_(mixed, gates, spec, state, ctx, out, most=most, steady=launch.steady, pdl=launch.pdl)
    return out


def _space(
    launch: Launch, inputs: Sequence[Tensor], spec: SpaceSpec, state: Tensor, ctx: ForwardContext
) -> Tensor | None:
    """As the delta rule: token by token, or in chunks."""
    mixed, rates = inputs
    if mixed.stride(1) != 1 or mixed.shape[0] == 0:
        return None
    launch.count("state_space")
    rates = rates if rates.stride(1) == 1 else rates.contiguous()
    out = torch.empty((len(mixed), spec.heads * spec.head_dim), dtype=mixed.dtype, device=mixed.device)
    chunked = ctx.max_query > SHORT and can_chunk_space(spec, mixed.dtype) and not launch.steady
    if chunked:
        chunked_space_(mixed, rates, spec, state, ctx, out)
    if not chunked or len(ctx.kv_len) > 1:
        most = SHORT if chunked else ALL
        state_space_(mixed, rates, spec, state, ctx, out, most=most, steady=launch.steady, pdl=launch.pdl)
    return out


def _scan(
    launch: Launch, inputs: Sequence[Tensor], spec: ScanSpec, state: Tensor, ctx: ForwardContext
) -> Tensor | None:
    x, rates, mixed = inputs
    if any(one.stride(1) != 1 for one in inputs) or x.shape[0] == 0:
        return None
    launch.count("selective_scan")
    return selective_scan_(x, rates, mixed, spec, state, ctx, pdl=launch.pdl)


RECURRENCES: dict[type, tuple[str, Callable[[Launch, Sequence[Tensor], Any, Tensor, ForwardContext], Tensor | None]]]
RECURRENCES = {
    ConvSpec: ("short_conv", _conv),
    DeltaSpec: ("delta_rule", _delta),
    SpaceSpec: ("state_space", _space),
    ScanSpec: ("selective_scan", _scan),
}
"""Kind of spec -> what it is counted as, and what computes it; None: plain torch does."""
