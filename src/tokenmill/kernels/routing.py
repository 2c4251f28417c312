"""Which experts a token goes to. Owns: scores, groups, who wins among equal ones, and gates. Must not know: layers."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import RouteSpec
from tokenmill.kernels import row_stable


def route(logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> expert ids [T, k] (int64) and gates [T, k] (float32), best first."""
    if spec.order == "sparsemixer":
        return _one_by_one(logits, spec)
    softmax, late = "softmax" in spec.order, spec.order.startswith("topk")
    score = row_stable.softmax if softmax else row_stable.sigmoid
    scores = logits if late else score(logits)
    choice = scores if spec.bias is None else scores + spec.bias
    ids = _largest(choice if spec.groups == 1 else _best_groups(choice, spec), spec.top_k)
    gates = score(scores.gather(-1, ids)) if late else scores.gather(-1, ids)
    if spec.normalise and not (softmax and late):
        gates = gates / (row_stable.sum_last(gates).clamp(min=spec.floor) + spec.eps)
    return ids, scaled(gates, ids, spec)


def scaled(gates: Tensor, ids: Tensor, spec: RouteSpec) -> Tensor:
    """Gates times `scale`."""
    return gates * (spec.scale[ids] if isinstance(spec.scale, Tensor) else spec.scale)


def _one_by_one(logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
    """The best logits, each weighed among those that are left and near it."""
    ids, gates, left = _largest(logits, spec.top_k), [], logits
    for at in ids.split(1, dim=-1):
        best = logits.gather(-1, at)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2.0 * spec.jitter
        near = torch.exp(left.masked_fill(far, float("-inf")) - best)
        gates.append(1.0 / row_stable.sum_last(near))
        left = left.scatter(-1, at, float("-inf"))
    return ids, scaled(torch.cat(gates, -1), ids, spec)


def _largest(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are, best first; equal ones in ascending order, as in all backends."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def _best_groups(choice: Tensor, spec: RouteSpec) -> Tensor:
    """Put every expert outside the best `top_groups` groups out of reach."""
    grouped = choice.view(choice.shape[0], spec.groups, -1)
    rank = grouped.topk(2, dim=-1).values.sum(-1) if spec.group_sum2 else grouped.amax(-1)
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, _largest(rank, spec.top_groups), True)
    return grouped.masked_fill(~chosen[:, :, None], float("-inf")).view_as(choice)
