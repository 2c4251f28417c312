"""The logits that tokens are chosen from. Owns: whether a rank makes all of them, or only those of its part of the
vocabulary.

A GPU's backend chooses by itself and needs whole lines. So ranks gather them within the recorded step; over NVLink that
takes less time than choosing twice would. Must not know: how tokens are chosen, how ranks talk.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import ForwardContext, Kernels
from tokenmill.compute.model import CausalLM, Words


def words_of(model: CausalLM, kernels: Kernels) -> Words | None:
    """The words for which `logits_of` gives logits; None: for all."""
    return None if kernels.chooses else model.words


def logits_of(model: CausalLM, kernels: Kernels, hidden: Tensor, ctx: ForwardContext) -> Tensor:
    """[n, hidden] -> the logits [n, words] that tokens are chosen from."""
    if words_of(model, kernels) is None:
        return model.logits(hidden, ctx)
    return model.own_logits(hidden, ctx)
