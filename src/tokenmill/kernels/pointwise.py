"""Norms, activations and rotations in plain torch. Owns: their arithmetic. A row's bytes depend on that row alone.
Must not know: layers, devices, who counts calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import NormSpec, RopeSpec, Touches
from tokenmill.kernels import row_stable


def norm(x: Tensor, spec: NormSpec) -> Tensor:
    """x [..., D] -> the same shape and dtype, statistics in float32."""
    y = x.float()
    width = x.shape[-1]
    if spec.kind == "layer":
        y = y - row_stable.sum_last(y) / width
    y = y / torch.sqrt(row_stable.sum_last(y * y) / width + spec.eps)
    weight = spec.weight.float()
    y = y * (weight + spec.offset if spec.offset else weight)
    return (y if spec.bias is None else y + spec.bias.float()).to(x.dtype)


def activate(x: Tensor, act: str) -> Tensor:
    """act(x); where it has a gate, x holds [gate, up]."""
    if act == "oai_swiglu":
        gate, up = x.chunk(2, dim=-1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1.0) * (gate * row_stable.sigmoid(1.702 * gate))
    if act == "clipped_silu_mul":
        gate, up = x.chunk(2, dim=-1)
        return _plain_activation(gate.clamp(max=10.0), "silu") * up.clamp(-10.0, 10.0)
    if act.endswith("_mul"):
        gate, up = x.chunk(2, dim=-1)
        return _plain_activation(gate, act.removesuffix("_mul")) * up
    return _plain_activation(x, act)


def xielu(x: Tensor, numbers: Tensor) -> Tensor:
    """See the descriptor; x and numbers in float32."""
    above, below, beta, eps = numbers.unbind()
    lower = (torch.expm1(torch.minimum(x, eps)) - x) * below
    return torch.where(x > 0, above * x * x, lower) + beta * x


def _plain_activation(x: Tensor, act: str) -> Tensor:
    match act:
        case "silu":
            return x * row_stable.sigmoid(x)
        case "gelu":
            return row_stable.gelu(x)
        case "gelu_tanh":
            return row_stable.gelu_tanh(x)
        case "relu":
            return x.clamp(min=0.0)
        case "relu2":
            return x.clamp(min=0.0) ** 2
    raise AssertionError(f"unknown activation {act}")


def gate(x: Tensor, act: str, by: Tensor) -> Tensor:
    """act(by) x: x [T, D], by [T, D / n], whose numbers are for n columns each."""
    opened = by.float()
    if act == "softplus":
        opened = row_stable.softplus(opened)
    elif act != "none":
        opened = row_stable.sigmoid(opened) if act == "sigmoid" else _plain_activation(opened, act)
    times = x.shape[1] // by.shape[1]
    if by.shape[1] > 1 and times > 1:
        opened = opened.repeat_interleave(times, dim=1)
    return (x.float() * opened).to(x.dtype)


def prepare_heads(
    x: Tensor, width: int, spec: NormSpec | None, rope: RopeSpec | None, positions: Tensor, touches: Touches
) -> Tensor:
    """x [T, heads * width] -> [T, heads, width], normed (per head, or whole if the weight is that long), clipped and
    rotated; late: rotated and normed."""
    if touches.late and rope is not None:
        x, rope = rotate(x.reshape(x.shape[0], -1, width), rope, positions), None
    if spec is not None:
        x = norm(x.reshape(x.shape[0], -1, spec.weight.shape[-1]), spec)
    x = x.reshape(x.shape[0], -1, width)
    x = x.clamp(-touches.clip, touches.clip) if touches.clip else x
    return x if rope is None else rotate(x, rope, positions)


def tempered(q: Tensor, temper: Tensor | None, positions: Tensor) -> Tensor:
    """Queries [T, ...] times the number of their position."""
    if temper is None:
        return q
    return (q.float() * temper[positions].view(-1, *(1,) * (q.ndim - 1))).to(q.dtype)


def rotate(x: Tensor, rope: RopeSpec, positions: Tensor) -> Tensor:
    """Rotate entries start .. start + dim of every head; x [T, heads, width]."""
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    stop = rope.start + rope.dim
    part = x[..., rope.start : stop].float()
    if rope.interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((x[..., : rope.start], turned.to(x.dtype), x[..., stop:]), dim=-1)


def gated_norm(x: Tensor, gate: Tensor, spec: NormSpec, size: int, *, first: bool = False, act: str = "silu") -> Tensor:
    """x and gate [T, D] -> act(gate) norm(x), or norm(act(gate) x). Every `size` numbers of a row are normed alone."""
    pieces, gates = x.float().reshape(-1, size), gate.float().reshape(-1, size)
    if act == "softplus":
        gates = row_stable.softplus(gates)
    else:
        gates = (gates if act == "silu" else 1.0) * row_stable.sigmoid(gates)
    pieces = pieces * gates if first else pieces
    pieces = pieces / torch.sqrt(row_stable.sum_last(pieces * pieces) / size + spec.eps)
    y = pieces.view(len(x), -1, spec.weight.shape[0]) * (spec.weight.float() + spec.offset)
    return (y.view(len(x), -1) if first else y.view(len(x), -1) * gates.view(len(x), -1)).to(x.dtype)
