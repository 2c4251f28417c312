"""A layer's mixture of experts on this backend. Owns: its weights stacked, and which launches serve how many tokens.

    one token     norm, router and choice | norm, gate and up | down, weighting, sum, residual
    few           norm | router | choice | gate and up | down | weighted sum and residual
    many          the same, with pairs sorted by expert after the choice
Nothing waits for the device, so that every step can be recorded. Must not know: families, checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.core.forward import ForwardContext, Mixture, NormSpec
from tokenmill.core.protocols import Weight
from tokenmill.kernels.triton.experts import combine, one_down, one_up
from tokenmill.kernels.triton.grouped import FEW, grouped, pairs_per_tile
from tokenmill.kernels.triton.route import pick, route
from tokenmill.kernels.triton.sorting import sort_pairs

if TYPE_CHECKING:
    from tokenmill.kernels.triton.kernels import TritonKernels


class StackedMixture:
    """residual + experts(norm(x)) + shared experts; gate_up [E, 2N, hidden], down [E, hidden, N]."""

    def __init__(self, kernels: TritonKernels, mixture: Mixture, ups: Stack, downs: Stack) -> None:
        self.kernels = kernels
        self.mixture = mixture
        self.ups, self.downs = ups, downs
        router = mixture.router.pieces()
        plain = router is not None and router[0] == "dense" and router[1]["table"] is not None
        self.router = (router[1]["table"], router[1]["bias"]) if router is not None and plain else None

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        self.kernels.count("experts")
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        x = x if x.is_contiguous() else x.contiguous()
        if x.shape[0] == 1:
            return self._one(x, ctx, norm, residual)
        h = x if norm is None else self.kernels.norm(x, norm)
        residual = self._shared(h, ctx, None, residual)
        return self._several(h, *self._route(h, ctx), residual)

    def _one(self, x: Tensor, ctx: ForwardContext, norm: NormSpec | None, residual: Tensor | None) -> Tensor:
        kernels, m = self.kernels, self.mixture
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            x, norm = kernels.norm(x, norm), None
        residual = self._shared(x, ctx, norm, residual)
        if self.router is None:
            picked = self._route(x if norm is None else kernels.norm(x, norm), ctx)
        else:
            picked = pick(x, *self.router, norm, m.route, scratch=kernels.scratch, pdl=kernels.pdl)
        up = one_up(x, self.ups.table, self.ups.bias, picked[0], norm, m.act, pdl=kernels.pdl)
        return one_down(up, self.downs.table, self.downs.bias, picked, residual, pdl=kernels.pdl, early=True)

    def _several(self, h: Tensor, ids: Tensor, gates: Tensor, residual: Tensor | None) -> Tensor:
        pdl, count, pairs = self.kernels.pdl, self.ups.table.shape[0], ids.numel()
        ups, downs, act = self.ups, self.downs, self.mixture.act
        order = None
        if pairs > FEW:
            order = sort_pairs(ids, count, pairs_per_tile(pairs, count), self.kernels.scratch, pdl=pdl)
        inner = grouped(h, ups.table, ups.bias, ids, order, act, up=True, pdl=pdl)
        parts = grouped(inner, downs.table, downs.bias, ids, order, None, up=False, pdl=pdl)
        return combine(parts, ids, gates, residual, count, h.dtype, pdl=pdl)

    def _route(self, h: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        m = self.mixture
        logits = m.router.matmul(h.float() if m.wide else h, ctx)
        self.kernels.count("route")
        return route(logits, m.route, pdl=self.kernels.pdl, dtype=torch.int32)

    def _shared(self, h: Tensor, ctx: ForwardContext, norm: NormSpec | None, residual: Tensor | None) -> Tensor | None:
        """residual + what the shared experts make of norm(h)."""
        if self.mixture.shared is None:
            return residual
        up, down = self.mixture.shared
        return down.matmul(up.matmul(h, ctx, norm=norm, act=self.mixture.act), ctx, residual=residual)


class Stack:
    """One matrix per expert as one tensor: table [E, N, K], bias [E, N] or None."""

    def __init__(self, table: Tensor, bias: Tensor | None) -> None:
        self.table = table
        self.bias = bias


def stack(weights: list[Weight]) -> Stack | None:
    """Plain matrices of one shape as one tensor, the list emptied on the way; None: they are something else."""
    pieces = [w.pieces() for w in weights]
    plain = [p[1] for p in pieces if p is not None and p[0] == "dense"]
    if len(plain) < len(weights) or len({w.shape for w in weights}) > 1:
        return None
    tables = [t for p in plain if (t := p["table"]) is not None]
    biases = [b for p in plain if (b := p["bias"]) is not None]
    if len(biases) not in (0, len(weights)) or len({t.dtype for t in tables}) > 1:
        return None
    weights.clear()
    del pieces, plain
    return Stack(_joined(tables), torch.stack(biases) if biases else None)


def _joined(tables: list[Tensor]) -> Tensor:
    """[E, N, K] of these [N, K]: a view where they lie one after the other already; else the list is emptied."""
    first = tables[0]
    step = first.nbytes
    storage = first.untyped_storage().data_ptr()
    if all(t.data_ptr() == first.data_ptr() + i * step for i, t in enumerate(tables)) and all(
        t.untyped_storage().data_ptr() == storage for t in tables
    ):
        return first.as_strided((len(tables), *first.shape), (first.numel(), *first.stride()))
    out = first.new_empty((len(tables), *first.shape))
    for i in range(len(tables)):
        out[i].copy_(tables[i])
        tables[i] = first
    return out


def pack_mixture(kernels: TritonKernels, mixture: Mixture) -> StackedMixture | None:
    """The mixture ready to run, its lists of weights emptied; None: a format that has no kernel here."""
    if any(p is None or p[0] != "dense" for p in (w.pieces() for w in (*mixture.ups, *mixture.downs))):
        return None
    ups = stack(mixture.ups)
    if ups is None:
        return None
    downs = stack(mixture.downs)
    assert downs is not None, "the experts of a layer share one format"
    return StackedMixture(kernels, mixture, ups, downs)
