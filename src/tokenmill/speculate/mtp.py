"""A checkpoint's own layer that guesses later tokens, wrapped so that EAGLE's passes can run it (eagle.py).

Must not know: plans, verification, checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec, Weight
from tokenmill.layers.block import whole
from tokenmill.models.mtp_layers import Later
from tokenmill.speculate.eagle import Embed
from tokenmill.speculate.eagle_config import FINAL


class LaterNet:
    """The network that EagleHead runs; embeddings and head are the target's."""

    taps = (FINAL,)
    head: Weight | None = None
    words: Tensor | None = None

    def __init__(self, made: Later, embed: Embed) -> None:
        self.made = made
        self.embed = embed
        self.hidden = made.last.weight.shape[0]
        self.norm: NormSpec | None = None if made.onward else made.last

    def begin(self, tokens: Tensor, taps: Tensor, ctx: ForwardContext) -> Tensor:
        """tokens [T], each one behind the target's final state [T, hidden] -> states [T, hidden]."""
        return self.go_on(tokens, taps, ctx)

    def go_on(self, tokens: Tensor, states: Tensor, ctx: ForwardContext) -> Tensor:
        """The same behind states that the layer itself made."""
        made, kernels = self.made, ctx.kernels
        words, before = kernels.norm(self.embed(tokens, ctx), made.norms[0]), kernels.norm(states, made.norms[1])
        found = whole(made.layer(made.join.matmul(torch.cat((words, before), -1), ctx), ctx), ctx)
        return kernels.norm(found, made.last) if made.onward else found
