"""Gemma 4 (text): heads of two sizes, normed values, upper layers that read the keys and values of lower ones, a
mixture beside the feed-forward layer, and an embedding of its own for every layer.

Its parts are put together here; `models/gemma4_parts.py`, `models/gemma4_inputs.py` and `models/gemma4_feed.py`
read them.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.core.errors import UndividedError
from tokenmill.layers.block import Block, Stream, read, through, whole
from tokenmill.layers.build import Build
from tokenmill.models.common import read_sizes, rounded_root
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Decoder, Ends
from tokenmill.models.gemma4_feed import Beside, make_beside, make_feed
from tokenmill.models.gemma4_inputs import LayerInput, LayerInputs, make_own
from tokenmill.models.gemma4_parts import NORMS, make_attention, read_plan


class Layer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)) and experts); the layer's own input; times a number."""

    def __init__(
        self,
        blocks: tuple[Block, Block],
        norms: list[NormSpec],
        beside: Beside | None,
        own: LayerInput | None,
        scalar: Tensor,
    ) -> None:
        self.attention, self.mlp = blocks
        self.norms, self.beside, self.own, self.scalar = norms, beside, own, scalar

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        before, after, before_mlp, after_mlp = self.norms
        now = through(x, self.attention, ctx, before, after=after)
        times = self.scalar if self.own is None else None
        if self.beside is None:
            now = through(now, self.mlp, ctx, before_mlp, after=after_mlp, times=times)
        else:
            x, h, norm = read(now, before_mlp, ctx)
            y = self.beside(x, ctx, self.mlp(h, ctx, norm=norm))
            now = ctx.kernels.add(x, y, within=after_mlp, times=times)
        return now if self.own is None else self.own(whole(now, ctx), ctx, self.scalar)


class Gemma4(Decoder):
    """A decoder whose layers have embeddings of their own."""

    beside, undivided = ("inputs",), True
    inputs: LayerInputs | None = None

    def _embed(self, tokens: Tensor, ctx: ForwardContext) -> Tensor:
        x = super()._embed(tokens, ctx)
        if self.inputs is not None:
            self.inputs.fill(tokens, x, ctx)
        return x


def build(c: ModelConfig, b: Build) -> Decoder:
    """Gemma 4 from its config."""
    if not b.place.is_whole:
        raise UndividedError("Gemma 4")
    sizes, plan = read_sizes(c, tied=True), read_plan(c)
    hidden, body = sizes.hidden, b.under("model", "embed_tokens.weight")
    inputs = LayerInputs(c, body, plan, hidden) if plan.layer_width else None

    def layer(body: Build, index: int) -> Layer:
        at = body.at(f"layers.{index}")
        own = None if inputs is None else make_own(at, inputs, plan, hidden, index)
        return Layer(
            (make_attention(c, b, at, plan, index), make_feed(c, at, plan, index)),
            [at.norm(name, hidden, plan.eps) for name in NORMS],
            make_beside(c, at, plan, hidden),
            own,
            at.tensor("layer_scalar", (1,)),
        )

    softcap = c.get("final_logit_softcapping", float, 0.0, low=1e-6)
    ends = Ends(norm=lambda body: body.norm("norm", hidden, plan.eps), scale=rounded_root(hidden, b.dtype),
                softcap=softcap)  # fmt: skip
    model = Gemma4(b, body, sizes, ends, layer)
    model.inputs = inputs
    return model
