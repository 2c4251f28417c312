"""Objects that stand for the operands of native calls: norms, attention layers, a step's tables, a layer's experts.
Owns: their addresses.

Each object keeps alive what it points to. `native` is None if csrc cannot do it. Must not know: models.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tokenmill import _native
from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, KVView, NormSpec
from tokenmill.kernels.cpu.packed import STORED, TYPES, PackedMatrix
from tokenmill.kernels.cpu.touches import HeadTouches, plain

_MOST_NORMS = 4096


class BoundNorms:
    """Descriptors of norms, bound to native objects when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[NormSpec, tuple[Tensor, Tensor | None], Any]] = {}

    def __call__(self, spec: NormSpec) -> Any:
        """The native object."""
        found = self._made.get(id(spec))
        return found[2] if found is not None and found[0] is spec else self._bind(spec)

    def _bind(self, spec: NormSpec) -> Any:
        if len(self._made) >= _MOST_NORMS:
            self._made.clear()
        weight = spec.weight.contiguous()
        bias = None if spec.bias is None else spec.bias.to(weight.dtype).contiguous()
        beside = 0 if bias is None else bias.data_ptr()
        native = _native.make_norm(
            weight.data_ptr(), beside, TYPES[weight.dtype], weight.shape[0], spec.eps, spec.offset, spec.kind == "layer"
        )
        self._made[id(spec)] = (spec, (weight, bias), native)
        return native

    def values(self) -> Iterable[object]:
        """What must stay alive while a recording names it."""
        return self._made.values()

    def clear(self) -> None:
        """Weights have new numbers."""
        self._made.clear()


class BoundLayer:
    """An AttentionSpec and its pages, bound to a native object; `native` is None where csrc must pass."""

    __slots__ = ("keep", "key", "native", "spec", "touches", "value", "work")

    def __init__(self, spec: AttentionSpec, ctx: ForwardContext, bind_norm: Callable[[NormSpec], Any]) -> None:
        view = ctx.kv[spec.layer]
        self.spec, self.key, self.value = spec, weakref.ref(view.key), weakref.ref(view.value)
        self.touches = HeadTouches(spec)
        spec = plain(spec)
        self.keep: list[Tensor] = []
        self.native: Any = None
        self.work = float(spec.heads * (spec.kv.key_dim + spec.kv.value_dim))
        if self._fits(spec, view):
            self.native = self._bind(spec, ctx, bind_norm)

    @staticmethod
    def _fits(spec: AttentionSpec, view: KVView) -> bool:
        norms = [norm for norm in (spec.touches.q_norm, spec.touches.k_norm) if norm is not None]
        key, value = view.key, view.value
        return (
            key.dtype in STORED
            and value.dtype == key.dtype
            and key.stride(3) == 1
            and value.stride(3) == 1
            and max(spec.kv.key_dim, spec.kv.value_dim) <= _native.MAX_HEAD_DIM
            and all(norm.weight.dtype in TYPES for norm in norms)
            and (spec.rope is None or spec.rope.cos.shape[1] * 2 == spec.rope.dim)
        )

    def _bind(self, spec: AttentionSpec, ctx: ForwardContext, bind_norm: Callable[[NormSpec], Any]) -> Any:
        view, kv = ctx.kv[spec.layer], spec.kv
        heads = 1 if kv.kind == "latent" else kv.heads
        native = _native.Layer(
            spec.heads,
            heads,
            kv.key_dim,
            kv.value_dim,
            kv.kind == "latent",
            spec.scale,
            spec.softcap,
            spec.window,
            self._floats(spec.sinks),
            self._floats(spec.alibi),
        )
        if spec.rope is not None:
            rope = spec.rope
            cos, sin = self._floats(rope.cos), self._floats(rope.sin)
            native.rope(cos, sin, rope.cos.shape[0], rope.dim, rope.start, rope.interleaved)
        norms = spec.touches.q_norm, spec.touches.k_norm
        native.norms(*(None if norm is None else bind_norm(norm) for norm in norms))
        strides = [*view.key.stride()[:3], *view.value.stride()[:3]]
        blocks, _, size, _ = view.key.shape
        native.pages(view.key.data_ptr(), view.value.data_ptr(), strides, blocks, size, STORED[view.key.dtype])
        if view.key_scale is not None and view.value_scale is not None:
            self.keep += [view.key_scale, view.value_scale]
            groups = 2 if view.key.dtype == torch.uint8 else 1  # least values lie beside scales
            native.scales(
                view.key_scale.data_ptr(),
                view.value_scale.data_ptr(),
                [*view.key_scale.stride()[:3], *view.value_scale.stride()[:3]],
                kv.key_dim * groups // view.key_scale.shape[3],
                (kv.key_dim if kv.kind == "latent" else kv.value_dim) * groups // view.value_scale.shape[3],
            )
        return native

    def _floats(self, tensor: Tensor | None) -> int:
        """The address of a float32 copy (or the tensor itself) that lives as long as this object."""
        if tensor is None:
            return 0
        self.keep.append(tensor.to(torch.float32).contiguous())
        return self.keep[-1].data_ptr()


class BoundPlan:
    """The addresses of one KV group's tables in one step."""

    __slots__ = ("addresses", "keep", "max_entries", "pairs", "plan", "positions", "positions_at", "sequences",
                 "slots_at")  # fmt: skip

    def __init__(self, plan: GroupPlan, ctx: ForwardContext) -> None:
        self.plan, self.positions = plan, ctx.positions
        tables, entries = _ints(plan.tables), _ints(plan.entries)
        first = None if plan.first is None else _ints(plan.first)
        query_start, kv_len = _ints(ctx.query_start), _ints(ctx.kv_len)
        positions, slots = _longs(ctx.positions), _longs(plan.slots)
        self.keep = (tables, entries, first, query_start, kv_len, positions, slots, plan.paths)
        self.addresses = [
            tables.data_ptr(),
            0 if first is None else first.data_ptr(),
            entries.data_ptr(),
            query_start.data_ptr(),
            kv_len.data_ptr(),
            positions.data_ptr(),
            *_paths(plan),
        ]
        self.max_entries, self.sequences = tables.shape[1], tables.shape[0]
        self.positions_at, self.slots_at = positions.data_ptr(), slots.data_ptr()
        spans = ctx.spans
        if spans is None:
            spans = [(0, ctx.positions.shape[0], int(kv_len.max()))]
        self.pairs = float(sum(queries * length for _, queries, length in spans))


def _paths(plan: GroupPlan) -> tuple[int, int, int]:
    """Addresses of the roots and places of trees, and how many places a sequence has."""
    if plan.paths is None:
        return 0, 0, 0
    return plan.paths.roots.data_ptr(), plan.paths.places.data_ptr(), plan.paths.places.shape[1]


def _ints(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


def _longs(x: Tensor) -> Tensor:
    return x.to(torch.int64).contiguous()


class BoundExperts:
    """The packed matrices of one layer's experts as native calls name them; `native` is None where they do not fit."""

    __slots__ = ("native", "weights")

    def __init__(self, weights: tuple[list[Any], list[Any]], act: int, *, gated: bool) -> None:
        self.weights = weights
        self.native: Any = None
        found = [[getattr(weight, "packed", None) for weight in part] for part in weights]
        ups, downs = ([packed for packed in part if isinstance(packed, PackedMatrix)] for part in found)
        if not ups or len(ups) != len(weights[0]) or len(downs) != len(weights[1]):
            return
        if gated and ups[0].n % (2 * _native.TILE_COLUMNS):
            return
        self.native = _native.Experts([p.native for p in ups], [p.native for p in downs], act)

    def call(
        self, x: Tensor, ids: Tensor, gates: Tensor | None, out: Tensor, kind: int, half: int, first: int = 0
    ) -> Tensor:
        """x [rows, ...] -> out; half: 0 for both products, 1 for the first, 2 for the second, 3 for both and no sum;
        first: the number of the first expert."""
        x, ids = x.contiguous(), ids.contiguous()
        gates = None if gates is None else gates.contiguous()
        rows, top_k = ids.shape
        at = 0 if gates is None else gates.data_ptr()
        self.native.call(x.data_ptr(), rows, out.data_ptr(), kind, ids.data_ptr(), at, top_k, half, first)
        return out
