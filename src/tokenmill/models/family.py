"""A model from its row of the table. Owns: putting blocks and norms together into layers, and what lies around them.

The one builder of every family that has a row; files of families are for what no row can say. Must not know: which
families there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, NormSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Heads
from tokenmill.layers.block import Block
from tokenmill.layers.build import Build
from tokenmill.layers.embedding import add_positions
from tokenmill.models import table
from tokenmill.models.common import Parallel, PreNorm, Sandwich, read_heads, read_sizes
from tokenmill.models.config import ModelConfig
from tokenmill.models.decoder import Before, Decoder, Ends, Layer
from tokenmill.models.family_row import Shape
from tokenmill.models.mtp_layers import Later, make_behind
from tokenmill.models.parts import Single, make_attention, make_feed, make_mixture, norm, not_computed, on, stream_unit
from tokenmill.models.rules import Positions


def build(c: ModelConfig, b: Build) -> Decoder:
    """Any family of the table from its config."""
    shape = table.TABLE[c.architecture].shape
    c = _usual_names(c, shape)
    sizes, heads, outside, unit = read_sizes(c), _heads(c, shape), shape.outside, stream_unit(c, b, shape)
    if outside.positions is not None and outside.positions.name:
        b = b.limited(c.need(outside.positions.count, int))
    body = b.under(outside.body, f"{outside.embed}.weight") if outside.body else b

    def layer(body: Build, index: int) -> Layer:
        return make_layer(c, b, body.at(f"{outside.layers}.{index}"), shape, heads, index, unit)

    b.book.used.update(not_computed(c, b, outside.drafts, sizes.layers, outside.layers))
    return Decoder(b, body, sizes, _ends(c, b, shape, sizes.hidden, unit), layer)


def build_later(c: ModelConfig, b: Build) -> list[Later]:
    """The checkpoint's layers that draft later tokens, after the last one."""
    shape = table.TABLE[c.architecture].shape
    c, outside = _usual_names(c, shape), shape.outside
    if outside.drafts is None or not outside.drafts.later:
        raise ModelError(f"{c.architecture}: layers that guess later tokens are not built for this family.")
    sizes = read_sizes(c)
    body = b.under(outside.body, f"{outside.embed}.weight") if outside.body else b
    return make_behind(
        c,
        body.at(outside.layers),
        (sizes.layers, sizes.hidden),
        lambda inside, name: norm(c, inside, shape.norms, name, sizes.hidden),
        lambda at, index: make_layer(c, b, at, shape, _heads(c, shape), index),
        outside.drafts.later,
    )


def _heads(c: ModelConfig, shape: Shape) -> Heads | None:
    """The heads that all layers share; layers of one block each read what they need themselves."""
    return None if shape.single is not None else read_heads(c)


def make_layer(c: ModelConfig, b: Build, at: Build, shape: Shape, heads: Heads | None, index: int,
               unit: float = 1.0) -> Layer:  # fmt: skip
    """One layer: attention, a feed-forward layer or a mixture, and norms around them; unit: of the stream."""
    hidden = c.need("hidden_size", int)
    if shape.single is not None:
        return Single(shape.single(c, b, at, index), norm(c, at, shape.norms, shape.norms.before[0], hidden))
    assert heads is not None
    mixer = None if shape.mixer is None else shape.mixer(c, at, index)
    norms = shape.norms if shape.layer_norms is None else shape.layer_norms(at, mixer is not None)
    attention: Block = make_attention(c, b, at, shape.attend, norms, heads, index) if mixer is None else mixer
    mlp: Block
    if shape.mix is None or shape.mix.dense(c, index):
        mlp = make_feed(c, at, shape.feed, norms)
    else:
        mlp = make_mixture(c, b, at, shape.mix, shape.feed, index)
    parallel = on(c, shape.parallel)
    names = norms.before[:1] if parallel and norms.one_if_parallel else norms.before
    before = [norm(c, at, norms, name, hidden, unit) for name in names]
    scale = 1.0 if not shape.residual else c.get(shape.residual, float, 1.0) / unit
    if parallel:
        return Parallel(attention, mlp, (before[0], before[-1]))
    afterwards = norms.after if on(c, norms.after_if) else ()
    if len(before) == 2 and not afterwards and scale == 1.0:
        return PreNorm(attention, mlp, (before[0], before[1]))
    after: list[NormSpec | None] = [norm(c, at, norms, name, hidden) for name in afterwards]
    return Sandwich((attention, mlp), before or [None, None], after or [None, None], scale)


def _ends(c: ModelConfig, b: Build, shape: Shape, hidden: int, unit: float) -> Ends:
    outside = shape.outside
    scale = 1.0 if outside.scale is None else outside.scale(c, 0)
    if outside.rounded:  # to the compute dtype, as these models were trained
        scale = float(torch.tensor(scale, dtype=b.dtype))
    return Ends(
        norm=lambda body: norm(c, body, shape.norms, shape.norms.last, hidden, unit),
        embed=outside.embed,
        head=outside.head,
        scale=scale,
        softcap=c.get(outside.softcap, float, 0.0, low=1e-6) if outside.softcap else 0.0,
        logit_scale=1.0 if outside.logits is None else outside.logits(c, 0),
        head_bias=on(c, outside.head_bias),
        before=_before(c, b, shape, hidden),
        unit=unit,
    )


def _before(c: ModelConfig, b: Build, shape: Shape, hidden: int) -> Before | None:
    """What is done to embeddings before the first layer."""
    said, name = shape.outside.positions, shape.outside.norm
    if name:

        def normed(body: Build) -> Callable[[Tensor, ForwardContext], Tensor]:
            spec = norm(c, body, shape.norms, name, hidden)
            return lambda x, ctx: ctx.kernels.norm(x, spec)

        return normed
    if said is None:
        return None
    if not said.name:
        return lambda body: add_positions(sines(b.max_positions, hidden, said).to(device=b.device, dtype=b.dtype))
    rows = c.need(said.count, int) + said.shift
    return lambda body: add_positions(body.tensor(f"{said.name}.weight", (rows, hidden))[said.shift :])


def sines(count: int, hidden: int, said: Positions) -> Tensor:
    """[count, hidden]: the sines of a geometric series of frequencies, then their cosines."""
    half = hidden // 2
    steps = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(said.shift, count + said.shift, dtype=torch.float32)[:, None] * steps
    table = torch.cat((torch.sin(angles), torch.cos(angles)), dim=1)
    return torch.nn.functional.pad(table, (0, hidden % 2))


def _usual_names(c: ModelConfig, shape: Shape) -> ModelConfig:
    """The config with sizes under the names that most families use."""
    data = {**c.data, **(shape.nested(c) if shape.nested is not None else {})}
    for own, usual in shape.names.items():
        names = [name for name in (own, usual) if c.has(name)]
        if names:
            data[usual] = c.first((own, usual), type(c.data[names[0]]))
    return ModelConfig(data, architecture=c.architecture)
