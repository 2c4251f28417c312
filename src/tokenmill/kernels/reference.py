"""Every operation in plain torch: the specification that other backends are tested against and fall back to.

Owns: the meaning of each operation of `compute.forward.Kernels`, on any device. On a CPU a row's result is the same
bytes whatever other rows are in the call (row_stable.py and paged.py show how). Must not know: models, engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.compute.forward import (
    Act,
    Again,
    Around,
    AttentionSpec,
    Draws,
    ForwardContext,
    FusedMixture,
    GateAct,
    KVView,
    Mixture,
    NormSpec,
    Packed,
    Recurrence,
    RouteSpec,
    SpanTensors,
    Weight,
    Xielu,
)
from tokenmill.compute.lines import LineGrid
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels import (
    accept,
    adapters,
    grid,
    key_choice,
    lookup,
    paged,
    pointwise,
    routing,
    row_stable,
    states,
    stored_kv,
)
from tokenmill.kernels.plain import PRODUCTS
from tokenmill.kernels.prune_lines import prune_lines
from tokenmill.kernels.round_lines import round_lines
from tokenmill.kernels.spans import gather_spans

T = TypeVar("T")


class ReferenceKernels:
    """Plain torch. Backends subclass this, override what they accelerate, and count when they call `super()`."""

    def __init__(self, *, instead: bool = False) -> None:
        """instead: nobody chose plain torch, the device has nothing else; then all calls count as fallbacks."""
        self.instead = instead
        self._counters: dict[str, dict[str, int]] = {}
        self.state_dtype = "float32"
        self.waits = 0
        self.chooses = False
        self.records = False
        self.trees = True
        self.rounds_at_once = 0

    def counters(self) -> dict[str, dict[str, int]]:
        """{op: {"calls": n, "fallbacks": m}} since the start."""
        return {op: dict(count) for op, count in self._counters.items()}

    def count(self, op: str, *, fallback: bool = False) -> None:
        """One call of `op`; fallback: the backend left this one to its base."""
        entry = self._counters.setdefault(op, {"calls": 0, "fallbacks": 0})
        entry["fallbacks" if fallback or self.instead else "calls"] += 1

    def forget_weights(self) -> None:
        """Nothing: weights are read where they stand."""

    def record(self, compute: Callable[[], T], room: Tensor | None = None) -> tuple[T, Again | None]:
        """What `compute` makes; nothing is recorded."""
        return compute(), None

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, hidden], ids [T] -> [T, hidden] * scale."""
        self.count("embed")
        found = table[ids]
        return found if scale == 1.0 else found * scale

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """x [..., D] -> the same shape and dtype, statistics in float32."""
        if gate is not None:
            return self.gated_norm(x, gate, spec, size, first=first, act=spec.gate)
        self.count("norm")
        return pointwise.norm(x, spec)

    def product(self, x: Tensor, weight: Any, bias: Tensor | None = None, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias), one operation after the other."""
        y = self.multiply(x if (norm := around.get("norm")) is None else self.norm(x, norm), weight, bias)
        return self._around(y, around.get("act"), around.get("residual"), around.get("delta"))

    def open_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, delta: Delta | None) -> Tensor | None:
        """None: whole products are as fast."""
        return None

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""
        if isinstance(weight, Tensor):
            if weight.ndim == 3:
                self.count("head_matmul")
                return row_stable.per_head(x, weight)
            self.count("linear")
            return row_stable.linear(x, weight, bias)
        if not isinstance(weight, StoredMatrix):  # a packed form that brings its own product
            self.count("own_product")
            own: Tensor = weight.product(x)
            return own
        found = PRODUCTS.get(weight.kind)
        if found is None:
            return self.product(x, weight.dense(), weight.bias)
        self.count(f"{weight.kind}_product")
        return found(x, weight)

    def _around(self, y: Tensor, act: Act | None, residual: Tensor | None, delta: Delta | None = None) -> Tensor:
        """residual + act(y and what adapters add)."""
        y = y if delta is None else self.add_delta(y, delta)
        y = y if act is None else self.activate(y, act)
        return y if residual is None else self.add(residual, y)

    def adapt(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor:
        """down @ x of each token's adapter -> [T, lanes] float32."""
        self.count("adapt")
        self.waits += x.device.type != "cpu"
        take = adapters.take_rows if x.ndim == 1 else adapters.adapt
        return take(x, site, slots)

    def add_delta(self, y: Tensor, delta: Delta) -> Tensor:
        """y [T, N] * gain + shift + up @ low; rows without an adapter stay as they are."""
        self.count("add_delta")
        self.waits += y.device.type != "cpu"
        return adapters.add_delta(y, delta)

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """Nothing: plain torch multiplies matrices as they are stored."""
        return None

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q int8 and scales float16; 32 columns share a scale, as most formats have it."""
        return grid.quantise(weight, bits, group or grid.ACTIVATION_GROUP)

    def round_lines(self, lines: Tensor, grid: LineGrid, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and errors [n, out] of lines [n, out], one line after the other."""
        self.count("round_lines")
        return round_lines(lines, grid, upper)

    def prune_lines(
        self, lines: Tensor, upper: Tensor, gone: Tensor | None, zeros: int = 0, of: int = 0
    ) -> tuple[Tensor, Tensor]:
        """What is left of lines [n, out], and errors, one line after the other."""
        self.count("prune_lines")
        return prune_lines(lines, upper, gone, zeros, of)

    def activate(self, x: Tensor, act: Act | GateAct | Xielu, gate: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
        self.count("activate")
        if isinstance(act, Xielu):
            return pointwise.xielu(x.float(), act.numbers).to(x.dtype)
        if gate is not None:
            return pointwise.gate(x, act, gate)
        return pointwise.activate(x.float(), act).to(x.dtype)

    def add(
        self, x: Tensor, y: Tensor, scale: float | Tensor = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(x + scale * within(y)) * times."""
        self.count("add")
        y = y if y.ndim == x.ndim else y.sum(0).to(x.dtype)  # a sum in parts
        y = y if within is None else self.norm(y, within)
        if isinstance(scale, Tensor):
            each = x.float().view(*scale.shape, -1) + y.float()[:, None] * scale[:, :, None]
            x = each.to(x.dtype).flatten(1)
        else:
            x = x + y if scale == 1.0 else x + scale * y
        return x if times is None else x * times

    def add_norm(
        self, x: Tensor, y: Tensor, norm: NormSpec, scale: float = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What `add` makes, and what a norm makes of it."""
        x = self.add(x, y, scale, within=within, times=times)
        return x, self.norm(x, norm)

    def attend(self, x: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """x [T, all heads], prepared first, or queries [T, H, Dk] -> [T, H * Dv]."""
        return self.attention(x if x.ndim == 3 else self.prepare_qkv(x, spec, ctx), spec, ctx, keys)

    def attend_latent(
        self, q: Tensor, vector: Sequence[Tensor], parts: Sequence[Tensor], spec: AttentionSpec, ctx: ForwardContext,
        keys: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """None: layers carry queries and values themselves."""
        return None

    def choose_keys(
        self, x: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext
    ) -> Tensor | None:
        """x [T, H * D + D], gains [T, H] -> positions [T, K]; of keys with equal scores the first."""
        q = self.prepare_qkv(x, spec, ctx)
        self.count("choose_keys")
        self.waits += ctx.spans is None
        return key_choice.choose(q, gains, spec, top, ctx)

    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """qkv [T, all heads] -> q [T, H, Dk] normed and rotated; keys and values go to their slots."""
        self.count("prepare_qkv")
        width, heads, touches = spec.kv.key_dim, spec.kv.heads, spec.touches
        at, past = spec.heads * width, (spec.heads + heads) * width

        def prepared(x: Tensor, norm: NormSpec | None) -> Tensor:
            return pointwise.prepare_heads(x, width, norm, spec.rope, ctx.positions, touches)

        q = pointwise.tempered(prepared(qkv[:, :at], touches.q_norm), touches.temper, ctx.positions)
        if touches.values == "stored":
            return q
        k, v = prepared(qkv[:, at:past], touches.k_norm), None
        if spec.kv.kind != "latent":
            values = qkv[:, at:past] if touches.values == "keys" else qkv[:, past:]
            v = pointwise.prepare_heads(values, spec.kv.value_dim, touches.v_norm, None, ctx.positions, touches)
            v = v if touches.factor == 1.0 else v * touches.factor
        kv, slots = ctx.kv[spec.layer], ctx.groups[spec.group].slots.long()
        block, offset = slots // ctx.block_size, slots % ctx.block_size
        stored_kv.store(kv, block, offset, k, v)
        return q

    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """q [T, H, Dk] against the paged keys and values as stored -> [T, H * Dv]."""
        self.count("attention")
        self.waits += ctx.spans is None
        return paged.attend(q, spec, ctx, keys)

    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """What the layer makes of its inputs and the states of the step's rows."""
        name, compute = states.RECURRENCES[type(spec)]
        self.count(name)
        self.waits += ctx.spans is None
        return compute(inputs, spec, state, ctx)

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
        """Where norm has a gate: x and gate [T, D] -> act(gate) norm(x), or norm(act(gate) x)."""
        self.count("gated_norm")
        return pointwise.gated_norm(x, gate, spec, size, first=first, act=act)

    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> expert ids [T, k] (int64) and gates [T, k] (float32), best first."""
        self.count("route")
        return routing.route(logits.float(), spec)

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
        """sum_j gates[t, j] * down[ids[t, j]](act(gate_up[ids[t, j]](x[t]))) -> [T, hidden], summed j = 0..k-1."""
        ids = ids if first is None else ids - first
        if act is not None:
            x = self._inside(x, weights, ids, act, ctx)
        if gates is None:
            return x if first is None else self._downs(x, weights[1], ids, ctx)
        return ReferenceKernels.add_experts(self, self._downs(x, weights[1], ids, ctx), gates, x.dtype)

    def _inside(
        self, x: Tensor, weights: tuple[list[Weight], list[Weight]], ids: Tensor, act: Act, ctx: ForwardContext
    ) -> Tensor:
        """act(gate_up[ids[t, j]](x[t])) in row t * k + j -> [T * k, inner]."""
        self.count("experts")
        found: Tensor | None = None
        for expert, (token, place) in self._visits(ids, len(weights[0])):
            y = weights[0][expert].matmul(x[token], ctx.of(token), act=act)
            if found is None:
                found = y.new_zeros(*ids.shape, y.shape[1])
            found[token, place] = y
        if found is None:  # nobody's experts: the width is all that is wanted of one
            found = weights[0][0].matmul(x[:1], ctx, act=act).new_zeros(*ids.shape, weights[1][0].shape[1])
        return found.flatten(0, 1)

    def _downs(self, y: Tensor, down: list[Weight], ids: Tensor, ctx: ForwardContext) -> Tensor:
        """down[ids[t, j]](y[t * k + j]) in row t * k + j -> [T * k, hidden] in float32."""
        y = y.view(*ids.shape, y.shape[1])
        parts = y.new_zeros(*ids.shape, down[0].shape[0], dtype=torch.float32)
        for expert, (token, place) in self._visits(ids, len(down)):
            parts[token, place] = down[expert].matmul(y[token, place], ctx.of(token)).float()
        return parts.flatten(0, 1)

    def add_experts(self, parts: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """sum_j gates[t, j] * parts[t * k + j] -> [T, hidden], summed j = 0..k-1."""
        weighed = parts.view(*gates.shape, -1) * gates[:, :, None]
        total = weighed[:, 0]
        for j in range(1, gates.shape[1]):
            total = total + weighed[:, j]
        return total.to(dtype)

    def _visits(self, ids: Tensor, count: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Every chosen expert, with the tokens and places that it was chosen in."""
        self.waits += ids.device.type != "cpu"
        for expert in torch.unique(ids).tolist():
            if 0 <= expert < count:
                yield expert, torch.where(ids == expert)

    def pack_mixture(self, mixture: Mixture) -> FusedMixture | None:
        """Nothing: layers call route and experts."""
        return None

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> lowest id of the largest logit [n] int64; the same, or ~id where that is not finite; it [n].

        NaN anywhere in a line counts as its largest logit."""
        self.count("greedy")
        ids = logits.argmax(-1)
        largest = logits.gather(1, ids[:, None])[:, 0].float()
        return ids, torch.where(largest.isfinite(), ids, ~ids), largest

    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Nothing: sampling/sampler.py does it with many operations, and is the specification."""
        return None

    def least_kept(self, s: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor | None:
        """Nothing: sampling/filters.py sorts."""
        return None

    def gather_rows(
        self,
        row_ids: Tensor,
        tokens: Tensor,
        computed: Tensor,
        tables: list[Tensor],
        block_size: int,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """Gather a step with one token for each of row_ids [S]: the row's next token, or the one `offsets` [S] behind
        it. tokens [R, L], computed [R] and tables [R, W] (entry j begins at j * block_size) -> token ids [S], positions
        [S], kv_len [S] int32, and for each table (tables [S, W], counted entries [S], slots [S])."""
        self.count("gather_rows")
        positions = computed[row_ids] if offsets is None else computed[row_ids] + offsets
        entry = positions // block_size
        groups = []
        for table in tables:
            slots = table[row_ids, entry].long() * block_size + positions % block_size
            groups.append((table[row_ids], (entry + 1).to(torch.int32), slots))
        return tokens[row_ids, positions].long(), positions, (positions + 1).to(torch.int32), groups

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
        """Gather a step in which row_ids [S] compute counts [S] tokens each. size: the total and the largest count.
        tables: (table [R, W] whose entry j begins at j * block_size, held [R], how many entries to take). -> token ids
        [T], their rows [T], positions [T], query_start [S + 1], kv_len [S] (both int32), and for each table (tables [S,
        width], held entries [S], slots [T])."""
        self.count("gather_spans")
        return gather_spans(row_ids, counts, size, tokens, computed, tables, block_size)

    def advance_(self, row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """Append one token to each of these rows: tokens[row, length[row]] = id; length and computed grow by one."""
        self.count("advance_")
        tokens[row_ids, length[row_ids]] = ids.to(torch.int32)
        length.index_add_(0, row_ids, torch.ones_like(row_ids))
        computed.index_add_(0, row_ids, torch.ones_like(row_ids))

    def accept_(
        self,
        grants: Tensor,
        most: int,
        parents: Tensor | None,
        marked: Tensor,
        tokens: Tensor,
        length: Tensor,
        computed: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        """Verify drafts. grants [3, S] int64: rows, the first line of each, and how many drafts it tried (at most
        `most`), which lie behind its known tokens. A row has one line more than drafts; marked [n]: each line's sample,
        ~id if it is bad. Samples stand up to and including the first that differs from its draft; a bad one stands only
        as the row's first. Samples that stand become known tokens, and computed = the new length - 1. -> None, how many
        stand [S].

        parents [S, N] int64: drafts are nodes of trees. It has the parent of the j-th draft: 1 + an earlier draft's
        number, or 0 for the newest known token. Line 1 + j is the j-th draft's. The last row of grants [4, S] says how
        many drafts may stand one behind the other (at most `most`). A draft is right if it is the sample behind its
        parent; of equal drafts the first is. -> path [S, 1 + most]: the line, counted from the row's first, of each
        sample that may stand, and how many do stand [S].

        (What follows a wrong draft is no part of the text; a bad line that is fails again, as its row's first.)"""
        self.count("accept_")
        if parents is None:
            return None, self.accept_chains_(grants, most, marked, tokens, length, computed)
        return self.accept_trees_(grants, most, parents, marked, tokens, length, computed)

    def accept_chains_(self, *given: Any) -> Tensor:
        """kernels/accept.py; what backends have their own of."""
        return accept.accept_chains_(*given)

    def accept_trees_(self, *given: Any) -> tuple[Tensor, Tensor]:
        """The same for trees."""
        return accept.accept_trees_(*given)

    def look_up_(
        self, row_ids: Tensor, count: int, sizes: tuple[int, int], reach: int, tokens: Tensor, length: Tensor
    ) -> None:
        """Leave `count` guesses behind the known tokens (at most `reach`) of each of row_ids [S]: the tokens that
        followed the latest earlier occurrence of the row's last tokens. sizes: the least and the most tokens to match,
        the longest match first. If the row ends before `count` tokens, they repeat from their beginning; without an
        occurrence the last token is taken. tokens [R, L] int32, length [R]."""
        self.count("look_up_")
        lookup.look_up_(row_ids, count, sizes, reach, tokens, length)

    def copy_rows_(self, pairs: Sequence[tuple[Tensor, Tensor]], froms: Tensor, tos: Tensor) -> None:
        """Copy row froms[i] of the first tensor of each pair to row tos[i] of the second, for froms and tos [n] int64.
        Rows of a pair are equal in bytes. No copy reads what another one writes, and a copy of a row to itself does
        nothing. pairs: the same object each time."""
        self.count("copy_rows_")
        for source, target in pairs:
            target.index_copy_(0, tos, source.index_select(0, froms))

    def move_kv_(self, kv: list[KVView], src: Tensor, dst: Tensor) -> None:
        """Copy the contents of slots src [S, W] to slots dst [S, W] in each of these layers' pages. Lines share no
        slots. In a line no copy reads what an earlier one has written, and a copy of a slot to itself does nothing."""
        self.count("move_kv_")
        src, dst = src.flatten(), dst.flatten()
        for view in kv:
            size = view.key.shape[2]
            for part in stored_kv.page_parts(view):
                plain = part.view(torch.uint8)
                plain[dst // size, :, dst % size] = plain[src // size, :, src % size]
