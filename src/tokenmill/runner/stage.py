"""A later stage's model as the runner sees it. Owns: the inbox, from which its steps begin instead of from token ids.

The inbox has a fixed address, so recorded steps can read it. On a GPU a step begins with a copy of it, an ordinary
launch. Kernels with dependent launch may start while the two before them still run, and attention reads lengths and
tables before it waits: those were made before an ordinary launch, so they are there (the first stage's is its
embedding). Must not know: what fills the inbox (parallel/link.py).
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import ForwardContext, ModelSpec
from tokenmill.compute.model import CausalLM, Words


class FromInbox:
    """A model whose forward pass takes the hidden states [most tokens, hidden] of the stage before."""

    def __init__(self, model: CausalLM, inbox: Tensor) -> None:
        self.model = model
        self.inbox = inbox
        self.spec: ModelSpec = model.spec

    def forward(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        """Only the number of tokens [T] is used -> [T, hidden]."""
        x = self.inbox[: tokens.shape[0]]
        return self.model.forward(x if x.device.type == "cpu" else x.clone(), ctx)

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """The model's own."""
        return self.model.logits(hidden, ctx)

    @property
    def words(self) -> Words | None:
        """The model's own."""
        return self.model.words

    def own_logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """The model's own."""
        return self.model.own_logits(hidden, ctx)
