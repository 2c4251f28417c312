"""Several streams of hidden states a token, one of which the layers compute (AltUp). Owns: predicting the others,
correcting them, and the ways in and out.

A step carries x [T, streams * hidden]. Backends add streams one after the other, and sums over columns are written out
element by element, so that a row's bytes do not depend on its company. Knows nothing of families.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.layers.build import Build

_LEAST = 1e-5
"""The least mean square that a stream is divided by."""


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last dimension, kept as size 1: halves are added to halves, in one order whatever the shape."""
    size, rest = x.shape[-1], None
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        if x.shape[-1] % 2:
            last = x[..., -1:]
            rest = last if rest is None else rest + last
        x = x[..., :half] + x[..., half : 2 * half]
    return (x if rest is None else x + rest) / size


class Streams:
    """What one layer does with the streams around its blocks."""

    def __init__(self, b: Build, hidden: int, count: int, active: int, eps: float) -> None:
        self.count, self.active, self.hidden = count, active, hidden
        weight = b.tensor("router_norm.weight", (hidden,)).float() / hidden
        self.norm = NormSpec(weight.to(b.dtype), eps)
        self.router = b.settled(b.weight("modality_router", (count, hidden), exact=True))
        exact = replace(b, quantization=None)  # rounding would change every stream
        predicts = b.tensor("prediction_coefs.weight", (count * count, count), torch.float32)
        by_source = predicts.view(count, count, count).transpose(0, 1).flatten(0, 1).contiguous()
        self.predicts = exact.settled(exact.wrap(by_source, None))
        corrects = b.tensor("correction_coefs.weight", (count, count), torch.float32)
        self.corrects = exact.settled(exact.wrap(corrects, torch.ones(count, device=b.device)))
        self.scale = b.tensor("correct_output_scale", (hidden,))

    def split(self, x: Tensor) -> Tensor:
        """[T, streams * hidden] -> [T, streams, hidden]."""
        return x.view(-1, self.count, self.hidden)

    def predict(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams, hidden] -> the prediction of each stream behind the layer."""
        shares = self._shares(x[:, self.active], self.predicts, ctx).chunk(self.count, dim=1)
        wide = x.float()
        made = wide.flatten(1)
        for i in range(self.count):
            made = ctx.kernels.add(made, wide[:, i], shares[i])
        return made.view(x.shape).to(x.dtype)

    def correct(self, expected: Tensor, found: Tensor, ctx: ForwardContext) -> Tensor:
        """The prediction, corrected by the layer's result [T, hidden] for the stream that it computed."""
        news = ctx.kernels.add(found, expected[:, self.active], -1.0)
        shares = self._shares(found, self.corrects, ctx)
        return ctx.kernels.add(expected.flatten(1), news, shares).view(expected.shape)

    def _shares(self, x: Tensor, matrix: Weight, ctx: ForwardContext) -> Tensor:
        """matrix @ tanh(router(norm(x))) in float32 [T, rows of the matrix]."""
        kinds = torch.tanh(self.router.matmul(x.contiguous(), ctx, norm=self.norm).float())
        return matrix.matmul(kinds, ctx)


class Ways:
    """From embeddings to streams (in), and from streams to what the last norm takes (out)."""

    def __init__(self, b: Build, name: str, hidden: int, count: int) -> None:
        places = (b.at(f"{name}.{i}") for i in range(count - 1))
        self.weights: list[Weight] = [at.settled(at.weight("", (hidden, hidden))) for at in places]

    def spread(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, streams * hidden]: each one's product, as large as x."""
        size = _size(x)
        made = [x, *(_sized(weight.matmul(x, ctx), size) for weight in self.weights)]
        return torch.cat(made, dim=1)

    def gather(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, streams, hidden] -> the mean of the first and of the others' products, each as large as the first."""
        size, total = _size(x[:, 0]), x[:, 0].float()
        for i, weight in enumerate(self.weights, 1):
            total = total + _sized(weight.matmul(x[:, i].contiguous(), ctx), size).float()
        return (total / (len(self.weights) + 1)).to(x.dtype)


def _size(x: Tensor) -> Tensor:
    wide = x.float()
    return torch.sqrt(mean_last(wide * wide))


def _sized(x: Tensor, size: Tensor) -> Tensor:
    wide = x.float()
    return (wide * size / torch.sqrt(mean_last(wide * wide).clamp(min=_LEAST))).to(x.dtype)
