"""Mixtures of experts. Owns: routing, the routed experts, and the shared ones beside them. Knows nothing of families.

Every rank holds a slice of every expert; one sum over the group serves routed and shared experts together. In an exact
group a rank has some columns of the first matrices and some rows of the second ones, with a gather between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import Act, ForwardContext, FusedMixture, Mixture, NormSpec, RouteSpec, Weight
from tokenmill.core.errors import NotSharedError
from tokenmill.layers.build import Build
from tokenmill.layers.linear import Rows, local_columns
from tokenmill.layers.mlp import MLP
from tokenmill.layers.movable_experts import Placed
from tokenmill.parallel.experts import first_placement
from tokenmill.parallel.group import SoloGroup
from tokenmill.quant.detect import Share

ExpertWeights = tuple[list[Weight], list[Weight]]
"""gate_up and down, one of each per expert."""
_FEW_ROWS = 1024
"""As many as steps of single tokens have."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What a RouteSpec does not say. wide: the router's logits are float32, whatever the compute dtype. inputs: gates
    multiply an expert's input, not its output."""

    wide: bool = False
    inputs: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """Experts that every token visits. gate [1, hidden]: the sigmoid of its product scales them."""

    mlp: MLP
    gate: Weight | None = None


class Chosen:
    """This rank's share of the experts of a mixture."""

    def __init__(self, b: Build, weights: ExpertWeights, count: int, act: Act) -> None:
        """weights: of the experts that this rank has a part of, out of all `count`; they settle here."""
        self.group, self.weights = b.group, weights
        self.act: Act = act
        b.book.mixtures += 1
        if b.adapters is not None:
            b.adapters.mixes(count)
        self.first = held(b, count)[0]
        self.by_expert = b.place.whole_experts and b.group.size > 1
        """Each rank has some of the experts, and these whole."""
        self.placed: Placed | None = None
        """Given if experts may move between ranks: then choices name slots, and `first` is a slot."""
        self.stacked: Any = None
        """The backend's own form of the weights, if it took them. Their lists are then empty: nothing is stored
        twice."""
        if self.by_expert and b.place.redundant is not None:
            self.placed = Placed(count, b.group.size, b.group.rank, b.place.redundant, b.device)
            self.first = self.placed.first
            b.book.placed.append(self)
        for part in weights:
            part[:] = b.settled_all(part)

    def pack(self, b: Build, mixture: Mixture) -> None:
        """Let the backend take the weights of this mixture. An exact group needs them one by one."""
        if b.group.exact:
            return
        ups, downs = ([*part] if b.adapters is not None else [] for part in self.weights)
        self.stacked = b.kernels.pack_mixture(mixture)
        if self.stacked is not None and b.adapters is not None:
            mixture.operands = b.adapters.stack(ups), b.adapters.stack(downs)

    def part(self, x: Tensor, ids: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """The sum of x's chosen experts: this rank's part of it. In an exact group: this rank's columns of the sum, or
        all columns if each rank has whole experts."""
        if self.placed is not None:
            ids = self.placed.slots_for(ids, ctx)
        if self.by_expert and self.group.exact:
            parts = ctx.kernels.experts(x, self.weights, ids, None, self.act, ctx, self.first)
            return ctx.kernels.add_experts(self.group.all_reduce(parts), gates, x.dtype)
        if not self.group.exact:
            ids = ids - self.first if self.by_expert else ids
            if self.stacked is not None:
                y: Tensor = self.stacked.chosen(x, ids, gates, ctx)
                return y
            return ctx.kernels.experts(x, self.weights, ids, gates, self.act, ctx)
        inside = ctx.kernels.experts(x, self.weights, ids, None, self.act, ctx)
        if inside.shape[1] != self.weights[1][0].shape[1]:
            inside = self.group.all_gather(inside)
        return ctx.kernels.experts(inside, self.weights, ids, gates, None, ctx)

    def whole(self, x: Tensor, ids: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """The same, completed by the other ranks [T, hidden]."""
        y = self.part(x, ids, gates, ctx)
        if self.group.size == 1 or (self.group.exact and self.by_expert):
            return y
        return self.group.all_gather(y) if self.group.exact else self.group.all_reduce(y)


class Experts:
    """Router -> top-k experts (+ shared experts) -> residual."""

    def __init__(
        self,
        b: Build,
        router: Weight,
        route: RouteSpec,
        weights: ExpertWeights,
        act: Act,
        *,
        shared: Shared | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.group = b.group
        self.router = b.settled(router)
        self.route = route
        self.chosen = Chosen(b, weights, route.experts, act)
        self.routing = routing or Routing()
        self.shared = None if shared is None else shared.mlp
        self.shared_gate = None if shared is None or shared.gate is None else b.settled(shared.gate)
        self.gates_first = b.adapters is None
        """The gate multiplies what the last matrix reads, and needs no sum of its own. (Adapters may bring a bias.)"""
        beside = None if self.shared is None else (self.shared.up.weight, self.shared.output.weight)
        odd = self.shared is not None and self.shared.act != act
        apart = self.routing.inputs or (odd and self.shared_gate is None)
        placed = None if self.chosen.placed is None else self.chosen.placed.slots_for
        mixture = Mixture(
            self.router, route, *weights, act, beside, self.shared_gate,
            fixed=b.adapters is None and not apart and not odd, wide=self.routing.wide, first=self.chosen.first,
            slots_for=placed,
        )  # fmt: skip
        self.chosen.pack(b, mixture)
        self.fused = None if apart else self.chosen.stacked
        """The whole layer in the backend's form. None: the layer chooses experts and adds the shared ones itself."""
        if self.fused is not None and self.fused.takes:
            self.shared = self.shared_gate = None
        self.ones = torch.ones(_FEW_ROWS if self.routing.inputs else 0, 1, device=b.device)
        """The gates of experts whose inputs have been multiplied by gates."""
        self.following = b.following()

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """residual + experts(norm(x)); x [T, hidden]."""
        if self.group.exact:
            y = self._gathered(x if norm is None else ctx.kernels.norm(x, norm), ctx)
        elif self.group.size > 1:
            return self.group.all_reduce(self.part(x, ctx, norm), residual)
        elif self.fused is not None:
            return self._as_one(self.fused, x, ctx, norm, residual)
        else:
            y = self.part(x, ctx, norm)
        return y if residual is None else ctx.kernels.add(residual, y)

    def part(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None = None) -> Tensor:
        """This rank's part of experts(norm(x)), if ranks add up their parts."""
        if self.fused is not None:
            return self._as_one(self.fused, x, ctx, norm, None)
        h = x if norm is None else ctx.kernels.norm(x, norm)
        y = self._routed(h, ctx)
        return y if self.shared is None else self._beside(self.shared.inside(h, ctx), h, ctx, y)

    def _as_one(
        self, fused: FusedMixture, x: Tensor, ctx: ForwardContext, norm: NormSpec | None, residual: Tensor | None
    ) -> Tensor:
        """residual + experts(norm(x)) by the backend's own form, which adds shared experts that have no gate."""
        if self.shared is not None and self.shared_gate is not None:
            x, norm = (x if norm is None else ctx.kernels.norm(x, norm)), None
            residual = self._beside(self.shared.inside(x, ctx), x, ctx, residual)
        return fused(x, ctx, norm=norm, residual=residual, ahead=self.following.weight)

    def _beside(self, inside: Tensor, h: Tensor, ctx: ForwardContext, residual: Tensor | None) -> Tensor:
        """residual + gate(h) * what the shared experts make of the input of their last matrix."""
        assert self.shared is not None
        kernels, last = ctx.kernels, self.shared.output.weight
        if self.shared_gate is None:
            return last.matmul(inside, ctx, residual=residual)
        gate = self.shared_gate.matmul(h, ctx)
        if self.gates_first:
            return last.matmul(kernels.activate(inside, "sigmoid", gate), ctx, residual=residual)
        y = kernels.activate(last.matmul(inside, ctx), "sigmoid", gate)
        return y if residual is None else kernels.add(residual, y)

    def _gathered(self, h: Tensor, ctx: ForwardContext) -> Tensor:
        """Routed and shared experts [T, hidden] in an exact group: computes this rank's columns, then gathers all."""
        y = self._routed(h, ctx)
        if self.chosen.by_expert:  # the routed experts are already complete
            if self.shared is None:
                return y
            y = local_columns(y, self.group).contiguous()
        if self.shared is not None:
            y = self._beside(self.shared.output.whole(self.shared.inside(h, ctx)), h, ctx, y)
        return self.group.all_gather(y)

    def _routed(self, h: Tensor, ctx: ForwardContext) -> Tensor:
        """The routed experts' part [T, hidden]."""
        logits = self.router.matmul(h.float() if self.routing.wide else h, ctx)
        ids, gates = ctx.kernels.route(logits, self.route)
        if not self.routing.inputs:
            return self.chosen.part(h, ids, gates, ctx)
        if ids.shape[1] > 1:
            if ctx.rows is not None and ctx.rows.adapters is not None:
                ctx = ctx.of(torch.arange(len(h), device=h.device).repeat_interleave(ids.shape[1]))
            h = h[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
        ones = self.ones[: len(h)] if len(h) <= len(self.ones) else gates.new_ones(len(h), 1)
        each = ctx.kernels.activate(h, "none", gates.view(-1, 1))
        y = self.chosen.part(each, ids.view(-1, 1), ones, ctx)
        if ids.shape[1] == 1:
            return y
        y = y.view(*ids.shape, -1)
        total = y[:, 0]
        for j in range(1, ids.shape[1]):
            total = ctx.kernels.add(total, y[:, j])
        return total


def load_experts(
    b: Build,
    route: RouteSpec,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    bias: bool = False,
) -> ExpertWeights:
    """Experts below b, stored one by one, or fused as gate_up_proj [E, 2 inner, hidden] and down_proj."""
    before, count = b.book.flops, route.experts
    if b.has("gate_up_proj"):
        weights = _fused(b, count, hidden, inner)
    else:
        weights = _separate(b, count, (hidden, inner), names, bias)
        b.book.flops = before + (b.book.flops - before) * count / len(weights[0])  # as if this rank had all of them
    count_visited(b, before, route)
    return weights


def count_visited(b: Build, before: float, route: RouteSpec) -> None:
    """Of the operations counted since `before`, keep those that one token causes: top_k of the experts."""
    b.book.flops = before + (b.book.flops - before) * route.top_k / route.experts


def _separate(b: Build, count: int, sizes: tuple[int, int], names: tuple[str, str, str], bias: bool) -> ExpertWeights:
    hidden, inner = sizes
    b, share, own = expert_share(b, inner, count)
    ups, downs = [], []
    for index in own:
        at = b.at(str(index))
        gate, up = (at.weight(name, (inner, hidden), bias=bias, share=(0, *share)) for name in names[:2])
        ups.append(gate.concat([up]))
        downs.append(at.weight(names[2], (hidden, inner), bias=bias, share=down_share(b, share)))
    return ups, downs


def held(b: Build, count: int) -> Sequence[int]:
    """The numbers of the experts that this rank has, whole or in part."""
    size, rank = b.group.size, b.group.rank
    if not b.place.whole_experts or size == 1:
        return range(count)
    if count < size:
        raise NotSharedError(f"--enable-expert-parallel: {count} experts cannot be distributed over {size} ranks.")
    if b.place.redundant is not None:
        every = first_placement(count, size, b.place.redundant)
        return every[rank * len(every) // size : (rank + 1) * len(every) // size]
    return range(count * rank // size, count * (rank + 1) // size)


def expert_share(b: Build, inner: int, count: int) -> tuple[Build, tuple[int, int], Sequence[int]]:
    """For experts stored one by one: the Build to use, this rank's part of each expert, and the numbers of its
    experts."""
    own = held(b, count)
    if not b.place.whole_experts or b.group.size == 1:
        return b, Rows(inner, inner).share(b.group), own
    others = {f"{b.path(str(index))}." for index in range(count) if index not in own}
    stem = len(b.path("")) + 1
    b.book.used.update(
        name for name in b.checkpoint.names() if f"{name[:stem]}{name[stem:].partition('.')[0]}." in others
    )
    return replace(b, group=SoloGroup()), (0, 1), own


def down_share(b: Build, share: tuple[int, int]) -> Share:
    """This rank's part of an expert's second matrix. share: its part of the first matrix's rows."""
    return (0, b.group.rank, b.group.size) if b.group.exact else (1, *share)


def _local_down(b: Build, weight: Weight, share: tuple[int, int]) -> Weight:
    return weight.split(*down_share(b, share))


def _fused(b: Build, count: int, hidden: int, inner: int) -> ExpertWeights:
    """Experts [E, out, in]; some published files hold them as [E, in, out] (Qwen3-VL). One of the two matrices may be
    square, never both: what the other one's shape says holds for both."""
    shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    if all(b.stacks(name) for name in shapes):
        stacks = ([b.adapted(one, f"{expert}.{name}") for expert, one in enumerate(b.stacked(name, shape))]
                  for name, shape in shapes.items())  # fmt: skip
        return split_experts(b, *stacks)
    if any(_is_turned(b, name, shape) for name, shape in shapes.items()):
        parts = [b.numbers(name, (e, n, m)).transpose(1, 2).contiguous() for name, (e, m, n) in shapes.items()]
    else:
        parts = [b.numbers(name, shape) for name, shape in shapes.items()]
    gate_up, down = (wrap_each(b, part, name) for name, part in zip(shapes, parts, strict=True))
    return split_experts(b, gate_up, down)


def _is_turned(b: Build, name: str, shape: tuple[int, int, int]) -> bool:
    turned, stored = (shape[0], shape[2], shape[1]), b.checkpoint.shape(b.path(name)) if b.has(name) else None
    return stored is not None and tuple(stored) == turned != shape


def wrap_each(b: Build, parts: Iterable[Tensor], name: str, *, flipped: bool = False) -> list[Weight]:
    """Experts taken out of larger tensors, each known by its number and `name`. flipped: they are stored as
    [in, out]."""
    return [b.wrap(part, name=f"{expert}.{name}", flipped=flipped) for expert, part in enumerate(parts)]


def split_experts(b: Build, gate_up: list[Weight], down: list[Weight]) -> ExpertWeights:
    """This rank's slice of each of these experts, or the experts that are its own."""
    if b.group.size == 1:
        return gate_up, down
    if b.place.whole_experts:
        own = held(b, len(gate_up))
        return [gate_up[expert] for expert in own], [down[expert] for expert in own]
    inner = gate_up[0].shape[0] // 2
    rows = Rows(inner, inner)
    index = b.order(torch.cat([rows.index(0, b.group), rows.index(inner, b.group)]))
    share = rows.share(b.group)
    return [weight.take(index) for weight in gate_up], [_local_down(b, weight, share) for weight in down]


def load_joined(b: Build, route: RouteSpec, hidden: int, inner: int, names: tuple[str, str, str]) -> ExpertWeights:
    """Experts as names[0] [E, 2 inner, hidden] and names[1] [E, hidden, inner], or one by one under the usual names."""
    before, count = b.book.flops, route.experts
    if not b.has(names[0]):
        return load_experts(b, route, hidden, inner)
    gate_up = b.numbers(names[0], (count, 2 * inner, hidden))
    down = b.numbers(names[1], (count, hidden, inner))
    inside = b.at("experts")  # so Transformers calls them
    ups, downs = wrap_each(inside, gate_up, "gate_up_proj"), wrap_each(inside, down, "down_proj")
    count_visited(b, before, route)
    return split_experts(b, ups, downs)


def load_stacked(b: Build, route: RouteSpec, hidden: int, inner: int, names: tuple[str, str, str]) -> ExpertWeights:
    """Experts as three matrices [E * inner, hidden]: gate, up, and down transposed."""
    before, count = b.book.flops, route.experts
    gate, up, down = (b.numbers(name, (count * inner, hidden)).view(count, inner, hidden) for name in names)
    ups = wrap_each(b, map(torch.cat, zip(gate, up, strict=True)), "gate_up_proj")
    downs = wrap_each(b, (part.t().contiguous() for part in down), "down_proj")
    count_visited(b, before, route)
    return split_experts(b, ups, downs)


def load_transposed(b: Build, route: RouteSpec, hidden: int, inner: int, names: tuple[str, str, str]) -> ExpertWeights:
    """Experts as gate_up_proj [E, hidden, 2 inner] and down_proj [E, inner, hidden], or one by one under the usual
    names."""
    before, count = b.book.flops, route.experts
    if not b.has(names[0]):
        return load_experts(b, route, hidden, inner)
    gate_up = b.numbers(names[0], (count, hidden, 2 * inner))
    down = b.numbers(names[1], (count, inner, hidden))
    ups = wrap_each(b, (part.t().contiguous() for part in gate_up), "gate_up_proj", flipped=True)
    downs = wrap_each(b, (part.t().contiguous() for part in down), "down_proj", flipped=True)
    count_visited(b, before, route)
    return split_experts(b, ups, downs)
