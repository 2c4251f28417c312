"""Layers inside checkpoints that guess later tokens (MTP, nextn). Owns: what lies around such a layer, by form.

A layer of the family's own kind reads the final hidden state of a position joined with the embedding of the token
behind it: layer(join([norm(embedding) | norm(state)])). Must not know: drafts, plans.

DeepSeek's form   model.layers.N.*, where the model has N layers, with enorm, hnorm, eh_proj and shared_head.norm
Qwen's form       mtp.layers.0.*, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm

Where there are several, each guesses one token further than the one before it, whose states it reads: layers N + 1 and
so on, with parts of their own around them; or mtp.layers.1 and so on, which share what is around the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.compute.forward import NormSpec, Weight
from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Layer

MakeNorm = Callable[[Build, str], NormSpec]


@dataclass(frozen=True, slots=True)
class Later:
    """norms: of embeddings and of states. last: the norm before the target's head. onward: the next layer reads states
    after that norm, not before it."""

    norms: tuple[NormSpec, NormSpec]
    join: Weight
    layer: Layer
    last: NormSpec
    onward: bool


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of one form's tensors."""

    embedding: str
    state: str
    join: str
    last: str
    onward: bool


DEEPSEEK = MtpNames("enorm", "hnorm", "eh_proj", "shared_head.norm", onward=False)
QWEN = MtpNames("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", onward=True)


def make_later(form: MtpNames, at: Build, hidden: int, norm: MakeNorm, layer: Callable[[], Layer]) -> Later:
    """Build one such layer. at: where the tensors around it lie."""
    if not at.has(f"{form.join}.weight"):
        raise ModelError(f"This checkpoint has no layer that guesses later tokens ({at.path(form.join)}.weight).")
    return Later(
        norms=(norm(at, form.embedding), norm(at, form.state)),
        join=at.settled(at.weight(form.join, (hidden, 2 * hidden))),
        layer=layer(),
        last=norm(at, form.last),
        onward=form.onward,
    )


def make_behind(
    c: ModelConfig,
    at: Build,
    sizes: tuple[int, int],
    norm: MakeNorm,
    layer: Callable[[Build, int], Layer],
    counted: str = "num_nextn_predict_layers",
) -> list[Later]:
    """Build them in DeepSeek's form. at: where layers lie. sizes: the model's number of layers and its hidden size."""
    first, hidden = sizes

    def one(index: int) -> Later:
        inside = at.at(str(index))
        return make_later(DEEPSEEK, inside, hidden, norm, lambda: layer(inside, index))

    return [one(index) for index in range(first, first + count_later(c, counted))]


def count_later(c: ModelConfig, *names: str) -> int:
    """How many such layers the config has. 1 if it does not say: then the first one is looked for."""
    return max(1, *(c.get(name, int, 1, low=0, high=64) for name in names))
