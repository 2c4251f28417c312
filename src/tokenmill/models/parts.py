"""Attention, feed-forward layers and mixtures as a row of the table describes them. Owns: reading a row's switches from
the config, and pulling what they name.

Must not know: which families there are, what lies around the layers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, GateAct, NormSpec, RopeSpec, RouteSpec, Touches
from tokenmill.compute.model import Group
from tokenmill.core.errors import ModelError
from tokenmill.layers.attention import Attention, Heads, alibi_slopes, attention_spec, local_heads, temperatures
from tokenmill.layers.block import Block, Stream, through
from tokenmill.layers.build import Build
from tokenmill.layers.experts import Experts, Routing, Shared, load_experts
from tokenmill.layers.linear import ColumnLinear, FusedColumnLinear, RowLinear, Rows
from tokenmill.layers.mlp import MLP, ByHand, gated_by, xielu
from tokenmill.layers.rope import make_rope
from tokenmill.models.common import as_unit, read_act
from tokenmill.models.config import ModelConfig, activation
from tokenmill.models.decoder import check_heads
from tokenmill.models.family_row import Attend, Drafts, Extra, Feed, Gate, HeadNorms, Mix, Norms, Scores, Shape, Switch
from tokenmill.models.family_row import Shared as SharedRow
from tokenmill.models.rules import Kind


def on(c: ModelConfig, switch: Switch) -> bool:
    """The value of a switch for this config."""
    return c.get(switch, bool, False) if isinstance(switch, str) else switch


def read_eps(c: ModelConfig, norms: Norms) -> float:
    """The epsilon of every norm."""
    return c.get(norms.eps, float, 1e-6, low=0.0) if isinstance(norms.eps, str) else norms.eps


def norm(c: ModelConfig, b: Build, norms: Norms, name: str, size: int, unit: float = 1.0) -> NormSpec:
    """One norm of the row's kind; unit: see `as_unit`."""
    eps = read_eps(c, norms) / unit**2
    if norms.kind in ("bare", "bare_rms"):
        ones = torch.ones(size, dtype=b.dtype, device=b.device)
        return NormSpec(weight=ones, eps=eps, kind="layer" if norms.kind == "bare" else "rms")
    if norms.rms_if and c.has(norms.rms_if):
        return b.norm(name, size, c.need(norms.rms_if, float, low=0.0) / unit**2)
    kind = norms.kind
    return b.norm(name, size, eps, layer=kind != "rms", bias=kind == "layer", offset=norms.offset)


def stream_unit(c: ModelConfig, b: Build, shape: Shape) -> float:
    """See `as_unit`."""
    normed = shape.residual and shape.norms.before and shape.layer_norms is None and shape.single is None
    return as_unit(b, c.get(shape.residual, float, 1.0)) if normed else 1.0


class Single:
    """x += block(norm(x))."""

    def __init__(self, block: Block, norm: NormSpec) -> None:
        self.block = block
        self.norm = norm

    def __call__(self, x: Stream, ctx: ForwardContext) -> Stream:
        """x [T, hidden] -> [T, hidden]."""
        return through(x, self.block, ctx, self.norm)


def not_computed(c: ModelConfig, b: Build, drafts: Drafts | None, layers: int, at: str = "layers") -> list[str]:
    """Tensors of layers that draft later tokens, which this model does not use."""
    if drafts is None:
        return []
    patterns = [drafts.pattern] if drafts.pattern else []
    more = c.get(drafts.later, int, 0, low=0, high=64) if drafts.later else 0
    patterns += [rf"(^|\.){at}\.{index}\." for index in range(layers, layers + more)]
    return [name for name in b.checkpoint.names() if any(re.search(pattern, name) for pattern in patterns)]


# ------------------------------------------------------------------ attention


def make_attention(
    c: ModelConfig, b: Build, at: Build, row: Attend, norms: Norms, heads: Heads, index: int
) -> Attention:
    """One layer's attention; `at` is where the layer's tensors lie."""
    inside, hidden = at.at(row.at) if row.at else at, c.need("hidden_size", int)
    kind, scores, extra = row.layer(c, index), row.scores or Scores(), row.extra or Extra()
    if extra.heads is not None:
        heads = extra.heads(c, heads, kind, index)
        check_heads(heads.heads, heads.kv_heads)
    rope = None
    if row.rope is not None and kind.rotates:
        rope = _rope(c, b, row, kind, heads.dim)
    qk = row.norms if row.norms is not None and on(c, row.norms.present) else None
    if qk is not None and qk.kind == "bare_rms" and not kind.rotates:
        qk = None
    if extra.within or (qk is not None and qk.over in ("row", "own")):
        b, inside = (each.alone("attention whose norms see all heads") for each in (b, inside))
    slopes = None
    if on(c, scores.alibi):
        slopes = local_heads(b, alibi_slopes(heads.heads)).to(b.device)
    inner = Touches(
        *_head_norms(c, inside, qk, norms, heads),
        late=qk is not None and qk.rotated,
        temper=_temper(c, b, extra, kind),
        clip=c.need(extra.clip, float, low=1e-9) if extra.clip and c.has(extra.clip) else 0.0,
        factor=c.get(extra.values, float, 1.0) if extra.values else 1.0,
    )
    spec = attention_spec(
        b,
        heads,
        scale=None if scores.scale is None else scores.scale(c, index),
        rope=rope,
        window=kind.window,
        softcap=c.get(scores.softcap, float, 0.0, low=1e-6) if scores.softcap else 0.0,
        touches=inner,
        alibi=slopes,
    )
    if scores.sinks and (kind.window or not scores.local_sinks):
        spec = replace(spec, sinks=local_heads(b, inside.tensor(scores.sinks, (heads.heads,))))
    bias, out_bias = on(c, row.bias), on(c, row.bias if row.out_bias is None else row.out_bias)
    qkv: ColumnLinear
    if len(row.qkv) == 1:
        order = None if extra.fused is None else extra.fused(heads)
        qkv = FusedColumnLinear(inside, hidden, row.qkv[0], heads.parts, order=order, bias=bias)
    else:
        named = dict(zip(row.qkv, heads.parts, strict=True))
        qkv = ColumnLinear(inside, hidden, named, bias=bias)
    gate = _gate(c, inside, extra.gate, heads, hidden) if extra.gate is not None else None
    output = RowLinear(inside, heads.out.rows, hidden, row.out, bias=out_bias)
    within = norm(c, inside, norms, extra.within, heads.out.rows) if extra.within else None
    act = "sigmoid" if extra.gate is None else extra.gate.act
    return Attention(qkv, output, spec, within=within, gate=gate, gate_act=act)


def _gate(c: ModelConfig, b: Build, row: Gate, heads: Heads, hidden: int) -> ColumnLinear | None:
    """The product that gates attention's output."""
    if not on(c, row.present):
        return None
    name = next((name for name in row.names if b.has(f"{name}.weight")), row.names[0])
    by_head = row.by_head(c) if callable(row.by_head) else row.by_head
    return ColumnLinear(b, hidden, {name: Rows(heads.heads, heads.heads) if by_head else heads.out})


def _rope(c: ModelConfig, b: Build, row: Attend, kind: Kind, dim: int) -> RopeSpec:
    assert row.rope is not None
    settings = row.rope(c, dim, kind.name)
    if kind.theta:
        settings = replace(settings, theta=kind.theta)
    rope = make_rope(b, settings, interleaved=on(c, row.pairs))
    return replace(rope, sin=-rope.sin) if row.backwards else rope


def _temper(c: ModelConfig, b: Build, extra: Extra, kind: Kind) -> Tensor | None:
    found = None if extra.temper is None else extra.temper(c)
    if found is None or found.rotated != kind.rotates:
        return None
    return temperatures(b.max_positions, found.beta, found.span, found.offset).to(b.device)


def _head_norms(
    c: ModelConfig, b: Build, qk: HeadNorms | None, norms: Norms, heads: Heads
) -> tuple[NormSpec | None, NormSpec | None]:
    """Norms that attention itself applies."""
    if qk is None:
        return None, None
    if qk.over == "own":
        return _own_norms(c, b, qk, norms, heads)
    whole = qk.over == "row"
    sizes = (heads.width, heads.kv_heads * heads.dim) if whole else (heads.dim, heads.dim)
    eps, layer = read_eps(c, norms), qk.kind != "rms"
    if qk.kind == "bare_rms":
        ones = torch.ones(heads.dim, dtype=b.dtype, device=b.device)
        return NormSpec(ones, eps), NormSpec(ones, eps)
    made = [
        b.norm(name, size, eps, layer=layer, bias=qk.kind == "layer", offset=norms.offset)
        for name, size in zip(qk.names, sizes, strict=True)
    ]
    return made[0], made[1]


def _own_norms(c: ModelConfig, b: Build, qk: HeadNorms, norms: Norms, heads: Heads) -> tuple[NormSpec, NormSpec]:
    """Every head's own weights, stored as one matrix [heads, width] or one vector a head."""
    made = []
    for name, count in zip(qk.names, (heads.heads, heads.kv_heads), strict=True):
        if b.has(f"{name}.weight"):
            weight = b.tensor(f"{name}.weight", (count, heads.dim))
        else:
            weight = torch.stack([b.tensor(f"{name}.norms.{i}.weight", (heads.dim,)) for i in range(count)])
        made.append(NormSpec(weight, read_eps(c, norms), "rms" if qk.kind == "rms" else "layer"))
    return made[0], made[1]


# ------------------------------------------------------------------ feed-forward layers


def make_feed(c: ModelConfig, at: Build, row: Feed, norms: Norms) -> MLP:
    """One layer's feed-forward part."""
    hidden, inner, bias = c.need("hidden_size", int), row.inner(c), on(c, row.bias)
    b = at.at(row.at) if row.at else at
    by_hand: ByHand | None = None
    act: Act = "relu2"
    if row.fixed:
        act = cast(Act, f"{row.fixed}_mul" if row.gated else row.fixed)
    elif row.learned and c.get(row.act, str, "") == "xielu":
        by_hand = xielu(b)
    elif row.gated and activation(c, row.act, "silu") in ("relu", "relu2"):
        by_hand = gated_by(cast(GateAct, activation(c, row.act, "silu")))
    else:
        act = read_act(c, gated=row.gated, default="silu", key=row.act)
    within = None
    if row.within:
        b = b.alone("feed-forward layers with a norm inside")
        within = norm(c, b, norms, row.within, inner)
    return MLP(_up(b, row, hidden, inner, bias), RowLinear(b, inner, hidden, row.names[-1], bias=bias), act,
               by_hand=by_hand, within=within)  # fmt: skip


def _up(b: Build, row: Feed | SharedRow, hidden: int, inner: int, bias: bool) -> ColumnLinear:
    part = Rows(inner, inner)
    if len(row.names) == 2 and row.gated and not b.has(f"{row.names[0]}.weight") and b.has("gate_proj.weight"):
        return ColumnLinear(b, hidden, {"gate_proj": part, "up_proj": part}, bias=bias)  # other formats hold them apart
    if len(row.names) == 2 and row.gated:
        return FusedColumnLinear(b, hidden, row.names[0], (part, part), bias=bias)
    return ColumnLinear(b, hidden, dict.fromkeys(row.names[:-1], part), bias=bias)


# ------------------------------------------------------------------ mixtures


def make_mixture(c: ModelConfig, b: Build, at: Build, row: Mix, feed: Feed, index: int) -> Block:
    """One layer's mixture of experts."""
    c = _of_layer(c, (*row.count, *row.top_k), index)
    places = [at.at(name) for name in row.at]
    inside = next((place for place in places if place.has(f"{row.router}.weight")), places[0])
    hidden, inner, count = c.need("hidden_size", int), c.need(row.inner, int), c.first(row.count, int)
    act = read_act(c, gated=feed.gated, default="silu", key=feed.act)
    route = _route(c, at if row.route.outside else inside, row, count)
    router = (inside.exactly(torch.float32) if row.route.wide else inside).weight(
        row.router, (count, hidden), exact=True
    )
    place = inside.at(row.experts) if row.experts else inside
    weights = (row.load or load_experts)(place, route, hidden, inner, row.names)
    shared = _shared(c, inside, at, row.shared, feed, act)
    routing = Routing(row.route.wide, row.route.inputs)
    made = Experts(b, router, route, weights, row.act or act, shared=shared, routing=routing)
    mean = row.shared.mean if row.shared is not None and shared is not None else ""
    return Halved(made) if mean and c.choice(mean, {"average": True, "sum": False}, "average") else made


class Halved:
    """residual + half of what a block gives."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        y = self.block(x, ctx, norm=norm)
        return y * 0.5 if residual is None else ctx.kernels.add(residual, y, 0.5)

    @property
    def group(self) -> Group:
        """The block's."""
        return self.block.group

    def part(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """Half of this rank's part."""
        return self.block.part(x, ctx, norm) * 0.5


def _of_layer(c: ModelConfig, names: tuple[str, ...], index: int) -> ModelConfig:
    """The config with one number where these keys list one for each layer."""
    data = dict(c.data)
    for name in names:
        if isinstance(data.get(name), list):
            if len(data[name]) != c.need("num_hidden_layers", int):
                raise c.refuse(name, "has not one entry for each of num_hidden_layers.")
            data[name] = data[name][index]
    return ModelConfig(data, architecture=c.architecture)


_Order = Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sparsemixer"]
_SCORES: dict[str, str] = {"softmax": "topk_softmax", "sigmoid": "topk_sigmoid"}


def _route(c: ModelConfig, b: Build, row: Mix, count: int) -> RouteSpec:
    route = row.route
    top_k = c.first(row.top_k, int, 2)
    if top_k > count:
        raise ModelError(f"config.json: '{row.top_k[0]}' = {top_k} is more than the {count} experts.")
    groups = c.get("n_group", int, 1) if route.grouped else 1
    top_groups = c.get("topk_group", int, 1, high=groups) if route.grouped else 1
    by_two = route.grouped and not route.by_best
    if count % groups or top_k > count // groups * top_groups or (by_two and count // groups < 2):
        raise c.refuse("n_group", f"and 'topk_group' do not share out {count} experts, '{row.top_k[0]}' = {top_k}.")
    order: _Order = route.order
    if order == "sparsemixer" and top_k != 2:
        raise ModelError(f"config.json: '{row.top_k[0]}' = {top_k} is not supported in {c.architecture}.")
    if route.score:
        order = cast(_Order, c.choice(route.score, _SCORES, "softmax"))
    return RouteSpec(
        experts=count,
        top_k=top_k,
        order=order,
        normalise=on(c, route.normalise),
        scale=c.get(route.scale, float, 1.0) if route.scale else 1.0,
        groups=groups,
        top_groups=top_groups,
        group_sum2=by_two,
        bias=_flat(b, route.bias, count) if route.bias else None,
        eps=route.eps,
        floor=c.get(route.floor, float, 1e-12, low=0.0) if route.floor else 0.0,
        jitter=c.get("router_jitter_noise", float, 0.01, low=0.0) if order == "sparsemixer" else 0.0,
    )


def _flat(b: Build, name: str, count: int) -> Tensor:
    """A vector [count], which some checkpoints store as [1, count]."""
    shape = b.checkpoint.shape(b.path(name)) if b.has(name) else None
    return b.tensor(name, (1, count) if shape == (1, count) else (count,), torch.float32).view(-1)


def _shared(c: ModelConfig, inside: Build, at: Build, row: SharedRow | None, feed: Feed, act: Act) -> Shared | None:
    inner = 0 if row is None else row.inner(c)
    if row is None or not inner:
        return None
    hidden, bias = c.need("hidden_size", int), on(c, feed.bias)
    b = (at if row.outside else inside).at(row.at)
    mlp = MLP(_up(b, row, hidden, inner, bias), RowLinear(b, inner, hidden, row.names[-1], bias=bias), act)
    return Shared(mlp, inside.weight(row.gate, (1, hidden), exact=True) if row.gate else None)
