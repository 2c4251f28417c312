"""A Weight around a Weight. Owns: which rows and columns of which stored matrices a product is made of, and adding what
adapters do to it.

Joining and splitting are noted until the weight settles. Then the product has a site, whose tensors hold adapters. A
step without adapted rows multiplies as if this wrapper were not there. Must not know: formats, files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, Unpack

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.compute.forward import Around, ForwardContext, Kernels, Weight
from tokenmill.core.errors import ModelError
from tokenmill.quant.base import WeightBase


@dataclass(frozen=True)
class Source:
    """A stored matrix `path` of this shape: a product has these rows of it (None: all) in this order, and the columns
    [start, stop); first: it holds what all ranks share out, such as a bias; flipped: files hold it as [in, out]."""

    path: str
    shape: tuple[int, int]
    rows: Tensor | None = None
    columns: tuple[int, int] | None = None
    first: bool = True
    flipped: bool = False

    @property
    def height(self) -> int:
        """Rows that the product has."""
        return self.shape[0] if self.rows is None else len(self.rows)

    def take(self, index: Tensor) -> Source:
        """These rows of it."""
        return replace(self, rows=index if self.rows is None else self.rows[index])

    def between(self, start: int, stop: int, first: bool) -> Source:
        """These columns of it."""
        begin = 0 if self.columns is None else self.columns[0]
        return replace(self, columns=(begin + start, begin + stop), first=self.first and first)


class Register(Protocol):
    """Who hears of a settled product."""

    device: torch.device

    def settle(self, weight: LoraWeight, bias: Tensor | None) -> AdapterSite: ...


class LoraWeight(WeightBase):
    """`base`, which adapters may change. site: where they lie, once it is settled."""

    def __init__(self, base: Any, sources: list[Source], register: Register) -> None:
        self.base = base
        """None: a backend holds it with others' (compute/adapters.py: SiteStack)."""
        self.sources = sources
        self.register = register
        self.site: AdapterSite | None = None
        self.shape = base.shape
        self.told_bias: Tensor | None = None
        """The base's bias in float32. Shifts are made from it; new weights are copied into it like into others."""

    @property
    def changed(self) -> tuple[str, ...]:  # type: ignore[override]
        """The base's."""
        return getattr(self.base, "changed", ())

    @property
    def parts(self) -> list[Any]:
        """The base's parts, where it has such."""
        return getattr(self.base, "parts", [self.base])

    @property
    def packed(self) -> Any:
        """The base's packed form, for backends that name many weights in one call."""
        return getattr(self.base, "packed", None)

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias + what the row's adapter adds)."""
        rows, site = ctx.rows, self.site
        if not self._takes_part(ctx):
            done: Tensor = self.base.matmul(x, ctx, **around)
            return done
        assert rows is not None and rows.adapters is not None and site is not None
        if site.used:
            h = x if (norm := around.get("norm")) is None else ctx.kernels.norm(x, norm)
            low = ctx.kernels.adapt(h, site, rows.adapters)
            around["delta"] = Delta(site, h, low, rows.adapters)
        y: Tensor = self.base.matmul(x, ctx, **around)
        return self._replaced(y, x, ctx, around) if site.whole else y

    def open(self, x: Tensor, ctx: ForwardContext, delta: Delta | None = None) -> Tensor | None:
        """As the base, with what adapters add; where one replaces it, it is not made so."""
        if self._takes_part(ctx):
            rows, site = ctx.rows, self.site
            assert rows is not None and rows.adapters is not None and site is not None
            if site.whole:
                return None
            delta = Delta(site, x, None, rows.adapters)
        found: Tensor | None = self.base.open(x, ctx, delta)
        return found

    def _takes_part(self, ctx: ForwardContext) -> bool:
        """May adapters change this product in this step?"""
        rows, site = ctx.rows, self.site
        return rows is not None and rows.adapters is not None and site is not None and bool(site.used or site.whole)

    def _replaced(self, y: Tensor, x: Tensor, ctx: ForwardContext, around: Around) -> Tensor:
        """The rows of adapters that bring a matrix of their own. Such steps are never recorded."""
        assert ctx.rows is not None and ctx.rows.adapters is not None and self.site is not None
        residual, around = around.get("residual"), {**around, "delta": None}
        for slot, weight in self.site.whole.items():
            at = torch.where(ctx.rows.adapters == slot)[0]
            if len(at):
                around["residual"] = None if residual is None else residual[at]
                y = y.index_copy(0, at, weight.matmul(x[at], ctx, **around))
        return y

    def concat(self, others: list[Weight]) -> Weight:
        """[self; others] along out: one product with the adapters of each part."""
        if not others:
            return self
        sources = list(self.sources)
        for other in others:
            sources += other.sources if isinstance(other, LoraWeight) else [Source("", other.shape)]
        return LoraWeight(self.base.concat([bare(other) for other in others]), sources, self.register)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index, which goes from part to part."""
        sources, start, place = [], 0, index.cpu()
        for source in self.sources:
            stop = start + source.height
            here = place[(place >= start) & (place < stop)] - start
            if len(here):
                sources.append(source.take(here))
            start = stop
        if len(self.sources) > 1 and bool((place[1:] < place[:-1]).any()):
            raise ModelError("adapters cannot follow rows of several matrices that are mixed with each other.")
        return type(self)(self.base.take(index), sources, self.register)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """An equal part along out (0) or in (1)."""
        if parts == 1:
            return self
        if dim == 0:
            start, stop = self.part_range(0, part, parts)
            rows = self.take(torch.arange(start, stop)).sources
            return type(self)(self.base.split(0, part, parts), rows, self.register)
        start, stop = self.part_range(1, part, parts)
        sources = [source.between(start, stop, part == 0) for source in self.sources]
        return type(self)(self.base.split(1, part, parts), sources, self.register)

    def settle(self, kernels: Kernels) -> Weight:
        """The base in its final form, with a site."""
        bias = bias_of(self.base)
        self.told_bias = None if bias is None else bias.clone()
        self.base = self.base.settle(kernels)
        self.site = self.register.settle(self, self.told_bias)
        return self

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in] of the base."""
        found: Tensor = self.base.rows(ids)
        return found

    def dense(self) -> Tensor:
        """The base's whole matrix: whoever keeps it multiplies where adapters do not reach."""
        if self.site is not None:
            self.site.why_not = "it is taken into other matrices when the model is loaded"
        found: Tensor = self.base.dense()
        return found

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """The base's."""
        found: tuple[Any, dict[str, Tensor | None]] | None = self.base.pieces()
        return found

    def site_device(self) -> torch.device:
        """Where the base's rows are asked for."""
        return self.register.device

    def bytes(self) -> int:
        """The base's; adapters are counted apart."""
        return int(self.base.bytes())


def bare(weight: Any) -> Any:
    """The weight itself, without what adapters do to it."""
    return weight.base if isinstance(weight, LoraWeight) else weight


def bias_of(weight: Any) -> Tensor | None:
    """The bias of a weight that has not settled, in float32."""
    parts = getattr(weight, "parts", None)
    if isinstance(parts, list) and parts and hasattr(parts[0], "shape") and getattr(weight, "bias", None) is None:
        found = [bias_of(part) if isinstance(part, WeightBase) else None for part in parts]
        if any(bias is not None for bias in found):
            zeros = (torch.zeros(part.shape[0]) for part in parts)
            return torch.cat([none if b is None else b.cpu() for b, none in zip(found, zeros, strict=True)])
        return None
    bias = getattr(weight, "bias", None)
    if bias is None and hasattr(weight, "inner"):
        return bias_of(weight.inner)
    return None if bias is None else bias.detach().float()
