"""The Triton backend. Owns: which kernel serves which shape, scratch memory, and when to fall back (counted).

Must not know: models, plans, engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tokenmill.core.adapters import AdapterSite, Delta
from tokenmill.core.errors import UserError
from tokenmill.core.forward import (
    Act,
    AttentionSpec,
    Draws,
    ForwardContext,
    FusedMixture,
    KVView,
    Mixture,
    NormSpec,
    Recurrence,
    RouteSpec,
    StoredMatrix,
)
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton import pointwise
from tokenmill.kernels.triton.attention.decode import attend_one
from tokenmill.kernels.triton.attention.latent import attend_latent, prepare_latent, serves
from tokenmill.kernels.triton.attention.prepare import can_prepare, norm_rows, prepare_qkv
from tokenmill.kernels.triton.attention.stepping import Stepping, has_heads
from tokenmill.kernels.triton.attention.stored import can_store
from tokenmill.kernels.triton.common import act_parts
from tokenmill.kernels.triton.experts.mixture import pack_mixture
from tokenmill.kernels.triton.experts.route import route
from tokenmill.kernels.triton.launch import launch_here
from tokenmill.kernels.triton.products import adapted, adapters
from tokenmill.kernels.triton.products.chosen import FLOATS, Ways
from tokenmill.kernels.triton.products.gemv import gemv
from tokenmill.kernels.triton.products.search import Report
from tokenmill.kernels.triton.products.steady import steady
from tokenmill.kernels.triton.products.thin import can_adapt, thin
from tokenmill.kernels.triton.products.ways import Way
from tokenmill.kernels.triton.quantised.narrow import PACKERS, NarrowMatrix
from tokenmill.kernels.triton.quantised.narrow_linear import (
    measured_narrow,
    narrow_linear,
    narrow_way,
    norms_inside,
    scaled_product,
)
from tokenmill.kernels.triton.quantised.narrow_round import widened
from tokenmill.kernels.triton.sampling.choose import choose, greedy
from tokenmill.kernels.triton.sampling.cuts import least_kept
from tokenmill.kernels.triton.states.recurrences import RECURRENCES
from tokenmill.kernels.triton.states.recurrent import gated_norm
from tokenmill.kernels.triton.states.stepping import accept_chains_, advance_, gather_rows
from tokenmill.kernels.triton.states.trees import Parts, accept_trees_, move_kv_, parts_of
from tokenmill.kernels.triton.unfit import UNFIT, Kind, else_reference, is_unfit, kind_of, note_unfit


class TritonKernels(ReferenceKernels):
    """Kernels for one NVIDIA GPU and one stream.

    device: becomes the current one. steady: a row's bytes depend neither on the rows beside it nor on how its prompt
    was cut (weights of 16 and 32 bits; latent attention's products per head excepted). without: "fusion", "cascade"
    (reading a shared prefix once), "dependent-launch", "many-rows" (wide.py). cache: the folder that keeps ways which
    were found here.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        steady: bool = False,
        without: Collection[str] = (),
        cache: Path | None = None,
    ) -> None:
        super().__init__()
        if ":" in device:
            torch.cuda.set_device(device)  # Triton launches on the current device
        self.launch = launch_here(self.count, without, steady=steady, narrow_ways=measured_narrow)
        self.trees = self.chooses = True
        self.unfit: set[Kind] = set()
        self.ways = Ways(self.launch, None if steady else cache, many_rows="many-rows" not in without)
        self._stepping = Stepping(self.launch, cascade="cascade" not in without)
        self._moved: dict[int, Parts] = {}

    # ------------------------------------------------------------ matmuls

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
        narrow = type(weight) is NarrowMatrix
        if not narrow and (not isinstance(weight, Tensor) or weight.ndim == 3):
            if isinstance(weight, StoredMatrix):  # no form for this kind here: its numbers are made at every call
                self.count("unpacked_product", fallback=True)
            return super().product(x, weight, bias, norm=norm, act=act, residual=residual, delta=delta)
        if delta is not None:
            found = self._within(delta, weight, bias, norm, act, residual)
            if found is None:  # what adapters read is normed already
                y = self.product(x if norm is None else delta.inputs, weight, bias)
                found = self._adapted(y, delta, act, residual)
            return found
        if not self.launch.fuses and (norm or act or residual is not None):
            return self._around(self.product(x if norm is None else self.norm(x, norm), weight, bias), act, residual)
        asked = (x, narrow, *weight.shape, act, norm is not None)
        found = self._if_it_fits("linear", asked, lambda: self._product(x, weight, bias, norm, act, residual))
        if found is not None:
            return found
        self.count("linear", fallback=True)
        x = x if norm is None else self.norm(x, norm)
        if narrow:
            every = torch.arange(weight.shape[0], device=x.device)
            weight, bias = weight.rows(every, x.dtype), weight.bias
        return self._library(x, weight, bias, act, residual)

    def adapt(self, x: Tensor, site: AdapterSite, rows: Tensor, slots: Tensor) -> Tensor | None:
        """down @ x of each token's adapter, in parts of the sum: [parts, T, lanes]; None for few tokens."""
        if not adapters.can_adapt(site, x):
            self.count("adapt", fallback=True)
            return super().adapt(x, site, rows, slots)
        self.count("adapt")
        if not self.launch.steady and adapted.serves(site, x, self.launch.scratch):
            return None
        return self._low(x, site, rows, slots)

    def add_delta(self, y: Tensor, delta: Delta) -> Tensor:
        """y [T, N] with what the adapters add."""
        return self._adapted(y, delta, None, None)

    def _adapted(self, y: Tensor, delta: Delta, act: Act | None, residual: Tensor | None) -> Tensor:
        """residual + act(y with what the adapters add)."""
        residual = None if residual is None else residual.contiguous()
        if delta.low is None:
            found = self._behind(y.contiguous(), delta, act, residual)
            if found is not None:
                return found
            delta = replace(delta, low=self._low(delta.inputs, delta.site, delta.rows, delta.slots))
        assert delta.low is not None
        if delta.low.ndim == 2:  # plain torch has made it
            self.count("add_delta", fallback=True)
            y = super().add_delta(y, delta)
            y = y if act is None else self.activate(y, act)
            return y if residual is None else self.add(residual, y)
        self.count("add_delta")
        return adapters.finish(y.contiguous(), delta, act, residual, steady=self.launch.steady, pdl=self.launch.pdl)

    def _low(self, x: Tensor, site: AdapterSite, rows: Tensor, slots: Tensor) -> Tensor:
        """down @ x of each token's adapter, in a launch of its own."""
        x = x if x.stride(1) == 1 else x.contiguous()
        return adapters.adapt(x, site, rows, slots, steady=self.launch.steady, pdl=self.launch.pdl)

    def _behind(self, y: Tensor, delta: Delta, act: Act | None, residual: Tensor | None) -> Tensor | None:
        """What few tokens' adapters do to a product, in one launch; None: the device cannot hold it."""
        asked, scratch, pdl = (y, delta.inputs, act), self.launch.scratch, self.launch.pdl
        found = self._if_it_fits("add_delta", asked, lambda: adapted.adapted(y, delta, act, residual, scratch, pdl=pdl))
        if found is not None:
            self.count("add_delta")
        return found

    def _within(self, delta: Delta, weight: Any, bias: Tensor | None, norm: NormSpec | None, act: Act | None,
                residual: Tensor | None) -> Tensor | None:  # fmt: skip
        """A product with its adapters in one launch; None: it is not made so."""
        x, site = delta.inputs, delta.site
        if delta.low is not None or not isinstance(weight, Tensor) or not self.launch.fuses:
            return None
        way = self.ways.of(x, weight, bias, norm, act, fused=True, least=2)
        if way[0] != "thin" or not can_adapt(site, act, int(way[1])):
            return None
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        how = {"scratch": self.launch.scratch, "pdl": self.launch.pdl, "config": way[1:7], "delta": delta}
        asked = (x, *weight.shape, act)
        found = self._if_it_fits("adapted", asked, lambda: thin(x, weight, bias, None, act, residual, **how))  # type: ignore[arg-type]
        if found is not None:
            self.count("linear")
        return found

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
        way = self.ways.of(x, weight, bias, norm, act, fused=act is not None or residual is not None)
        if way[0] in ("blas", "wide"):
            return self._wide_linear(x, weight, bias, norm, act, residual, way)
        self.count("linear")
        inside = way[0] == "gemv" or (way[0] == "thin" and way[-1])
        if norm is not None and not (inside and norm.kind == "rms" and norm.bias is None):
            x, norm = self.norm(x, norm), None
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        if way[0] == "gemv":
            return gemv(x, weight, bias, norm, act, residual, pdl=self.launch.pdl, config=way[1:])
        return thin(
            x, weight, bias, norm, act, residual, scratch=self.launch.scratch, pdl=self.launch.pdl, config=way[1:7]
        )

    def _packed(
        self, x: Tensor, weight: NarrowMatrix, norm: NormSpec | None, act: Act | None, residual: Tensor | None
    ) -> Tensor:
        """The same with a packed weight."""
        self.count("narrow_linear")
        if x.shape[0] == 0:
            return x.new_empty((0, weight.shape[0] // (2 if act_parts(act)[1] else 1)))
        pdl, way = self.launch.pdl, narrow_way(self.launch, x, weight, act)
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        if norm is not None and not norms_inside(way, weight, norm):
            x, norm = self.norm(x, norm), None
        if x.stride(1) != 1:
            x = x.contiguous()
        if way[0] == "widen":
            wide = widened(weight, x.dtype, pdl=pdl)
            return self.product(x, wide, weight.bias, act=act, residual=residual)
        if way[0] == "library":
            return self._finished(scaled_product(x, weight, norm, pdl=pdl), act, residual)
        return narrow_linear(self.launch, x, weight, norm, act, residual, way)

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """As specified; unasked, 8 bits have one scale a row, which is what tensor cores multiply."""
        return super().quantise(weight, bits, group or (weight.shape[1] if bits == 8 else 0))

    def pack(self, matrix: StoredMatrix) -> NarrowMatrix | None:
        """The kinds of 8 and 4 bits that have a layout (narrow.py); None: this one has not."""
        make = PACKERS.get(matrix.kind)
        return None if make is None else make(matrix)

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
        residual = None if residual is None else residual.contiguous()
        return steady(x.contiguous(), weight.contiguous(), bias, act, residual, pdl=self.launch.pdl)

    def search(self, seconds: float) -> Report:
        """Look for faster ways of the products that were made so far; they are taken from now on, and kept. What was
        recorded before goes on as it is. Not beside other work."""
        return self.ways.search(self._forced, seconds)

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

            residual = None if residual is None else residual.contiguous()
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

    # ------------------------------------------------------------ rows by themselves

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, hidden], ids [T] -> [T, hidden] * scale. An ordinary launch: decode.py relies on it."""
        self.count("embed")
        found = torch.index_select(table, 0, ids)
        return found if scale == 1.0 else found.mul_(scale)

    @else_reference
    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        if gate is not None:
            return self.gated_norm(x, gate, spec, size, first=first)
        if x.shape[-1] > pointwise.WIDEST or x.numel() == 0:
            self.count("norm", fallback=True)
            return super().norm(x, spec)
        self.count("norm")
        return pointwise.norm(x, spec, pdl=self.launch.pdl)

    @else_reference
    def add(self, x: Tensor, y: Tensor, scale: float = 1.0, *, within: NormSpec | None = None) -> Tensor:
        """x + scale * within(y); without a norm it is torch's."""
        if within is None or not (self.launch.fuses and pointwise.can_add(x, y)):
            return super().add(x, y, scale, within=within)
        self.count("add")
        return pointwise.add(x, y, scale, within, None, pdl=self.launch.pdl)[0]

    @else_reference
    def add_norm(
        self, x: Tensor, y: Tensor, norm: NormSpec, scale: float = 1.0, *, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + scale * within(y), and what a norm makes of it."""
        if not (self.launch.fuses and pointwise.can_add(x, y)):
            return super().add_norm(x, y, norm, scale, within=within)
        self.count("add_norm")
        total, normed = pointwise.add(x, y, scale, within, norm, pdl=self.launch.pdl)
        assert normed is not None
        return total, normed

    @else_reference
    def activate(self, x: Tensor, act: Act | Literal["sigmoid"], gate: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
        if gate is not None:
            return self.gated_norm(x, gate, None, x.shape[1], act=act)
        if x.ndim != 2 or x.numel() == 0:
            self.count("activate", fallback=True)
            return super().activate(x, act)
        self.count("activate")
        return pointwise.activate(x, act, pdl=self.launch.pdl)

    @else_reference
    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> ids [n], ids with ~ where something is wrong [n], largest logits [n]."""
        if logits.shape[0] == 0:
            return super().greedy(logits)
        self.count("greedy")
        return greedy(logits, self.launch.scratch, pdl=self.launch.pdl)

    @else_reference
    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`greedy` among the tokens that masks allow, and draws."""
        if logits.shape[0] == 0:
            return None
        self.count("choose")
        return choose(logits, words, masks, draws, self.launch.scratch, pdl=self.launch.pdl)

    @else_reference
    def least_kept(self, s: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor | None:
        """The score from which top-k and top-p keep tokens, without sorting."""
        if s.shape[0] == 0:
            return None
        self.count("least_kept")
        return least_kept(s, k, p, self.launch.scratch, pdl=self.launch.pdl)

    @else_reference
    def gather_rows(
        self,
        row_ids: Tensor,
        tokens: Tensor,
        computed: Tensor,
        tables: list[Tensor],
        block_size: int,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """What a step needs of the rows' state for one token of each row."""
        if offsets is not None:
            return super().gather_rows(row_ids, tokens, computed, tables, block_size, offsets)
        self.count("gather_rows")
        return gather_rows(row_ids, tokens, computed, tables, block_size, pdl=self.launch.pdl)

    @else_reference
    def advance_(self, row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """One token more in each of these rows."""
        self.count("advance_")
        advance_(row_ids, ids, tokens, length, computed, pdl=self.launch.pdl)

    @else_reference
    def accept_chains_(self, grants: Tensor, *given: Any) -> Tensor:
        """In one launch."""
        return accept_chains_(grants.contiguous(), *given)

    @else_reference
    def accept_trees_(self, grants: Tensor, most: int, parents: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """In one launch."""
        parents = parents if parents.stride(1) == 1 else parents.contiguous()
        return accept_trees_(grants.contiguous(), most, parents, *given)

    @else_reference
    def move_kv_(self, kv: list[KVView], src: Tensor, dst: Tensor) -> None:
        """Keys and values of all these layers, in one launch."""
        self.count("move_kv_")
        if not kv or not src.numel():
            return
        found = self._moved.get(id(kv[0]))
        if found is None or not found.are_of(kv):
            found = self._moved[id(kv[0])] = parts_of(kv)
        move_kv_(found, src.contiguous(), dst.contiguous())

    # ------------------------------------------------------------ experts

    @else_reference
    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> expert ids [T, k] (int64) and gates [T, k] (float32)."""
        if logits.shape[0] == 0:
            return super().route(logits, spec)
        self.count("route")
        return route(logits, spec, pdl=self.launch.pdl)

    def pack_mixture(self, mixture: Mixture) -> FusedMixture | None:
        """The whole layer, if there are kernels for the format of its experts."""
        return pack_mixture(self.launch, mixture)

    # ------------------------------------------------------------ states

    @else_reference
    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """What the layer makes of its inputs and the states of the step's rows."""
        name, compute = RECURRENCES[type(spec)]
        found = compute(self.launch, inputs, spec, state, ctx)
        if found is not None:
            return found
        self.count(name, fallback=True)
        return super().recur_(inputs, spec, state, ctx)

    @else_reference
    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        spec: NormSpec | None,
        size: int,
        *,
        first: bool = False,
        act: str = "silu",
    ) -> Tensor:
        """x and gate [T, D] -> silu(gate) norm(x), or norm(silu(gate) x)."""
        if x.stride(1) != 1 or gate.stride(1) != 1 or x.numel() == 0 or size > pointwise.WIDEST:
            self.count("gated_norm", fallback=True)
            return super().gated_norm(x, gate, spec, size, first=first, act=act)
        self.count("gated_norm")
        return gated_norm(x, gate, spec, size, first=first, act=act, pdl=self.launch.pdl)

    # ------------------------------------------------------------ attention

    @else_reference
    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """qkv [T, all heads] -> q [T, H, Dk] normed and rotated; keys and values go to their slots."""
        if spec.kv.kind == "latent" and serves(spec, ctx) and qkv.shape[0] > 0 and qkv.stride(1) == 1:
            self.count("prepare_qkv")
            return prepare_latent(qkv, spec, ctx, pdl=self.launch.pdl)
        if spec.kv.kind == "latent" or qkv.shape[0] == 0 or not can_store(ctx.kv[spec.layer]):
            self.count("prepare_qkv", fallback=True)
            return super().prepare_qkv(qkv, spec, ctx)
        if not can_prepare(spec):
            qkv, spec = norm_rows(qkv, spec, self.norm)
        self.count("prepare_qkv")
        return prepare_qkv(qkv if qkv.stride(1) == 1 else qkv.contiguous(), spec, ctx, pdl=self.launch.pdl)

    @else_reference
    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """q [T, H, Dk] against the paged keys and values as stored -> [T, H * Dv]."""
        if spec.kv.kind == "latent" and serves(spec, ctx) and q.shape[0] > 0:
            self.count("attention")
            out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype, device=q.device)
            attend_latent(
                q.contiguous(), out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, whole=self.launch.steady
            )
            return out
        known = spec.kv.kind != "latent" and can_store(ctx.kv[spec.layer])
        if not known or q.shape[0] == 0 or not has_heads(spec, q):
            self.count("attention", fallback=True)
            return super().attention(q, spec, ctx)
        self.count("attention")
        q = q.contiguous()
        out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype, device=q.device)
        self._stepping.attend(q, out, spec, ctx)
        return out

    @else_reference
    def attend(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """The same from the product [T, all heads]; where every sequence has one new token, in one launch."""
        if qkv.ndim == 3 or not self._stepping.takes_new_keys(qkv, spec, ctx):
            return super().attend(qkv, spec, ctx)
        self.count("attend_qkv")
        qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
        out = torch.empty((qkv.shape[0], spec.heads * spec.kv.value_dim), dtype=qkv.dtype, device=qkv.device)
        attend_one(qkv, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, fresh=True)
        return out
