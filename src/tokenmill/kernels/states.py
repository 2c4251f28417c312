"""Recurrent layers in plain torch. Owns: what a short convolution and the gated delta rule do to a row's state.

Sequences are computed one after the other, and so are their tokens. So a result has the same bytes however a sequence
is cut into steps and whatever else is computed with it. A row whose first token is at position 0 begins with a state of
zeros. States are computed in float32, and kept between steps in a type that may be narrower. A state is left with the
row; where drafts are tried, the states behind earlier tokens go to places of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ConvSpec, DeltaSpec, ForwardContext, ScanSpec, SpaceSpec
from tokenmill.kernels import pointwise, row_stable


def spans_of(ctx: ForwardContext) -> Iterator[tuple[int, slice, bool, list[int]]]:
    """(row, its tokens in the batch, does it begin?, where the state behind each of them is left, -1: nowhere) of each
    sequence of the step."""
    rows, starts = ctx.rows, ctx.borders()
    assert rows is not None
    borders = starts.tolist()
    begins = (ctx.positions[starts[:-1].long()] == 0).tolist()
    left = None if rows.left is None else rows.left.tolist()
    for i, row in enumerate(rows.sequences.tolist()):
        first, end = borders[i], borders[i + 1]
        if first < end:
            yield (
                row,
                slice(first, end),
                begins[i],
                [-1] * (end - first - 1) + [row] if left is None else left[first:end],
            )


def short_conv_(inputs: Sequence[Tensor], spec: ConvSpec, state: Tensor, ctx: ForwardContext) -> Tensor:
    """x [T, C] -> each channel's sum over its last K inputs [T, C], or its silu; state [R + 1, K - 1, C]. Of two gates
    [T, C] the first one multiplies x, and the second one the sum."""
    (x, *gates), weight, bias = inputs, spec.weight, spec.bias
    if gates:
        return gates[1] * short_conv_((gates[0] * x,), spec, state, ctx)
    out = torch.empty_like(x)
    for row, tokens, begins, left in spans_of(ctx):
        before = torch.zeros_like(state[row]) if begins else state[row]
        seen = torch.cat((before, x[tokens].to(state.dtype)))
        count = tokens.stop - tokens.start
        y = torch.zeros(count, x.shape[1], device=x.device) if bias is None else bias.expand(count, -1).clone()
        for k in range(len(weight)):
            y += seen[k : k + count].float() * weight[k]
        out[tokens] = (y * row_stable.sigmoid(y) if spec.silu else y).to(x.dtype)
        for n, place in enumerate(left):
            if place >= 0:
                state[place] = seen[n + 1 : n + len(weight)]
    return out


def apart(inputs: Sequence[Tensor], spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """mixed, beta and pace of a delta rule's inputs, whose gates may be one tensor (beta | pace)."""
    mixed, gates, *paces = inputs
    return mixed, gates[:, : spec.value_heads], paces[0] if paces else gates[:, spec.value_heads :]


def delta_rule_(inputs: Sequence[Tensor], spec: DeltaSpec, state: Tensor, ctx: ForwardContext) -> Tensor:
    """The gated delta rule: mixed [T, (q | k | v)], beta and pace (see `apart`) -> [T, Hv, Dv], computed in float32.

    Of each value head's matrix S [Dk, Dv] (state [R + 1, Hv, Dk, Dv]), with k and q of length 1:
    S = exp(-spec.rate softplus(pace + spec.shift)) S;  S += k (b (v - k S));  out = (q / sqrt(Dk)) S,
    where b = spec.most_beta sigmoid(beta). A head has one pace, or (spec.by_key) one for each of its Dk lines. With a
    spec.floor, a line's decay is exp(spec.floor sigmoid(spec.rate (pace + spec.shift))).
    """
    mixed, *gates = apart(inputs, spec)
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    q, k, v = (part.float() for part in mixed.split((keys, keys, values), dim=-1))
    v = v.unflatten(-1, (spec.value_heads, spec.value_dim))
    groups = spec.value_heads // spec.key_heads
    heads = torch.arange(spec.value_heads, device=mixed.device)
    heads = heads % spec.key_heads if spec.tiled else heads // groups
    q, k = (_unit(part.unflatten(-1, (spec.key_heads, -1)))[:, heads] for part in (q, k))
    q = q * spec.key_dim**-0.5
    beta, pace = (part.float().contiguous() for part in gates)
    pace, rate = (pace + spec.shift).unflatten(-1, (spec.value_heads, -1)), spec.rate[:, None]
    slowed = spec.floor * row_stable.sigmoid(rate * pace) if spec.floor else -rate * row_stable.softplus(pace)
    decay = torch.exp(slowed)[..., None]
    beta = row_stable.sigmoid(beta) * spec.most_beta
    out = torch.empty_like(v)
    for row, tokens, begins, left in spans_of(ctx):
        s = _matrix(state[row], begins)
        for t, place in enumerate(left, tokens.start):
            s *= decay[t]
            delta = (v[t] - (s * k[t][:, :, None]).sum(1)) * beta[t][:, None]
            s += k[t][:, :, None] * delta[:, None, :]
            out[t] = (s * q[t][:, :, None]).sum(1)
            if place >= 0:
                state[place] = s
    return out.to(mixed.dtype)


def state_space_(inputs: Sequence[Tensor], spec: SpaceSpec, state: Tensor, ctx: ForwardContext) -> Tensor:
    """A state space with one decay a head: mixed [T, (x | b | c)], rates [T, H] -> [T, H * P], computed in float32.

    Of each head's matrix S [N, P] (state [R + 1, H, N, P]), with pace = softplus(spec.factor rates + spec.shift) held
    between spec.low and spec.high: S = exp(-spec.rate pace) S + b (pace x);
    out = spec.gain (c S + spec.skip x).
    """
    mixed, rates = inputs
    width, keys = spec.heads * spec.head_dim, spec.groups * spec.keys
    x, b, c = (part.float() for part in mixed.split((width, keys, keys), dim=-1))
    x = x.unflatten(-1, (spec.heads, spec.head_dim))
    share = spec.heads // spec.groups
    b, c = (part.unflatten(-1, (spec.groups, -1)).repeat_interleave(share, dim=1) for part in (b, c))
    pace = row_stable.softplus(rates.float().contiguous() * spec.factor + spec.shift).clamp(spec.low, spec.high)
    decay = torch.exp(-spec.rate * pace)
    out = x * spec.skip[:, None]
    for row, tokens, begins, left in spans_of(ctx):
        s = _matrix(state[row], begins)
        for t, place in enumerate(left, tokens.start):
            s *= decay[t][:, None, None]
            s += b[t][:, :, None] * (x[t] * pace[t][:, None])[:, None, :]
            out[t] += (s * c[t][:, :, None]).sum(1)
            if place >= 0:
                state[place] = s
    return (out.flatten(1) * spec.gain).to(mixed.dtype)


def selective_scan_(inputs: Sequence[Tensor], spec: ScanSpec, state: Tensor, ctx: ForwardContext) -> Tensor:
    """A state space with a decay of each number: x and rates [T, C], mixed [T, (b | c)] -> [T, C], in float32.

    Of each channel's numbers s [N] (state [R + 1, N, C]), with pace = softplus(rates):
    s = exp(-spec.rate pace) s + b (pace x);  out = c s + spec.skip x. b and c are normed first, if there are norms.
    """
    x, rates, mixed = inputs
    value, pace = x.float(), row_stable.softplus(rates.float().contiguous())
    b, c = (part.float() for part in mixed.chunk(2, dim=-1))
    if spec.norms is not None:
        b, c = (pointwise.norm(part, norm) for part, norm in zip((b, c), spec.norms, strict=True))
    out = value * spec.skip
    for row, tokens, begins, left in spans_of(ctx):
        s = _matrix(state[row], begins)
        for t, place in enumerate(left, tokens.start):
            s *= torch.exp(-spec.rate * pace[t])
            s += b[t][:, None] * (pace[t] * value[t])
            out[t] += (s * c[t][:, None]).sum(0)
            if place >= 0:
                state[place] = s
    return out.to(x.dtype)


def _matrix(state: Tensor, begins: bool) -> Tensor:
    """A row's state to go on with, in float32."""
    return torch.zeros(state.shape, device=state.device) if begins else state.float().clone()


def _unit(x: Tensor) -> Tensor:
    """Each head at length 1."""
    x = x.contiguous()
    return x / torch.sqrt(row_stable.sum_last(x * x) + 1e-6)


RECURRENCES: dict[type, tuple[str, Callable[[Sequence[Tensor], Any, Tensor, ForwardContext], Tensor]]] = {
    ConvSpec: ("short_conv", short_conv_),
    DeltaSpec: ("delta_rule", delta_rule_),
    SpaceSpec: ("state_space", state_space_),
    ScanSpec: ("selective_scan", selective_scan_),
}
"""Kind of spec -> what it is counted as, and what computes it."""
