"""Scales that move from activations into weights: AWQ and SmoothQuant. Owns: which tensors they may move between.

    y = W x = (W diag(s)) (x / s), where whatever makes x is divided by s:
    a norm's weight (and bias); the rows of v_proj before o_proj; the rows of up_proj before down_proj
Which norm feeds which weights was seen while they multiplied; the other pairs are told by their names, and whether a
fold keeps the layer's function is tried out by who applies it. Must not know: files, codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.quantize.inputs import Inputs

_PAIRS = (("self_attn.v_proj.weight", "self_attn.o_proj.weight"), ("mlp.up_proj.weight", "mlp.down_proj.weight"))
_STEPS = 20
_FINALISTS = 10
_LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class NormTensors:
    """A norm's tensors. It multiplies by the stored weight plus `offset`."""

    weight: str
    bias: str | None
    offset: float


@dataclass(frozen=True, slots=True)
class Fold:
    """Weights that share an input, and the producer of that input: a norm, or the rows of a matrix."""

    consumers: tuple[str, ...]
    norm: NormTensors | None = None
    producer: str = ""


def find_folds(fed: Mapping[NormTensors, set[str]], chosen: set[str], present: Callable[[str], bool]) -> list[Fold]:
    """The folds of a layer. fed: the weights that each norm fed during calibration; chosen: the weights that will be
    rounded."""
    folds = [Fold(tuple(sorted(names)), norm=norm) for norm, names in fed.items() if names <= chosen]
    for first, second in _PAIRS:
        for name in sorted(chosen):
            producer = name.removesuffix(second) + first
            if name.endswith(second) and producer in chosen and not present(producer.removesuffix("weight") + "bias"):
                folds.append(Fold((name,), producer=producer))
    return folds


def shared(s: Tensor, rows: int, width: int) -> Tensor | None:
    """Scales [columns] for a producer with fewer rows: value heads (of `width`) are shared by several query heads, so
    these share scales. None: the sizes do not fit."""
    if rows == len(s):
        return s
    if len(s) % rows or rows % width:
        return None
    heads = s.view(rows // width, len(s) // rows, width)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def of_rows(s: Tensor, rows: int, width: int) -> Tensor:
    """Scales [columns] from `shared` -> scales of the producer's rows."""
    return s if rows == len(s) else s.view(rows // width, len(s) // rows, width)[:, 0].reshape(-1)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a scaled weight is rounded: quick is for the search, final is the method itself (which also gets the scaled
    inputs)."""

    quick: Callable[[Tensor], Tensor]
    final: Callable[[Tensor, Inputs], Tensor]
    group: int


def awq(
    fold: Fold,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Inputs],
    round_: Rounding,
    fit: Callable[[Tensor], Tensor | None],
) -> Tensor | None:
    """Scales [columns] for which the outputs of rounded weights err least (Lin et al., 2023). Candidates are powers of
    the inputs' mean magnitude, alone or divided by powers of the weights'. The best few are then rounded by the method
    itself.

    fit: turns scales into some that the producer can take. None: it can take none."""
    seen = inputs[fold.consumers[0]]
    size, spread = seen.mean.clamp(min=_LEAST), _spread([weights[name] for name in fold.consumers], round_.group)
    tried: list[tuple[float, Tensor]] = []
    for step in range(_STEPS):
        power = size.pow(step / _STEPS)
        for s in (power, power / spread.pow(1.0 - step / _STEPS)):
            fitting = fit((s / (s.max() * s.min()).sqrt()).clamp(min=_LEAST))
            if fitting is None:
                return None
            pairs = [(name, round_.quick(weights[name] * fitting)) for name in fold.consumers]
            tried.append((sum(seen.loss(rounded / fitting - weights[name]) for name, rounded in pairs), fitting))
    best = sorted(range(len(tried)), key=lambda i: tried[i][0])[:_FINALISTS]
    lost = []
    for i in best:
        s = tried[i][1]
        scaled = seen.scaled(s)
        rounds = [(name, round_.final(weights[name] * s, scaled)) for name in fold.consumers]
        lost.append(sum(seen.loss(rounded / s - weights[name]) for name, rounded in rounds))
    return tried[best[lost.index(min(lost))]][1]


def _spread(weights: list[Tensor], group: int) -> Tensor:
    """How large each column's numbers are within their groups, on average [columns]."""
    parts = torch.cat(weights).abs().unflatten(1, (-1, group))
    return (parts / parts.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1).mean(0).clamp(min=_LEAST)


def smooth(fold: Fold, weights: Mapping[str, Tensor], inputs: Mapping[str, Inputs], alpha: float = 0.5) -> Tensor:
    """Scales [columns] that divide the difficulty of rounding between inputs and weights (Xiao et al., 2022)."""
    top = torch.stack([weights[name].abs().amax(0) for name in fold.consumers]).amax(0).clamp(min=1e-5)
    s = inputs[fold.consumers[0]].largest.clamp(min=1e-5).pow(alpha) / top.pow(1.0 - alpha)
    return s.clamp(min=1e-4, max=1e4)
