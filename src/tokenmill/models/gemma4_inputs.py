"""Embeddings of their own for every layer, as Gemma 3n and Gemma 4 have them. Owns: making them, and what a layer adds
of its own.

Must not know: what else is in a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x + norm(back(act(gate(x)) * input)); x [T, hidden]."""
        return ctx.kernels.add(x, self.share(x, ctx), within=self.norm)

    def share(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """back(act(gate(x)) * input) [T, hidden], not normed."""
        return self.back.matmul(self.gate.matmul(x, ctx, act="gelu_tanh") * self.inputs.of(self.index), ctx)


class LayerInputs:
    """The embeddings of every token for every layer. They are made together with the usual embeddings and read by the
    layers."""

    def __init__(self, c: ModelConfig, b: Build, plan: Plan, hidden: int) -> None:
        width, total = plan.layer_width, plan.layer_width * plan.layers
        rows = c.get("vocab_size_per_layer_input", int, 262144)
        self.table = Embedding(b, "embed_tokens_per_layer", (rows, total), scale=rounded_root(width, b.dtype))
        self.project = b.settled(b.weight("per_layer_model_projection", (total, hidden)))
        self.norm = b.norm("per_layer_projection_norm", width, plan.eps)
        self.width, self.scale = width, hidden**-0.5
        self.known = rows if rows < c.need("vocab_size", int) else 0
        """How many ids have such embeddings, if not all have. The other ids have that of id 0."""
        self.now = Carried()
        """Those of the tokens that are computed now, [T, layers, width]."""

    def fill(self, tokens: Tensor, x: Tensor, ctx: ForwardContext) -> None:
        """tokens [T] and their embeddings x [T, hidden] -> [T, layers, width]."""
        projected = (self.project.matmul(x, ctx) * self.scale).view(x.shape[0], -1, self.width)
        if self.known:
            tokens = torch.where(tokens < self.known, tokens, 0)
        known = self.table(tokens, ctx).view(projected.shape)
        self.now.tensor = (ctx.kernels.norm(projected, self.norm) + known) * 2.0**-0.5

    def of(self, index: int) -> Tensor:
        """One layer's part [T, width]."""
        assert self.now.tensor is not None
        return self.now.tensor[:, index]


def make_own(at: Build, inputs: LayerInputs, plan: Plan, hidden: int, index: int) -> LayerInput:
    """How one layer uses its own embedding."""
    gate = at.settled(at.weight("per_layer_input_gate", (plan.layer_width, hidden)))
    back = at.settled(at.weight("per_layer_projection", (hidden, plan.layer_width)))
    return LayerInput(inputs, index, gate, back, at.norm("post_per_layer_input_norm", hidden, plan.eps))
