"""Products of the Triton backend. Owns: which kernel multiplies which weight, and what is joined with the product.

Must not know: models, plans, attention.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.compute.forward import Act, NormSpec, Packed, StoredMatrix
from tokenmill.core.errors import UserError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton.common import act_parts
from tokenmill.kernels.triton.launch import launch_here
from tokenmill.kernels.triton.products import adapted, adapters
from tokenmill.kernels.triton.products.chosen import FLOATS, Ways
from tokenmill.kernels.triton.products.gemv import gemv
from tokenmill.kernels.triton.products.search import Report
from tokenmill.kernels.triton.products.steady import steady
from tokenmill.kernels.triton.products.thin import thin
from tokenmill.kernels.triton.products.ways_by_shape import FEW, Way, stream_cut
from tokenmill.kernels.triton.pruned.expand import with_zeros
from tokenmill.kernels.triton.pruned.layout import PrunedMatrix
from tokenmill.kernels.triton.pruned.product import norms_inside as pruned_norms
from tokenmill.kernels.triton.pruned.product import pack_here, pruned_product, pruned_way
from tokenmill.kernels.triton.quantised.narrow import PACKERS, NarrowMatrix
from tokenmill.kernels.triton.quantised.narrow_linear import (
    measured_narrow,
    narrow_linear,
    narrow_way,
    norms_inside,
    scaled_product,
)
from tokenmill.kernels.triton.quantised.narrow_round import as_float8, widened
from tokenmill.kernels.triton.unfit import UNFIT, Kind, is_unfit, kind_of, note_unfit


class ProductKernels(ReferenceKernels):
    """Products of dense and packed weights, with their adapters. The options are those of TritonKernels."""

    def __init__(self, *, steady: bool, without: Collection[str], cache: Path | None, pruned: str) -> None:
        super().__init__()
        self.launch = launch_here(self.count, without, steady=steady, narrow_ways=measured_narrow)
        self.unfit: set[Kind] = set()
        self.prunes = pruned == "packed" and not steady
        self.widens = "widened" not in without
        self.widened_type: torch.dtype | None = None
        """In which type matrices of groups are kept, too, from now on."""
        self.packed: weakref.WeakKeyDictionary[NarrowMatrix, None] = weakref.WeakKeyDictionary()  # in order
        self.ways = Ways(self.launch, None if steady else cache, many_rows="many-rows" not in without)

    def product(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias)."""
        packed = isinstance(weight, (NarrowMatrix, PrunedMatrix))
        if not packed and (not isinstance(weight, Tensor) or weight.ndim == 3):
            if isinstance(weight, StoredMatrix):  # no form for this kind here: its numbers are made at every call
                self.count("unpacked_product", fallback=True)
            return super().product(x, weight, bias, norm=norm, act=act, residual=residual, delta=delta)
        if delta is not None:
            found = self._beside(delta, weight, bias, act, residual)
            if found is None:  # what adapters read is normed already
                y = self.product(x if norm is None else delta.inputs, weight, bias)
                found = self._adapted(y, delta, act, residual)
            return found
        if not self.launch.fuses and (norm or act or residual is not None):
            return self._around(self.product(x if norm is None else self.norm(x, norm), weight, bias), act, residual)
        asked = (x, packed, *weight.shape, act, norm is not None)
        found = self._if_it_fits("linear", asked, lambda: self._product(x, weight, bias, norm, act, residual))
        if found is not None:
            return found
        self.count("linear", fallback=True)
        x = x if norm is None else self.norm(x, norm)
        if packed:
            every = torch.arange(weight.shape[0], device=x.device)
            weight, bias = weight.rows(every, x.dtype), weight.bias
        return self._library(x, weight, bias, act, residual)

    def open_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, delta: Delta | None) -> Tensor | None:
        """x @ weight.T + bias in parts of the sum, with a delta one more; None: it is not made so."""
        if delta is None:
            return None if x.shape[0] < 2 else self._parts(x, weight, bias)
        return None if delta.site.gains is not None else self._beside(delta, weight, bias, None, None, open_=True)

    def _parts(self, x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor | None = None) -> Tensor | None:
        """x @ weight.T + bias in parts of the sum. turn: `ready` of `stream`; one part will do. None: it is not made
        so."""
        if self.launch.steady or not self.launch.fuses or not self.ways.streams(x, weight):
            return None
        shade = turn is not None
        beside = adapted.ROOM if shade else 0
        cut = stream_cut(x.shape[0], *weight.shape, parts=True, beside=beside)
        if cut is None and shade:
            cut = stream_cut(x.shape[0], *weight.shape, beside=beside)
        if cut is None:
            return None
        from tokenmill.kernels.triton.products.stream import stream  # the interpreter cannot load it

        how = {"pdl": self.launch.pdl, "cut": cut, "ready": turn}
        asked = (x, *weight.shape, shade)
        found = self._if_it_fits("open_product", asked, lambda: stream(x, weight, bias, None, None, **how))  # type: ignore[arg-type]
        if found is not None:
            self.count("linear")
        return found

    def adapt(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor | None:
        """down @ x of each token's adapter, in parts of the sum: [parts, T, lanes]; None for few tokens."""
        if not adapters.can_adapt(site, x):
            self.count("adapt", fallback=True)
            return super().adapt(x, site, slots)
        self.count("adapt")
        return None if self._is_few(site, x) else self._low(x, site, slots)

    def _is_few(self, site: AdapterSite, x: Tensor) -> bool:
        """Do adapters go down and up in one launch?"""
        steady = self.launch.steady
        return not steady and adapters.can_adapt(site, x) and adapted.serves(site, x, self.launch.scratch)

    def add_delta(self, y: Tensor, delta: Delta) -> Tensor:
        """y [T, N] with what the adapters add."""
        return self._adapted(y, delta, None, None)

    def _adapted(self, y: Tensor, delta: Delta, act: Act | None, residual: Tensor | None) -> Tensor:
        """residual + act(y with what the adapters add)."""
        residual = _contiguous(residual)
        if delta.low is None:
            found = self._behind(y.contiguous(), delta, act, residual)
            if found is not None:
                return found
            delta = replace(delta, low=self._low(delta.inputs, delta.site, delta.slots))
        assert delta.low is not None
        if delta.low.ndim == 2:  # plain torch has made it
            self.count("add_delta", fallback=True)
            y = super().add_delta(y, delta)
            y = y if act is None else self.activate(y, act)
            return y if residual is None else self.add(residual, y)
        self.count("add_delta")
        return adapters.finish(y.contiguous(), delta, act, residual, steady=self.launch.steady, pdl=self.launch.pdl)

    def _low(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor:
        """down @ x of each token's adapter, in a launch of its own."""
        x = x if x.stride(1) == 1 else x.contiguous()
        return adapters.adapt(x, site, slots, steady=self.launch.steady, pdl=self.launch.pdl)

    def _behind(self, y: Tensor, delta: Delta, act: Act | None, residual: Tensor | None, turn: Tensor | None = None,
                *, open_: bool = False) -> Tensor | None:  # fmt: skip
        """What few tokens' adapters do to a product, in one launch; None: the device cannot hold it. turn: what
        `stream` got."""
        shade, scratch = turn is not None, self.launch.scratch
        signs = scratch.turn(y.device) if turn is None else turn
        how = {"pdl": self.launch.pdl, "shade": shade, "open_": open_}
        found = self._if_it_fits("add_delta", (y, delta.inputs, act, shade, open_),
                                 lambda: adapted.adapted(y, delta, act, residual, scratch, signs, **how))  # fmt: skip
        if found is not None:
            self.count("add_delta")
        elif turn is not None:
            turn.zero_()  # nobody has taken down what `stream` has put up
        return found

    def _beside(self, delta: Delta, weight: Any, bias: Tensor | None, act: Act | None, residual: Tensor | None,
                *, open_: bool = False) -> Tensor | None:  # fmt: skip
        """A product whose adapters' part is made while it streams its weight; None: it is not made so."""
        if delta.low is not None or not isinstance(weight, Tensor) or not self._is_few(delta.site, delta.inputs):
            return None
        turn = self.launch.scratch.turn(weight.device)
        parts = self._parts(delta.inputs, weight, bias, turn)
        if parts is None:
            return None
        residual = _contiguous(residual)
        return self._behind(parts, delta, act, residual, turn, open_=open_)

    def _if_it_fits(self, op: str, asked: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor | None:
        """What is made; None: the device cannot hold the kernel, which is said once and not tried again for calls of
        this kind."""
        if self.unfit and kind_of(op, asked) in self.unfit:
            return None
        try:
            return make()
        except UNFIT as error:
            if not is_unfit(error):
                raise
            note_unfit(self, op, kind_of(op, asked), error)
            return None

    def _product(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        norm: NormSpec | None,
        act: Act | None,
        residual: Tensor | None,
    ) -> Tensor:
        """The same by the kernel that serves this shape best."""
        if self.launch.steady:
            return self._steady(x, weight, bias, norm, act, residual)
        if isinstance(weight, NarrowMatrix):
            return self._packed(x, weight, norm, act, residual)
        if isinstance(weight, PrunedMatrix):
            return self._pruned(x, weight, norm, act, residual)
        way = self.ways.of(x, weight, bias, norm, act, fused=act is not None or residual is not None)
        if way[0] in ("blas", "wide"):
            return self._wide_linear(x, weight, bias, norm, act, residual, way)
        self.count("linear")
        # What thin.py norms it rounds before it divides: in float16 large numbers would be lost.
        inside = way[0] == "gemv" or (way[0] == "thin" and way[-1] and x.dtype != torch.float16)
        if norm is not None and not (inside and norm.kind == "rms" and norm.bias is None):
            x, norm = self.norm(x, norm), None
        if x.stride(1) != 1:
            x = x.contiguous()
        residual = _contiguous(residual)
        if way[0] == "stream":
            from tokenmill.kernels.triton.products.stream import stream  # the interpreter cannot load it

            return stream(x, weight, bias, act, residual, pdl=self.launch.pdl, cut=way[1:])  # type: ignore[arg-type]
        if way[0] == "gemv":
            return gemv(x, weight, bias, norm, act, residual, pdl=self.launch.pdl, config=way[1:])
        return thin(
            x, weight, bias, norm, act, residual, scratch=self.launch.scratch, pdl=self.launch.pdl, config=way[1:7]
        )

    def _packed(
        self, x: Tensor, weight: NarrowMatrix, norm: NormSpec | None, act: Act | None, residual: Tensor | None,
        *, just_made: bool = False,
    ) -> Tensor:  # fmt: skip
        """The same with a packed weight. just_made: by the launch before, so that stream.py would read it too early."""
        if x.shape[0] == 0:
            return x.new_empty((0, weight.shape[0] // (2 if act_parts(act)[1] else 1)))
        kept = weight.widened
        if kept is not None and x.shape[0] > FEW and x.dtype == kept.dtype:
            return self._product(x, kept, weight.bias, norm, act, residual)
        launch = replace(self.launch, few_rows=False) if just_made else self.launch
        pdl, way = launch.pdl, narrow_way(launch, x, weight, act)
        if way[0] == "float8":
            return self._packed(x, as_float8(weight, pdl=pdl), norm, act, residual)
        self.count("narrow_linear")
        residual = _contiguous(residual)
        if norm is not None and not norms_inside(way, weight, norm):
            x, norm = self.norm(x, norm), None
        if x.stride(1) != 1:
            x = x.contiguous()
        if way[0] == "widen":
            return self._just_made(x, widened(weight, x.dtype, pdl=pdl), weight.bias, act, residual)
        if way[0] == "library":
            return self._finished(scaled_product(x, weight, norm, pdl=pdl), act, residual)
        return narrow_linear(self.launch, x, weight, norm, act, residual, way)

    def _pruned(
        self, x: Tensor, weight: PrunedMatrix, norm: NormSpec | None, act: Act | None, residual: Tensor | None
    ) -> Tensor:
        """The same with a 2:4 matrix."""
        way = pruned_way(x, weight)
        if way == "expand":
            whole: Any = with_zeros(weight, pdl=self.launch.pdl)
            if weight.scales is None:
                x = x if norm is None else self.norm(x, norm)
                return self._just_made(x, whole.to(x.dtype), weight.bias, act, residual)
            whole = NarrowMatrix(whole, weight.scales, None, weight.bias, weight.shape, 8, 0)
            return self._packed(x, whole, norm, act, residual, just_made=True)
        self.count("pruned_linear")
        if norm is not None and not pruned_norms(way, weight, norm):
            x, norm = self.norm(x, norm), None
        residual = _contiguous(residual)
        return pruned_product(self.launch, x, weight, norm, act, residual, way)

    def _just_made(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Act | None, residual: Tensor | None
    ) -> Tensor:
        """The same with a weight that the launch before makes: our kernels for few rows would read it too early."""
        if x.shape[0] <= FEW:
            self.count("linear")
            return self._library(x, weight, bias, act, residual)
        return self.product(x, weight, bias, act=act, residual=residual)

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """As specified; unasked, 8 bits have one scale a row, which is what tensor cores multiply."""
        return super().quantise(weight, bits, group or (weight.shape[1] if bits == 8 else 0))

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """2:4 matrices (pruned/layout.py) and the kinds of 8 and 4 bits that have a layout (narrow.py); None: this one
        has not."""
        pruned = pack_here(matrix) if self.prunes else None
        if pruned is not None:
            self.count("pack_pruned")
            return pruned
        make = PACKERS.get(matrix.kind)
        found = None if make is None else make(matrix)
        if isinstance(found, NarrowMatrix) and found.group and not found.blocks and found.row_steps is None:
            self.packed[found] = None
            if self.widened_type is not None:
                found.widened = widened(found, self.widened_type, pdl=False)
        return found

    def keep_widened(self, dtype: torch.dtype, room: int) -> int:
        """Keep all matrices with a scale per group in 16 bits, too, if that takes at most `room` bytes: -> bytes taken.
        What multiplies more than a few rows then reads these, and nothing has to be widened."""
        need = sum(math.prod(each.shape) * dtype.itemsize for each in self.packed)
        if not self.widens or dtype.itemsize != 2 or not 0 < need <= room:
            return 0
        for each in list(self.packed):
            each.widened = widened(each, dtype, pdl=False)
        self.widened_type = dtype
        return need

    def _steady(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        norm: NormSpec | None,
        act: Act | None,
        residual: Tensor | None,
    ) -> Tensor:
        if isinstance(weight, NarrowMatrix) or x.dtype != weight.dtype or x.dtype not in FLOATS:
            raise UserError("--deterministic on a GPU serves models in 16 or 32 bits: leave --quantization out.")
        self.count("linear")
        x = x if norm is None else self.norm(x, norm)
        residual = _contiguous(residual)
        return steady(x.contiguous(), weight.contiguous(), bias, act, residual, pdl=self.launch.pdl)

    def search(self, seconds: float) -> Report:
        """Look for faster ways of the products that were made so far; they are taken from now on, and kept. What was
        recorded before goes on as it is. Not beside other work."""
        return self.ways.search(self._forced, seconds)

    def found_ways(self) -> dict[str, Way]:
        """Ways of products that were found on this kind of device, by operation."""
        return self.ways.own

    def take_ways(self, ways: Mapping[str, Sequence[Any]]) -> None:
        """Make products in these ways from now on, instead of those."""
        self.ways.take(ways)

    def _forced(
        self,
        name: str,
        way: Way,
        x: Tensor,
        weight: Tensor,
        norm: NormSpec | None,
        act: Act | None,
        residual: Tensor | None,
    ) -> Tensor:
        """A product in this way, whatever is otherwise best; raises where the device cannot hold it."""
        with self.ways.only(name, way):
            return self._product(x, weight, None, norm, act, residual)

    def _wide_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: NormSpec | None,
        act: Act | None,
        residual: Tensor | None,
        way: Way,
    ) -> Tensor:
        """The same through cuBLAS, or through wide.py."""
        self.count("linear")
        if norm is not None:
            x = self.norm(x, norm)
        if way[0] != "blas":
            from tokenmill.kernels.triton.products.wide import wide  # the interpreter cannot load it

            residual = _contiguous(residual)
            return wide(x.contiguous(), weight, residual, gated=act is not None)
        return self._library(x, weight, bias, act, residual)

    def _library(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, act: Act | None, residual: Tensor | None
    ) -> Tensor:
        """residual + act(x @ weight.T + bias), the product by torch."""
        if act is None and bias is None and residual is not None:
            return torch.addmm(residual, x, weight.t())
        return self._finished(torch.nn.functional.linear(x, weight, bias), act, residual)

    def _finished(self, y: Tensor, act: Act | None, residual: Tensor | None) -> Tensor:
        """residual + act(y), in place of y where there is no activation."""
        if act is not None:
            y = self.activate(y, act)
        return y if residual is None else y.add_(residual)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
