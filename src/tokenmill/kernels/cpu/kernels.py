"""The native CPU backend. Owns: which operations go to csrc, and what it remembers between calls (packed weights,
descriptors of norms and attention layers, the addresses of a step's tables).

Kept short per call, because a small model's step is mostly this file: addresses go over as integers, and everything
that stays the same from step to step is bound once. Knows nothing of models; calls `super()` (and counts a fallback)
for what csrc does not do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.compute.forward import (
    Act,
    Again,
    Around,
    AttentionSpec,
    Draws,
    ForwardContext,
    GateAct,
    NormSpec,
    Packed,
    Recurrence,
    RouteSpec,
    ScanSpec,
    StoredMatrix,
    Weight,
    Xielu,
)
from tokenmill.kernels.adapters import addends
from tokenmill.kernels.cpu import states
from tokenmill.kernels.cpu.accept import accept_chains_, accept_trees_
from tokenmill.kernels.cpu.activation_codes import ACTS, GATED
from tokenmill.kernels.cpu.adapters import Addends, BoundSites
from tokenmill.kernels.cpu.bound import BoundExperts, BoundLayer, BoundNorms, BoundPlan
from tokenmill.kernels.cpu.choose import choose, greedy
from tokenmill.kernels.cpu.mixture import add_experts, add_to_each, route, visit
from tokenmill.kernels.cpu.packed import PACKERS, SPARSE, TYPES, PackedMatrix, pack_dense, pack_numbers, quantise
from tokenmill.kernels.cpu.replay import record
from tokenmill.kernels.cpu.rows import advance_, gather_rows
from tokenmill.kernels.pointwise import tempered
from tokenmill.kernels.reference import ReferenceKernels

T = TypeVar("T")

_MOST_LAYERS = 1024


class CpuKernels(ReferenceKernels):
    """Native kernels for float32 and bfloat16 activations.

    threads: of the native pool, which all engines of a process share; 0: as many as torch was told to use, but no more
    than the cores that this process may run on."""

    def __init__(self, threads: int = 0, pruned: str = "auto") -> None:
        super().__init__()
        self.pruned = pruned
        self.records = True
        _native.set_threads(threads or min(torch.get_num_threads(), _native.thread_limit()))
        self._packed: dict[int, tuple[weakref.ref[Tensor], int, Tensor | None, PackedMatrix]] = {}
        self._norms = BoundNorms()
        self._layers: dict[int, BoundLayer] = {}
        self._plans: dict[int, BoundPlan] = {}
        self._experts: dict[int, BoundExperts] = {}
        self._sites = BoundSites()

    def set_threads(self, threads: int) -> None:
        """Change the native pool; 0: every core that this process may run on."""
        _native.set_threads(threads)

    def record(self, compute: Callable[[], T], room: Tensor | None = None) -> tuple[T, Again | None]:
        """What `compute` makes, and a function that makes it again in the same tensors; None: it is not all native."""
        return record(compute, self._bound, room)

    def _bound(self) -> list[object]:
        return [*self._layers.values(), *self._norms.values(), *self._packed.values(), *self._experts.values(),
                *self._sites.values()]  # fmt: skip

    def forget_weights(self) -> None:
        """Weights have new numbers where they stand: forget copies and packed forms that were made of them here."""
        self._norms.clear()
        for kept in (self._packed, self._layers, self._plans, self._experts, self._sites):
            kept.clear()

    def describe(self) -> dict[str, str | int]:
        """What `tokenmill doctor` shows."""
        return {"isa": _native.isa(), "threads": _native.threads(), "thread_limit": _native.thread_limit()}

    # ------------------------------------------------------------------ matmuls

    def product(self, x: Tensor, weight: Any, bias: Tensor | None = None, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias) in x's dtype; weight dense [N, K], or packed (bias within)."""
        kind, packed = TYPES.get(x.dtype), weight
        if type(weight) is not PackedMatrix or kind is None or x.ndim != 2:
            if isinstance(weight, Tensor) and weight.ndim == 3:
                return self._per_head(x, weight)
            if kind is None or not isinstance(weight, Tensor) or weight.dtype not in TYPES or x.ndim != 2:
                return self._plain_product(x, weight, bias, around)
            packed = self._pack(weight, bias)
        norm, act = around.get("norm"), around.get("act")
        residual, delta = around.get("residual"), around.get("delta")
        width = packed.n
        if act in GATED:
            width //= 2
            if width % _native.TILE_COLUMNS:
                # The halves share a tile, so gate and up are not at hand together.
                y = self.activate(self.product(x, packed, norm=norm, delta=delta), act)
                return y if residual is None else self.add(residual, y)
        rows, inner = x.shape
        if inner != packed.k:
            raise ValueError(f"a matrix of {packed.k} columns cannot multiply rows of {inner}")
        self.count("linear")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((rows, width), dtype=x.dtype)
        native_norm = None if norm is None else self._norms(norm)
        shared = between = 0
        if residual is not None:
            if residual.dtype != x.dtype or residual.stride(1) != 1:
                residual = residual.to(x.dtype).contiguous()
            shared, between = residual.data_ptr(), residual.stride(0)
        if delta is None:
            packed.native.linear(
                x.data_ptr(),
                rows,
                x.stride(0),
                out.data_ptr(),
                kind,
                False,
                shared,
                ACTS[act],
                native_norm,
                0,
                0,
                between,
            )
            return out
        gain, add = self._addends(delta)
        packed.native.linear(
            x.data_ptr(), rows, x.stride(0), out.data_ptr(), kind, False, shared, ACTS[act], native_norm,
            0 if gain is None else gain.data_ptr(), add.data_ptr(), between,
        )  # fmt: skip
        return out

    def _per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, H, K], weight [H, N, K] -> [T, H, N]."""
        kind, (count, outer, inner) = TYPES.get(x.dtype), weight.shape
        if kind is None or weight.dtype != x.dtype or outer % _native.TILE_COLUMNS or inner % 2:
            self.count("head_matmul", fallback=True)
            return super().product(x, weight)
        self.count("head_matmul")
        x = x.contiguous()
        out = torch.empty((x.shape[0], count, outer), dtype=x.dtype)
        packed = self._pack(weight, None)
        _native.heads(packed.native, count, x.data_ptr(), x.shape[0], out.data_ptr(), kind)
        return out

    def _addends(self, delta: Delta) -> Addends:
        found = self._sites.expand(delta)
        self.count("add_delta", fallback=found is None)
        return addends(delta) if found is None else found

    def adapt(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor:
        """down @ x of each token's adapter -> [T, lanes] float32."""
        found = self._sites.shrink(x, site, slots)
        if found is None:
            self.count("adapt", fallback=True)
            return super().adapt(x, site, slots)
        self.count("adapt")
        return found

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """The kinds that have a native layout (packed.py); None: this one has not."""
        make, bias = PACKERS.get(matrix.kind), matrix.bias
        if make is None or (bias is not None and bias.dtype not in TYPES):
            return None
        if matrix.kind != "dense":
            return make(matrix)
        made = pack_numbers(matrix, self.pruned)
        if made is not None and made.parts[0].format in SPARSE.values():
            self.count("pack_pruned")
        return made

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q int8 and scales float16."""
        if weight.dtype not in TYPES or weight.device.type != "cpu":
            return super().quantise(weight, bits, group)
        return quantise(weight, "int8" if bits == 8 else "int4", group or _native.GROUP)

    def _plain_product(self, x: Tensor, weight: Any, bias: Tensor | None, around: Around) -> Tensor:
        assert not isinstance(weight, PackedMatrix), "packed weights multiply float32 and bfloat16 rows [T, K] only"
        if isinstance(weight, Tensor):
            self.count("linear", fallback=True)
        return super().product(x, weight, bias, **around)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """The packed form of a tensor that somebody else owns: kept while it lives and stays unchanged."""
        key, version = id(weight), 0 if weight.is_inference() else weight._version
        found = self._packed.get(key)
        if found is not None and found[0]() is weight and found[1] == version and found[2] is bias:
            return found[3]
        packed = pack_dense(weight.detach().flatten(0, -2), None if bias is None else bias.detach().to(weight.dtype))
        every = self._packed

        def forget(_: object) -> None:
            every.pop(key, None)

        every[key] = (weakref.ref(weight, forget), version, bias, packed)
        return packed

    # ------------------------------------------------------------------ one row at a time

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, hidden], ids [T] -> [T, hidden] * scale."""
        kind = TYPES.get(table.dtype)
        if kind is None or table.stride(1) != 1 or ids.dtype != torch.int64 or ids.ndim != 1:
            self.count("embed", fallback=True)
            return super().embed(table, ids, scale)
        self.count("embed")
        ids = ids.contiguous()
        count, (vocab, width) = ids.shape[0], table.shape
        out = torch.empty((count, width), dtype=table.dtype)
        _native.embed(
            table.data_ptr(), ids.data_ptr(), out.data_ptr(), count, vocab, width, table.stride(0), scale, kind
        )
        return out

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """x [..., D] -> the same shape and dtype, statistics in float32."""
        if gate is not None:
            return self.gated_norm(x, gate, spec, size, first=first, act=spec.gate)
        kind = TYPES.get(x.dtype)
        if kind is None or spec.weight.dtype not in TYPES:
            self.count("norm", fallback=True)
            return super().norm(x, spec)
        self.count("norm")
        native, width = self._norms(spec), x.shape[-1]
        if x.ndim == 2 and x.stride(1) == 1:
            rows, stride = x.shape[0], x.stride(0)
            out = torch.empty((rows, width), dtype=x.dtype)
        else:
            x = x.contiguous()
            rows, stride = x.numel() // max(width, 1), width
            out = torch.empty_like(x)
        if width != spec.weight.shape[0]:
            raise ValueError(f"a norm of {spec.weight.shape[0]} cannot take rows of {width}")
        _native.norm(native, x.data_ptr(), out.data_ptr(), rows, stride, kind)
        return out

    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """What the layer makes of its inputs and the states of the step's rows."""
        if isinstance(spec, ScanSpec) and spec.norms is not None:
            parts = zip(inputs[2].chunk(2, dim=-1), spec.norms, strict=True)
            inputs = *inputs[:2], torch.cat([self.norm(part, norm) for part, norm in parts], dim=-1)
            spec = replace(spec, norms=None)
        name, compute = states.RECURRENCES[type(spec)]
        found = compute(inputs, spec, state, ctx)
        self.count(name, fallback=found is None)
        return super().recur_(inputs, spec, state, ctx) if found is None else found

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
        found = states.gated_norm(x, gate, spec, size, first=first, act=act)
        self.count("gated_norm", fallback=found is None)
        return super().gated_norm(x, gate, spec, size, first=first, act=act) if found is None else found

    def activate(self, x: Tensor, act: Act | GateAct | Xielu, gate: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
        if isinstance(act, Xielu):
            return super().activate(x, act)
        if gate is not None:
            return self._gate(x, act, gate)
        kind = TYPES.get(x.dtype)
        if kind is None:
            self.count("activate", fallback=True)
            return super().activate(x, act)
        self.count("activate")
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // max(width, 1)
        out = torch.empty((*x.shape[:-1], width // 2 if act in GATED else width), dtype=x.dtype)
        _native.act(x.data_ptr(), out.data_ptr(), rows, width, kind, ACTS[act])
        return out

    def _gate(self, x: Tensor, act: Act | GateAct, gate: Tensor) -> Tensor:
        """act(gate) x."""
        if act in ("relu", "relu2", "gelu_tanh"):
            return self.activate(gate, act) * x
        if act == "none":
            return super().activate(x, act, gate)
        times = x.shape[1] // gate.shape[1]
        wide = gate if times == 1 else gate.repeat_interleave(times, dim=1)
        found = states.gated_norm(x, wide, None, x.shape[1], first=False, act=act)
        if found is None:
            self.count("activate", fallback=True)
            return super().activate(x, act, gate)
        self.count("activate")
        return found

    def add(
        self, x: Tensor, y: Tensor, scale: float | Tensor = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(x + scale * within(y)) * times."""
        y, kind = y if within is None else self.norm(y, within), TYPES.get(x.dtype)
        if isinstance(scale, Tensor) and kind is not None and x.dtype == y.dtype and scale.dtype == torch.float32:
            self.count("add")
            out = add_to_each(x, y, scale)
            return out if times is None else out * times
        if isinstance(scale, Tensor) or kind is None or x.dtype != y.dtype or x.shape != y.shape:
            self.count("add", fallback=True)
            return super().add(x, y, scale, times=times)
        self.count("add")
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        _native.add(x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel(), scale, kind)
        return out if times is None else out * times

    # ------------------------------------------------------------------ the ends of a step

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> lowest id of the largest logit [n]; the same, or ~id where that is not finite; it [n]."""
        kind = TYPES.get(logits.dtype)
        if kind is None or logits.stride(1) != 1 or 0 in logits.shape:
            self.count("greedy", fallback=True)
            return super().greedy(logits)
        self.count("greedy")
        return greedy(logits, kind)

    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`greedy` among the tokens that masks allow, and draws."""
        kind = TYPES.get(logits.dtype)
        if kind is None or logits.stride(1) != 1 or 0 in logits.shape:
            return None
        self.count("choose")
        return choose(logits, kind, words, masks, draws)

    def gather_rows(
        self,
        row_ids: Tensor,
        tokens: Tensor,
        computed: Tensor,
        tables: list[Tensor],
        block_size: int,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Token ids, positions and kv_len of a token each, and per table its rows, counts and slots; of a table's
        rows only the counted entries are written."""
        self.count("gather_rows")
        return gather_rows(row_ids, tokens, computed, tables, block_size, offsets)

    def advance_(self, row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """One token more in each of these rows: tokens[row, length[row]] = id; length and computed grow by one."""
        self.count("advance_")
        advance_(row_ids, ids, tokens, length, computed)

    def accept_chains_(self, *given: Any) -> Tensor:
        """In host memory."""
        return accept_chains_(*given)

    def accept_trees_(self, *given: Any) -> tuple[Tensor, Tensor]:
        """In host memory."""
        return accept_trees_(*given)

    # ------------------------------------------------------------------ experts

    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> expert ids and gates [T, k]."""
        kind, bias = TYPES.get(logits.dtype), spec.bias
        if (
            kind is None
            or spec.order == "sparsemixer"
            or (bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous()))
        ):
            self.count("route", fallback=True)
            return super().route(logits, spec)
        self.count("route")
        return route(logits, kind, spec)

    def experts(
        self,
        x: Tensor,
        weights: tuple[list[Weight], list[Weight]],
        ids: Tensor,
        gates: Tensor | None,
        act: Act | None,
        ctx: ForwardContext,
        first: int | None = None,
    ) -> Tensor:
        """The chosen experts' products, one expert after the other, in one native call."""
        bound = self._experts_for(x, weights, act)
        if bound is None:
            return super().experts(x, weights, ids, gates, act, ctx, first)
        out = visit(bound, x, ids, gates, act, first)
        rows = ctx.rows
        if rows is not None and rows.adapters is not None:  # whose adapters change experts is computed once more
            at = torch.where(rows.adapters > 0)[0]
            if not len(at):
                return out
            own = x.view(len(ids), -1)[at].view(-1, x.shape[1])
            weigh = None if gates is None else gates[at]
            again = super().experts(own, weights, ids[at], weigh, act, ctx.of(at), first)
            out.view(len(ids), -1)[at] = again.view(len(at), -1)
        return out

    def add_experts(self, parts: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """The weighted sum over choices, in one native call."""
        if dtype not in TYPES or parts.dtype not in TYPES or gates.dtype != torch.float32:
            return super().add_experts(parts, gates, dtype)
        return add_experts(parts, gates, dtype)

    def _experts_for(
        self, x: Tensor, weights: tuple[list[Weight], list[Weight]], act: Act | None
    ) -> BoundExperts | None:
        """None: csrc cannot. Without an activation: what the first half was bound to."""
        bound = self._experts.get(id(weights))
        if bound is None or bound.weights is not weights:
            if act is None:
                return None
            bound = self._experts[id(weights)] = BoundExperts(weights, ACTS[act], gated=act in GATED)
        able = x.dtype in TYPES and bound.native is not None
        if act is not None:
            self.count("experts", fallback=not able)
        return bound if able else None

    # ------------------------------------------------------------------ attention

    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """qkv [T, all heads] -> q [T, H, Dk] normed and rotated; keys and values go to their slots."""
        layer = self._layer(spec, ctx)
        kind = TYPES.get(qkv.dtype)
        if layer is None or kind is None:
            self.count("prepare_qkv", fallback=True)
            return super().prepare_qkv(qkv, spec, ctx)
        self.count("prepare_qkv")
        if spec.touches.values == "stored":
            return layer.touches.queries(qkv, ctx.positions, self.norm)
        plan = self._plan(spec.group, ctx)
        qkv = layer.touches.before(qkv if qkv.stride(1) == 1 else qkv.contiguous(), ctx.positions, self.norm)
        tokens = qkv.shape[0]
        out = torch.empty((tokens, spec.heads, spec.kv.key_dim), dtype=qkv.dtype)
        layer.native.prepare(
            qkv.data_ptr(), out.data_ptr(), tokens, qkv.stride(0), kind, plan.positions_at, plan.slots_at
        )
        return tempered(out, spec.touches.temper, ctx.positions)

    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """q [T, H, Dk] against the paged keys and values as stored -> [T, H * Dv]."""
        layer = self._layer(spec, ctx) if keys is None else None
        kind = TYPES.get(q.dtype)
        if layer is None or kind is None:
            self.count("attention", fallback=True)
            return super().attention(q, spec, ctx, keys)
        self.count("attention")
        plan = self._plan(spec.group, ctx)
        q = q.contiguous()
        out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype)
        work = plan.pairs * layer.work
        layer.native.attend(q.data_ptr(), out.data_ptr(), kind, plan.addresses, plan.max_entries, plan.sequences, work)
        return out

    def choose_keys(
        self, x: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext
    ) -> Tensor | None:
        """x [T, H * D + D], gains [T, H] -> positions [T, K], in plain torch."""
        self.count("choose_keys", fallback=True)
        return super().choose_keys(x, gains, spec, top, ctx)

    def _layer(self, spec: AttentionSpec, ctx: ForwardContext) -> BoundLayer | None:
        """The bound form of one attention layer, or None if csrc cannot do it."""
        view = ctx.kv[spec.layer]
        found = self._layers.get(id(spec))
        if found is not None and found.spec is spec and found.key() is view.key and found.value() is view.value:
            return found if found.native is not None else None
        if len(self._layers) >= _MOST_LAYERS:
            self._layers.clear()
        made = self._layers[id(spec)] = BoundLayer(spec, ctx, self._norms)
        return made if made.native is not None else None

    def _plan(self, group: int, ctx: ForwardContext) -> BoundPlan:
        plan = ctx.groups[group]
        found = self._plans.get(group)
        if found is not None and found.plan is plan and found.positions is ctx.positions:
            return found
        made = self._plans[group] = BoundPlan(plan, ctx)
        return made
