"""A layer's mixture of experts on this backend. Owns: its weights stacked, and which launches serve how many tokens.

    one token     norm, router and choice | norm, gate and up | down, weighting, sum, residual
    few           norm, router and choice | gate and up | down | weighted sum and residual
    many          norm | router | choice | sorting by expert (two) | gate and up | down | weighted sum and residual
    4 bits        as few and many, on Hopper with tokens' rows laid in the order of experts before gate and up
    adapters      as many, with two launches more for each of the two products
Experts that every token visits are one more of the stacked ones where they have their shape: always chosen, last.
Nothing waits for the device, so that every step can be recorded. Must not know: families, checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.adapters import SiteStack
from tokenmill.compute.forward import Act, ForwardContext, Mixture, NormSpec, Weight
from tokenmill.kernels.triton.common import act_parts, copy_engine
from tokenmill.kernels.triton.experts.experts import combine, one_down, one_up
from tokenmill.kernels.triton.experts.grouped import STEADY, Stack, grouped, looks, pairs_per_tile
from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack, narrow_grouped
from tokenmill.kernels.triton.experts.narrow_one import narrow_one, spread_one, takes_one
from tokenmill.kernels.triton.experts.narrow_streamed import can_stream_experts, narrow_streamed, pick_cut
from tokenmill.kernels.triton.experts.operands import Whose, finish_pairs, pair_lanes
from tokenmill.kernels.triton.experts.route import SHARED_GATED, SHARED_PLAIN, pick, route
from tokenmill.kernels.triton.experts.route_few import pick_few, splits
from tokenmill.kernels.triton.experts.sorting import Sorted, sort_pairs, sort_rows
from tokenmill.kernels.triton.launch import Launch
from tokenmill.kernels.triton.products.parted import multiplies_parted, multiply_parted
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix
from tokenmill.kernels.triton.quantised.narrow import BLOCK

EVEN = 8
"""The router's rows are filled up to a multiple of so many: of odd numbers cuBLAS makes old, slow products."""
FEW_TOKENS = 64
"""Tokens up to which every program of the router may read its rows again."""


class StackedMixture:
    """residual + experts(norm(x)) + shared experts; gate_up [E, 2N, hidden], down [E, hidden, N]."""

    def __init__(self, launch: Launch, mixture: Mixture, ups: Stacked, downs: Stacked, *, shared: int) -> None:
        """shared: the last of the stacked experts is every token's (route.py)."""
        self.launch, self.visits, self.takes = launch, shared, shared > 0
        self.mixture = mixture
        self.ups, self.downs = ups, downs
        self.modest = launch.small or not copy_engine()
        self.experts = self._stacked(ups).shape[0]
        self.all_here = mixture.slots_for is None and self.experts == mixture.route.experts + (shared > 0)
        """Else others' choices have ids outside 0..experts - 1, which no kernel below `_several` looks up."""
        self.router = _plain(mixture.router)
        if shared == SHARED_GATED:
            gate = _plain(mixture.shared_gate)
            assert self.router is not None and gate is not None
            rows = torch.cat((self.router[0], gate[0]))
            self.router = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % EVEN)), self.router[1]
        self.barrier_count = torch.zeros(1, dtype=torch.int32, device=self._stacked(ups).device)

    def __call__(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        residual: Tensor | None = None,
        ahead: Weight | None = None,
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; ahead: the weight that multiplies next."""
        self.launch.count("experts")
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        x = x if x.is_contiguous() else x.contiguous()
        # Steady: a token takes the same way in any company.
        whose = self._adapted(ctx, self.mixture.route.top_k)
        fuses = self.launch.fuses and not self.launch.steady and whose is None
        one = fuses and self.all_here and x.shape[0] == 1
        if one and self._takes_one():
            return self._one(x, ctx, norm, residual, ahead)
        if fuses and 0 < x.shape[0] <= FEW_TOKENS and self.router is not None:
            ids, gates, h = self._pick(x, ctx, norm, self._stacked(self.ups) if self.all_here else None, keep=True)
        else:
            h = x if norm is None else ctx.kernels.norm(x, norm)
            ids, gates = self._route(h, ctx)
        if self.mixture.slots_for is not None:
            ids = self.mixture.slots_for(ids, ctx).to(torch.int32)
        if not self.all_here:
            ids = ids - self.mixture.first
        return self._several(h, ids, gates, self._shared(h, ctx, None, residual), whose)

    def chosen(self, x: Tensor, ids: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """The routed experts alone, of ids that layers chose."""
        self.launch.count("experts")
        gates = gates.float().contiguous()
        whose = self._adapted(ctx, ids.shape[1])
        return self._several(x.contiguous(), ids.to(torch.int32).contiguous(), gates, None, whose)

    def _adapted(self, ctx: ForwardContext, top: int) -> Whose | None:
        """Whose adapters change experts or the choice among them in this step; None: nobody's. top: experts a token."""
        rows, operands = ctx.rows, self.mixture.operands
        if rows is None or rows.adapters is None or operands is None:
            return None
        site = getattr(self.mixture.router, "site", None)
        chosen_by = site is not None and (site.used or bool(site.whole))
        if not chosen_by and all(each.down is None for each in operands):
            return None
        return Whose(rows.adapters, top)

    def _pick(
        self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None, near: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, gates, and norm(x) if it is to be kept."""
        launch = self.launch
        assert self.router is not None
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            x, norm = ctx.kernels.norm(x, norm), None
        rounds = norm is not None and x.dtype == torch.float16  # before it divides: large numbers would be lost
        if keep and not rounds and splits(x, self.router[0], self.mixture.route.experts):
            return pick_few(
                x, *self.router, norm, self.mixture.route, scratch=launch.scratch, count=self.barrier_count,
                pdl=launch.pdl, near=near, shared=self.visits,
            )  # fmt: skip
        return pick(
            x, *self.router, norm, self.mixture.route, scratch=launch.scratch, pdl=launch.pdl, keep=keep, near=near,
            shared=self.visits,
        )  # fmt: skip

    def _takes_one(self) -> bool:
        """Are there kernels for one token?"""
        if isinstance(self.ups, NarrowStack) and isinstance(self.downs, NarrowStack):
            return takes_one(self.ups, self.downs)
        return isinstance(self.ups, Stack) and isinstance(self.downs, Stack)

    def _one(
        self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None, residual: Tensor | None, ahead: Weight | None
    ) -> Tensor:
        """For one token."""
        launch, act, ups, downs = self.launch, self.mixture.act, self.ups, self.downs
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            x, norm = ctx.kernels.norm(x, norm), None
        residual = self._shared(x, ctx, norm, residual)
        if isinstance(ups, NarrowStack):
            assert isinstance(downs, NarrowStack)
            spread = spread_one(x, ups, norm, pdl=launch.pdl)  # before the choice, which the next launch waits for
            picked = self._picked(x, ctx, norm, ahead)
            return narrow_one(x, (ups, downs), picked, spread, act, residual, pdl=launch.pdl)
        assert isinstance(downs, Stack)
        picked = self._picked(x, ctx, norm, ahead)
        up = one_up(x, ups, picked[0], norm, act, pdl=launch.pdl, near=downs.table)
        return one_down(up, downs, picked, residual, pdl=launch.pdl, early=True)

    def _picked(
        self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None, ahead: Weight | None
    ) -> tuple[Tensor, Tensor]:
        """Ids and gates of norm(x)."""
        if self.router is None:
            return self._route(x if norm is None else ctx.kernels.norm(x, norm), ctx)
        return self._pick(x, ctx, norm, _read_next(ahead), keep=False)[:2]

    @staticmethod
    def _stacked(weight: Stacked) -> Tensor:
        return weight.table if isinstance(weight, Stack) else weight.data

    def _several(self, h: Tensor, ids: Tensor, gates: Tensor, residual: Tensor | None, whose: Whose | None) -> Tensor:
        pdl, pairs, steady = self.launch.pdl, ids.numel(), self.launch.steady
        if whose is None and not steady and (streamed := self._streamed(h, ids)) is not None:
            return combine(streamed, ids, gates, residual, self.experts, h.dtype, pdl=pdl)
        order = None
        if steady or whose is not None or not looks(pairs, self.experts):
            per_tile = STEADY.pairs if steady else pairs_per_tile(pairs, self.experts)
            order = sort_pairs(ids, self.experts, per_tile, self.launch.scratch, pdl=pdl)
        if order is None or whose is None or self.mixture.operands is None:
            inner = self._product(h, self.ups, ids, order, self.mixture.act)
            parts = self._product(inner, self.downs, ids, order, None)
        else:
            ups, downs = self.mixture.operands
            inner = self._product_adapted(h, (self.ups, ups), ids, order, whose, self.mixture.act)
            parts = self._product_adapted(inner, (self.downs, downs), ids, order, whose, None)
        return combine(parts, ids, gates, residual, self.experts, h.dtype, pdl=pdl)

    def _streamed(self, h: Tensor, ids: Tensor) -> Tensor | None:
        """Both products through narrow_streamed.py, in the order of pairs; None: it does not take them."""
        ups, downs, act, pdl = self.ups, self.downs, self.mixture.act, self.launch.pdl
        if not self.launch.hopper or not isinstance(ups, NarrowStack) or not isinstance(downs, NarrowStack):
            return None
        gated = act_parts(act)[1]
        if not (can_stream_experts(h, ups, gated=gated) and can_stream_experts(h, downs, gated=False)):
            return None
        size = pairs_per_tile(ids.numel(), self.experts)
        order, rows = sort_rows(h, ids, self.experts, size, self.launch.scratch, pdl=pdl)
        inner = narrow_streamed(rows, ups, order, act, up=True, pdl=pdl, cut=pick_cut(size, gated=gated))
        return narrow_streamed(inner, downs, order, None, up=False, pdl=pdl, cut=pick_cut(size, gated=False))

    def _product_adapted(
        self,
        x: Tensor,
        weight: tuple[Stacked, SiteStack],
        ids: Tensor,
        order: Sorted,
        whose: Whose,
        act: Act | None,
    ) -> Tensor:
        """The same with what adapters add before the activation."""
        (matrix, stack), launch, up = weight, self.launch, act is not None
        if stack.down is None:
            return self._product(x, matrix, ids, order, act)
        launch.count("expert_adapters")
        low = pair_lanes(x, stack, order, whose, up=up, pdl=launch.pdl)
        y = self._product(x, matrix, ids, order, None, up=up)
        return finish_pairs(y, low, stack, order, whose, act, pdl=launch.pdl)

    def _product(
        self, x: Tensor, weight: Stacked, ids: Tensor, order: Sorted | None, act: Act | None, *, up: bool | None = None
    ) -> Tensor:
        """act(one of the two products) of every pair; up: it is the first one (else: if it has an activation)."""
        up = act is not None if up is None else up
        pdl, tiling = self.launch.pdl, STEADY if self.launch.steady else None
        if isinstance(weight, NarrowStack):
            return narrow_grouped(x, weight, ids, order, act, up=up, pdl=pdl, modest=self.modest, tiling=tiling)
        return grouped(x, weight, ids, order, act, up=up, pdl=pdl, modest=self.modest, tiling=tiling)

    def _route(self, h: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        m, plain = self.mixture, self.router
        exact = m.wide and not self.launch.steady
        if exact and plain is not None and plain[1] is None and multiplies_parted(h, plain[0]):
            self.launch.count("linear")
            logits = multiply_parted(h, plain[0], pdl=self.launch.pdl)
        elif self.visits == SHARED_GATED and plain is not None:
            logits = ctx.kernels.product(h, *plain)
        else:
            logits = m.router.matmul(h.float() if m.wide else h, ctx)
        self.launch.count("route")
        # Of many tokens some go to the first experts, too; a long chunk is not in want of memory.
        likely = self.all_here and self.experts <= h.shape[0] * m.route.top_k and h.shape[0] <= 1024
        return route(
            logits, m.route, pdl=self.launch.pdl, dtype=torch.int32, near=self._stacked(self.ups) if likely else None,
            shared=self.visits,
        )  # fmt: skip

    def _shared(self, h: Tensor, ctx: ForwardContext, norm: NormSpec | None, residual: Tensor | None) -> Tensor | None:
        """residual + what the shared experts make of norm(h)."""
        if self.mixture.shared is None or self.mixture.shared_gate is not None:
            return residual
        up, down = self.mixture.shared
        return down.matmul(up.matmul(h, ctx, norm=norm, act=self.mixture.act), ctx, residual=residual)


Stacked = Stack | NarrowStack


def _table(weight: Weight | None) -> Tensor | None:
    """The numbers of a weight (of its first part), where they are one tensor."""
    parts = [] if weight is None else getattr(weight, "parts", [weight])
    found = parts[0].pieces() if parts else None
    return None if found is None else found[1]["table"]


def _read_next(weight: Weight | None) -> Tensor | None:
    """What a product with this weight reads, at every step: the zeros of a 2:4 matrix are not put back for it."""
    parts = getattr(weight, "parts", [weight])
    first = parts[0] if parts else None
    packed = getattr(getattr(first, "base", first), "packed", None)
    return packed.stored if isinstance(packed, PrunedMatrix) else _table(weight)


def form_of(weights: list[Weight]) -> Any | None:
    """What these matrices have in common, if there is a kernel for it."""
    pieces = [found for w in weights if (found := w.pieces()) is not None]
    forms = {(form, tuple((n, t.shape, t.dtype) for n, t in parts.items() if t is not None)) for form, parts in pieces}
    if len(pieces) < len(weights) or len(forms) != 1:
        return None
    form = pieces[0][0]
    return form if form == "dense" or form.bits == 4 or form.group == 0 or form.blocks else None


def stack(weights: list[Weight]) -> Stack | NarrowStack | None:
    """Matrices of one form as one tensor, the list emptied on the way; None: there is no kernel for them."""
    form = form_of(weights)
    if form is None:
        return None
    pieces = [found[1] for w in weights if (found := w.pieces()) is not None]
    columns = {name: [t for parts in pieces if (t := parts[name]) is not None] for name in pieces[0]}
    weights.clear()
    del pieces
    joined = {name: _joined(tensors) if tensors else None for name, tensors in columns.items()}
    table = joined["table"]
    assert table is not None, "a matrix has numbers"
    if form == "dense":
        return Stack(table, joined["bias"])
    scales = joined["scales"]
    assert scales is not None, "and these have scales"
    if form.bits == 8:
        return Stack(table, joined["bias"], scales)
    return NarrowStack(table, scales, joined["zeros"], joined["bias"], form.shape, form.group, form.table)


def _joined(tensors: list[Tensor]) -> Tensor:
    """[E, ...] of these: a view where they lie one after the other already; else they are let go one by one."""
    first = tensors[0]
    step, storage = first.nbytes, first.untyped_storage().data_ptr()
    if all(
        t.data_ptr() == first.data_ptr() + i * step and t.untyped_storage().data_ptr() == storage and t.is_contiguous()
        for i, t in enumerate(tensors)
    ):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    out = first.new_empty((len(tensors), *first.shape))
    bits = torch.uint8 if first.element_size() == 1 else first.dtype  # not every device copies every 8 bit type
    for i in range(len(tensors)):
        out[i].view(bits).copy_(tensors[i].view(bits))
        tensors[i] = first
    return out


def pack_mixture(launch: Launch, mixture: Mixture) -> StackedMixture | None:
    """The mixture ready to run, its lists of weights emptied; None: a format that has no kernel here."""
    form = form_of(mixture.ups)
    if form is None or form_of(mixture.downs) is None:
        return None
    if form != "dense" and form.blocks and act_parts(mixture.act)[1] and form.shape[0] // 2 % BLOCK:
        return None  # tiles of the second half would lie in two blocks of scales
    shared = _visited(mixture)
    if shared and mixture.shared is not None:
        for weights, every in zip((mixture.ups, mixture.downs), mixture.shared, strict=True):
            weights.append(every)
        mixture.shared = None
    ups, downs = _stack_both(mixture)
    return StackedMixture(launch, mixture, ups, downs, shared=shared)


def _stack_both(mixture: Mixture) -> tuple[Stacked, Stacked]:
    """The smaller matrices go first. torch would lay their stack into the memory that larger ones have left, and a
    layer later nothing fits into what remains there: 17 of 82 GiB were lost so in a model of 40 layers."""
    every = mixture.ups, mixture.downs
    made: dict[int, Stacked | None] = {}
    sizes = [0 if (table := _table(weights[0])) is None else table.nbytes for weights in every]
    for i in sorted((0, 1), key=sizes.__getitem__):
        made[i] = stack(every[i])
    ups, downs = made[0], made[1]
    assert ups is not None and downs is not None
    return ups, downs


def _visited(mixture: Mixture) -> int:
    """Can what every token visits be one more of these experts? (Not where others have some, or adapters change it.)"""
    whole = mixture.slots_for is None and len(mixture.ups) == mixture.route.experts
    if mixture.shared is None or not mixture.fixed or not whole:
        return 0
    up, down = mixture.shared
    if form_of([mixture.ups[0], up]) is None or form_of([mixture.downs[0], down]) is None:
        return 0
    if mixture.shared_gate is None:
        return SHARED_PLAIN
    router, gate = _plain(mixture.router), _plain(mixture.shared_gate)
    if router is None or gate is None or mixture.wide or router[1] is not None or gate[1] is not None:
        return 0
    return SHARED_GATED if router[0].dtype == gate[0].dtype else 0


def _plain(weight: Weight | None) -> tuple[Tensor, Tensor | None] | None:
    """Numbers and bias of a weight that is not packed."""
    found = None if weight is None else weight.pieces()
    if found is None or found[0] != "dense" or found[1]["table"] is None:
        return None
    return found[1]["table"], found[1]["bias"]
