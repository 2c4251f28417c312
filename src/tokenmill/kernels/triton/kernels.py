"""The Triton backend. Owns: which kernel serves which shape, and when to fall back (counted). Products: multiply.py.

Must not know: models, plans, engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import (
    Act,
    AttentionSpec,
    Draws,
    ForwardContext,
    FusedMixture,
    GateAct,
    KVView,
    Mixture,
    NormSpec,
    Recurrence,
    RouteSpec,
    SpanTensors,
    Xielu,
)
from tokenmill.compute.lines import LineGrid
from tokenmill.kernels.triton import pointwise
from tokenmill.kernels.triton.attention.absorbed import absorb, can_absorb
from tokenmill.kernels.triton.attention.decode import attend_one
from tokenmill.kernels.triton.attention.heads import multiply_heads
from tokenmill.kernels.triton.attention.key_choice import can_choose, choose_keys
from tokenmill.kernels.triton.attention.latent import attend_vectors, prepare_apart, prepare_latent, serves
from tokenmill.kernels.triton.attention.prepare import can_norm_rows, can_prepare, norm_rows, prepare_qkv
from tokenmill.kernels.triton.attention.stepping import Stepping, has_heads
from tokenmill.kernels.triton.attention.stored import can_store
from tokenmill.kernels.triton.attention.unfolded import attend_unfolded, can_unfold, last_tokens
from tokenmill.kernels.triton.experts.mixture import pack_mixture
from tokenmill.kernels.triton.experts.route import route
from tokenmill.kernels.triton.multiply import ProductKernels
from tokenmill.kernels.triton.quantised.prune_lines import can_prune, prune_lines
from tokenmill.kernels.triton.quantised.round_lines import can_round, round_lines
from tokenmill.kernels.triton.sampling.choose import choose, greedy
from tokenmill.kernels.triton.sampling.cuts import least_kept
from tokenmill.kernels.triton.states.copying import RowTable, copy_rows_, row_table
from tokenmill.kernels.triton.states.lookup import look_up_
from tokenmill.kernels.triton.states.recurrences import RECURRENCES
from tokenmill.kernels.triton.states.recurrent import gated_norm
from tokenmill.kernels.triton.states.spans import MOST_SPANS, gather_spans
from tokenmill.kernels.triton.states.stepping import accept_chains_, advance_, gather_rows
from tokenmill.kernels.triton.states.trees import Parts, accept_trees_, move_kv_, parts_of
from tokenmill.kernels.triton.unfit import else_reference

_FEW_ROWS = 256
"""What steps of single tokens have at the most: torch's sums would end the overlap of their launches."""


class TritonKernels(ProductKernels):
    """Kernels for one NVIDIA GPU and one stream.

    device: becomes the current one. steady: a row's bytes depend neither on the rows beside it nor on how its prompt
    was cut (weights of 16 and 32 bits; latent attention's products per head excepted). without: "fusion", "cascade"
    (reading a shared prefix once), "dependent-launch", "quick-launch" (quick.py), "many-rows" (wide.py), "few-rows"
    (stream.py), "widened" (keep_widened), "unfolded" (unfolded.py). cache: the folder that keeps ways which were found
    here. pruned: see make_kernels.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        steady: bool = False,
        without: Collection[str] = (),
        cache: Path | None = None,
        pruned: str = "auto",
    ) -> None:
        if ":" in device:
            torch.cuda.set_device(device)  # Triton launches on the current device
        super().__init__(steady=steady, without=without, cache=cache, pruned=pruned)
        self.trees = self.chooses = True
        self.rounds_at_once = 1 << 23  # what is freed again is too small for stacks of experts to be laid into it
        self._stepping = Stepping(self.launch, cascade="cascade" not in without)
        self._unfolds = "unfolded" not in without
        self._moved: dict[int, Parts] = {}
        self._copied: dict[int, tuple[Sequence[tuple[Tensor, Tensor]], RowTable]] = {}

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
            return self.gated_norm(x, gate, spec, size, first=first, act=spec.gate)
        if x.shape[-1] > pointwise.WIDEST or x.numel() == 0:
            self.count("norm", fallback=True)
            return super().norm(x, spec)
        self.count("norm")
        return pointwise.norm(x, spec, pdl=self.launch.pdl)

    @else_reference
    def add(
        self, x: Tensor, y: Tensor, scale: float | Tensor = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(x + scale * within(y)) * times; many rows of two tensors as they are, torch adds."""
        if isinstance(scale, Tensor):
            return super().add(x, y, scale, within=within, times=times)
        plain = within is None and scale == 1.0 and y.ndim == 2 and times is None and x.shape[0] > _FEW_ROWS
        if plain or not (self.launch.fuses and pointwise.can_add(x, y)):
            return super().add(x, y, scale, within=within, times=times)
        self.count("add")
        return pointwise.add(x, y, scale, within, None, times, pdl=self.launch.pdl)[0]

    @else_reference
    def add_norm(
        self, x: Tensor, y: Tensor, norm: NormSpec, scale: float = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What `add` makes, and what a norm makes of it."""
        if not (self.launch.fuses and pointwise.can_add(x, y)):
            return super().add_norm(x, y, norm, scale, within=within, times=times)
        self.count("add_norm")
        total, normed = pointwise.add(x, y, scale, within, norm, times, pdl=self.launch.pdl)
        assert normed is not None
        return total, normed

    @else_reference
    def activate(self, x: Tensor, act: Act | GateAct | Xielu, gate: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
        if gate is not None:
            if not pointwise.can_gate(x, gate):
                self.count("activate", fallback=True)
                return super().activate(x, act, gate)
            self.count("activate")
            return pointwise.gated(x, gate, act, pdl=self.launch.pdl)
        if x.ndim != 2 or x.numel() == 0:
            self.count("activate", fallback=True)
            return super().activate(x, act)
        self.count("activate")
        return pointwise.activate(x, act, pdl=self.launch.pdl)

    @else_reference
    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> ids [n], ids with ~ where something is wrong [n], largest logits [n]."""
        if not self._has_counters(logits):
            if len(logits):
                self.count("greedy", fallback=True)
            return super().greedy(logits)
        self.count("greedy")
        return greedy(logits, self.launch.scratch, pdl=self.launch.pdl)

    @else_reference
    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`greedy` among the tokens that masks allow, and draws."""
        if not self._has_counters(logits):
            return None
        self.count("choose")
        return choose(logits, words, masks, draws, self.launch.scratch, pdl=self.launch.pdl)

    @else_reference
    def least_kept(self, s: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor | None:
        """The score from which top-k and top-p keep tokens, without sorting."""
        if not self._has_counters(s):
            return None
        self.count("least_kept")
        return least_kept(s, k, p, self.launch.scratch, pdl=self.launch.pdl)

    def _has_counters(self, lines: Tensor) -> bool:
        """Are there lines, and a counter for each? (Drafts of thousands of rows are more lines than there are.)"""
        return 0 < lines.shape[0] <= self.launch.scratch.num_counters

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
    def gather_spans(
        self,
        row_ids: Tensor,
        counts: Tensor,
        size: tuple[int, int],
        tokens: Tensor,
        computed: Tensor,
        tables: list[tuple[Tensor, Tensor, int]],
        block_size: int,
    ) -> SpanTensors:
        """What a step needs of the rows' state for some tokens of each row."""
        if row_ids.shape[0] > MOST_SPANS or not tables:
            return super().gather_spans(row_ids, counts, size, tokens, computed, tables, block_size)
        self.count("gather_spans")
        pdl = self.launch.pdl
        return gather_spans(row_ids, counts, size[0], tokens, computed, tables, block_size, pdl=pdl)

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
    def look_up_(
        self, row_ids: Tensor, count: int, sizes: tuple[int, int], reach: int, tokens: Tensor, length: Tensor
    ) -> None:
        """In one launch."""
        self.count("look_up_")
        look_up_(row_ids, count, sizes, tokens, length, pdl=self.launch.pdl)

    @else_reference
    def copy_rows_(self, pairs: Sequence[tuple[Tensor, Tensor]], froms: Tensor, tos: Tensor) -> None:
        """Rows of all these tensors, in one launch."""
        self.count("copy_rows_")
        if not pairs or not froms.numel():
            return
        found = self._copied.get(id(pairs))
        if found is None or found[0] is not pairs:
            found = self._copied[id(pairs)] = pairs, row_table(pairs)
        copy_rows_(found[1], froms.contiguous(), tos.contiguous())

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

    # ------------------------------------------------------------ making codes

    @else_reference
    def round_lines(self, lines: Tensor, grid: LineGrid, upper: Tensor) -> tuple[Tensor, Tensor]:
        """All lines, in one launch."""
        if not can_round(lines, grid, upper):
            self.count("round_lines", fallback=True)
            return super().round_lines(lines, grid, upper)
        self.count("round_lines")
        return round_lines(lines, grid, upper)

    @else_reference
    def prune_lines(
        self, lines: Tensor, upper: Tensor, gone: Tensor | None, zeros: int = 0, of: int = 0
    ) -> tuple[Tensor, Tensor]:
        """All lines, in one launch."""
        if not can_prune(lines, upper):
            self.count("prune_lines", fallback=True)
            return super().prune_lines(lines, upper, gone, zeros, of)
        self.count("prune_lines")
        return prune_lines(lines, upper, gone, zeros, of)

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
        spec: NormSpec,
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
        latent = spec.kv.kind == "latent"
        stores = can_choose(spec, ctx) if latent else can_store(ctx.kv[spec.layer])
        prepares = latent or can_prepare(spec)
        if not (stores and (prepares or can_norm_rows(spec))) or qkv.shape[0] == 0:
            self.count("prepare_qkv", fallback=True)
            return super().prepare_qkv(qkv, spec, ctx)
        if not prepares:
            qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
            qkv, spec = norm_rows(qkv, spec, pdl=self.launch.pdl)
        self.count("prepare_qkv")
        return prepare_qkv(qkv if qkv.stride(1) == 1 else qkv.contiguous(), spec, ctx, pdl=self.launch.pdl)

    @else_reference
    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """q [T, H, Dk] against the paged keys and values as stored -> [T, H * Dv]."""
        lists = keys is None or ctx.groups[spec.group].paths is None
        if lists and spec.kv.kind == "latent" and serves(spec, ctx) and q.shape[0] > 0:
            self.count("attention")
            out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype, device=q.device)
            attend_vectors(
                q.contiguous(), out, spec, ctx, self.launch.scratch, keys, pdl=self.launch.pdl, whole=self.launch.steady
            )
            return out
        known = keys is None and spec.kv.kind != "latent" and can_store(ctx.kv[spec.layer])
        if not known or q.shape[0] == 0 or not has_heads(spec, q):
            self.count("attention", fallback=True)
            return super().attention(q, spec, ctx, keys)
        self.count("attention")
        q = q.contiguous()
        out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype, device=q.device)
        self._stepping.attend(q, out, spec, ctx)
        return out

    @else_reference
    def attend_latent(
        self,
        q: Tensor,
        vector: Sequence[Tensor],
        parts: Sequence[Tensor],
        spec: AttentionSpec,
        ctx: ForwardContext,
        keys: Tensor | None = None,
    ) -> Tensor | None:
        """Long prompts attend to keys and values of heads, and the one new token of other sequences to vectors; a few
        tokens take three launches in all."""
        (up, down), fresh, spec = parts, spec.touches.k_norm, replace(spec, touches=replace(spec.touches, k_norm=None))
        if self.launch.steady or not serves(spec, ctx):
            return None
        hopper, unfolds = self.launch.hopper, self._unfolds and keys is None and not self.launch.small
        if unfolds and can_unfold(q, (up, down), spec, ctx, hopper=hopper):
            latent = vector[0] if fresh is None else self.norm(vector[0], fresh)
            return self._unfolded(q, torch.cat((latent, vector[1]), dim=1), (up, down), spec, ctx)
        lists = keys is None or ctx.groups[spec.group].paths is None
        if not (lists and self.launch.fuses and can_absorb(q, vector, parts, spec, ctx)):
            return None
        self.count("attend_absorbed")
        queries = absorb(q, vector, up, fresh, spec, ctx, pdl=self.launch.pdl)
        mixed = self.attention(queries, spec, ctx, keys).view(q.shape[0], spec.heads, -1)
        return multiply_heads(mixed, down, pdl=self.launch.pdl)

    def _unfolded(
        self, q: Tensor, vector: Tensor, parts: tuple[Tensor, Tensor], spec: AttentionSpec, ctx: ForwardContext
    ) -> Tensor:
        """Keys and values of heads are made of the stored vectors."""
        (up, down), pdl = parts, self.launch.pdl
        self.count("attend_unfolded")
        q = prepare_apart(q, vector, spec, ctx, pdl=pdl)
        out = torch.empty((*q.shape[:2], down.shape[1]), dtype=q.dtype, device=q.device)
        arranged = self._stepping.arranged(spec, ctx, q.shape[0], 1)
        attend_unfolded(q, out, parts, spec, ctx, arranged, pdl=pdl, hopper=self.launch.hopper)
        if ctx.kv_len.shape[0] > 1:
            last, alone = last_tokens(ctx)
            plain = up.shape[2]
            absorbed = self.product(q[last, :, :plain], up)
            mixed = self.attention(torch.cat((absorbed, q[last, :, plain:]), dim=2), spec, alone)
            out[last] = self.product(mixed.view(len(last), spec.heads, -1), down)
        return out

    @else_reference
    def choose_keys(
        self, x: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext
    ) -> Tensor | None:
        """x [T, H * D + D], gains [T, H] -> positions [T, top], without sorting; None for prompts that are shorter."""
        if not can_choose(spec, ctx) or x.shape[0] == 0:
            self.count("choose_keys", fallback=True)
            return super().choose_keys(x, gains, spec, top, ctx)
        q = self.prepare_qkv(x, spec, ctx)
        self.count("choose_keys")
        longest = ctx.groups[spec.group].tables.shape[1] * ctx.block_size
        if longest <= top and ctx.max_query > 1 and not self.launch.steady:
            return None
        return choose_keys(q, gains.contiguous(), spec, top, ctx, pdl=self.launch.pdl)

    @else_reference
    def attend(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """The same from the product [T, all heads]; where every sequence has one new token, in one launch."""
        if keys is not None or qkv.ndim == 3 or not self._stepping.takes_new_keys(qkv, spec, ctx):
            return super().attend(qkv, spec, ctx, keys)
        self.count("attend_qkv")
        qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
        out = torch.empty((qkv.shape[0], spec.heads * spec.kv.value_dim), dtype=qkv.dtype, device=qkv.device)
        attend_one(qkv, out, spec, ctx, self.launch.scratch, pdl=self.launch.pdl, fresh=True)
        return out
