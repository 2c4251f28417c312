"""Embeddings of their own for every layer, as Gemma 3n and Gemma 4 have them. Owns: making them, and what a layer adds
of its own.

Must not know: what else is in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.layers.build import Build, Carried
from tokenmill.layers.embedding import Embedding
from tokenmill.models.common import rounded_root
from tokenmill.models.config import ModelConfig
from tokenmill.models.gemma4_parts import Plan


@dataclass(slots=True)
class LayerInput:
    """What a layer computes from its own embedding of a token."""

    inputs: LayerInputs
    index: int
    gate: Weight
    back: Weight
    norm: NormSpec

    def __call__(self, x: Tensor, ctx: ForwardContext, times: Tensor) -> Tensor:
        """(x + norm(back(act(gate(x)) * input))) * times; x [T, hidden]."""
        return ctx.kernels.add(x, self.share(x, ctx), within=self.norm, times=times)

    def share(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """back(act(gate(x)) * input) [T, hidden], not normed."""
        gated = ctx.kernels.activate(self.inputs.of(self.index), "gelu_tanh", self.gate.matmul(x, ctx))
        return self.back.matmul(gated, ctx)


class LayerInputs:
    """The embeddings of every token for every layer. They are made together with the usual embeddings and read by the
    layers."""

    def __init__(self, c: ModelConfig, b: Build, plan: Plan, hidden: int) -> None:
        width, total = plan.layer_width, plan.layer_width * plan.layers
        rows = c.get("vocab_size_per_layer_input", int, 262144)
        half = 0.5**0.5  # the sum of both is divided by the root of two: each of them is
        self.table = Embedding(b, "embed_tokens_per_layer", (rows, total), scale=rounded_root(width, b.dtype) * half)
        self.project = b.settled(b.weight("per_layer_model_projection", (total, hidden)))
        norm = b.norm("per_layer_projection_norm", width, plan.eps * hidden)
        self.norm = replace(norm, weight=norm.weight.float() * half)
        """Of projections that are not divided by the root of `hidden`: that it would cancel, but for epsilon."""
        self.width = width
        self.known = rows if rows < c.need("vocab_size", int) else 0
        """How many ids have such embeddings, if not all have. The other ids have that of id 0."""
        self.now = Carried()
        """Those of the tokens that are computed now, [T, layers, width]."""

    def fill(self, tokens: Tensor, x: Tensor, ctx: ForwardContext) -> None:
        """tokens [T] and their embeddings x [T, hidden] -> [T, layers, width]."""
        projected = self.project.matmul(x, ctx).view(-1, self.width)
        if self.known:
            tokens = torch.where(tokens < self.known, tokens, 0)
        known = self.table(tokens, ctx).view(projected.shape)
        self.now.tensor = ctx.kernels.add(known, projected, within=self.norm).view(x.shape[0], -1, self.width)

    def of(self, index: int) -> Tensor:
        """One layer's part [T, width]."""
        assert self.now.tensor is not None
        return self.now.tensor[:, index]


def make_own(at: Build, inputs: LayerInputs, plan: Plan, hidden: int, index: int) -> LayerInput:
    """How one layer uses its own embedding."""
    gate = at.settled(at.weight("per_layer_input_gate", (plan.layer_width, hidden)))
    back = at.settled(at.weight("per_layer_projection", (hidden, plan.layer_width)))
    return LayerInput(inputs, index, gate, back, at.norm("post_per_layer_input_norm", hidden, plan.eps))
